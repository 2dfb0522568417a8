"""The reference of a task as upstream sets it up, its trials, and other models and inputs of the same kind.

Seeds, order and casts are those of upstream's `eval_kernel_against_ref` and `run_and_check_correctness`: the model from
seed 42, five trials of seeds that are drawn from it, inputs before the output, the candidate after the reference on
the same inputs.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from kbsub.adapters.task import CORRECTNESS_TRIALS, SEED, Modules, Task, trial_seeds
from kbsub.eval.blindspots.calls import Call, Calls, Profile, Visit
from kbsub.eval.blindspots.draw import draw, seed_everything
from kbsub.eval.process.isolated import is_out_of_memory


class NotTried(Exception):
    """A variant that cannot be made of this reference; the message says why."""


class ReferenceFails(NotTried):
    """The reference raises on the inputs that upstream gives it: no candidate can pass."""


def seeds_of(task_trials: int = CORRECTNESS_TRIALS) -> tuple[list[int], int]:
    """(the seeds of upstream's trials, another one: the next number of the same stream)."""
    *trials, another = trial_seeds(task_trials + 1)
    return trials, another


class Reference:
    """One task on one device: its model and what the variants need of it. `another`: a seed that is no trial's."""

    def __init__(self, task: Task, device: str, another: int) -> None:
        self.task, self.device, self.another = task, device, another
        self.modules: Modules = task.modules()
        self.model = self._built(SEED, "cpu").to(device=device, dtype=task.dtype)
        self.calls: list[Call] = []
        self._other_model: torch.nn.Module | None = None
        self.mutates = False  # forward writes into its inputs

    def _built(self, seed: int, device: str) -> torch.nn.Module:
        """Model(*get_init_inputs()) as upstream makes it: on the CPU, in float32, seeded before both."""
        with torch.device(device) if device != "cpu" else contextlib.nullcontext():
            seed_everything(seed)
            arguments = self.task.cast(self.modules.get_init_inputs(), device)
            seed_everything(seed)
            model: torch.nn.Module = self.modules.Model(*arguments)
            return model

    def other_model(self) -> torch.nn.Module:
        """The same model with another seed's parameters, drawn on the device."""
        if self._other_model is None:
            try:
                model = self._built(self.another, self.device)
            except RuntimeError:  # a constructor that mixes devices
                model = self._built(self.another, "cpu")
            self._other_model = model.to(device=self.device, dtype=self.task.dtype)
        return self._other_model

    def other_inputs(self) -> list[Any]:
        """Inputs of another draw, on the device, cast; drawn again on every call, so that nobody holds them."""
        seed_everything(self.another)
        return self.task.cast(self.modules.inputs_on(self.device), self.device)

    def profile(self) -> torch.Tensor:
        """Runs forward on another draw; keeps its calls; returns that output."""
        profile = Profile()
        inputs = self.other_inputs()
        before = versions(inputs)
        with Calls(profile.visit):
            output: torch.Tensor = self.model(*inputs)
        self.calls = profile.calls
        self.mutates = versions(inputs) != before
        return output

    def trial(self, seed: int) -> Trial:
        """Draws upstream's inputs of this trial and runs the reference on them."""
        inputs, how = draw(self.modules.get_inputs, seed, self.device)
        inputs = self.task.cast(inputs, self.device)
        seed_everything(seed)
        try:
            output = self.model(*inputs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
            raise ReferenceFails(f"the reference raises on upstream's inputs: {text}") from error
        if not isinstance(output, torch.Tensor):
            raise NotTried(f"upstream's check reads the shape of one tensor; forward returns a {type(output).__name__}")
        return Trial(self, seed, inputs, output, how)


def versions(inputs: list[Any]) -> list[int]:
    return [each._version for each in inputs if isinstance(each, torch.Tensor)]


@dataclass
class Trial:
    """One of upstream's trials: `inputs` as a candidate gets them, after the reference, whose `output` this is."""

    reference: Reference
    seed: int
    inputs: list[Any]
    output: torch.Tensor
    drawn: str
    random_state: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random_state = [torch.get_rng_state()]
        if self.reference.device != "cpu":
            self.random_state.append(torch.cuda.get_rng_state())

    def run(self, inputs: list[Any] | None = None, model: torch.nn.Module | None = None) -> torch.Tensor:
        """What the (or this) model says to the (or these) inputs, from the random state that a candidate starts in."""
        torch.set_rng_state(self.random_state[0])
        if len(self.random_state) > 1:
            torch.cuda.set_rng_state(self.random_state[1])
        given = self.inputs if inputs is None else inputs
        if self.reference.mutates:
            given = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
        output = (model or self.reference.model)(*given)
        if not isinstance(output, torch.Tensor):
            raise NotTried(f"forward returns a {type(output).__name__}")
        return output

    def run_with(self, visit: Visit, inputs: list[Any] | None = None) -> torch.Tensor:
        """The same with `visit` deciding what each call of forward gives."""
        with Calls(visit):
            return self.run(inputs)

    def run_as(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole task in another dtype: parameters, inputs and what forward makes of them."""
        model = copy.deepcopy(self.reference.model).to(dtype)
        inputs = [
            each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each
            for each in self.inputs
        ]
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            return self.run(inputs, model)
        finally:
            torch.set_default_dtype(before)

    @contextlib.contextmanager
    def parameter_as(self, name: str, value: torch.Tensor) -> Iterator[None]:
        """The model with a parameter's values overwritten in place: recurrent layers keep pointers to it."""
        parameter = dict(self.reference.model.named_parameters())[name].data
        kept = parameter.clone()
        parameter.copy_(value)
        try:
            yield
        finally:
            parameter.copy_(kept)
