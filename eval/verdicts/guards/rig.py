"""The test bench that every guard works on: one task, one device, and a candidate somewhere.

Knows how to build a reference and a candidate with equal parameters, how to make inputs, and what the true answer is
(the task's own Model in float64). Faults come from its operator. Where the candidate is, in a worker (remote_rig.py) or
in this process (inside_rig.py), a subclass knows. Must know neither what a guard looks for nor what one computes.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kbsub.adapters.refusal import reference_asked, short_error
from kbsub.adapters.task import SEED, Modules, Task
from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.faults import Fault, Faults
from kbsub.eval.operators.register import operator_of
from kbsub.eval.process.isolated import JudgeFailure, Status
from kbsub.eval.suite.matching import Forms, StateMatch
from kbsub.eval.suite.setting import match_of, state_for
from kbsub.eval.tasks.toml_file import TaskFolderError
from kbsub.eval.verdicts.guards.applicability import NotApplicable

# Guards look for gross faults: a probe's answer counts as right within this (in units of the true answer's rms).
# Eager float32 stays below 0.07 on the hardest probe (offset 3e4, 4 million elements a row).
LOOSE = 0.25
NOTHING_KNOWN = "nothing is known of such a fault: the task's task.toml declares no operator that knows it"
_NO_FLOAT64 = "the task's own Model does not run in float64: {}"


@dataclass
class Made:
    """A candidate's instance, as constructed: what its state dict has, how to read it and how to load a part of it."""

    candidate: Any
    forms: Forms
    state: Callable[[], Mapping[str, torch.Tensor]]
    load: Callable[[Mapping[str, torch.Tensor]], None]


@dataclass
class Pair:
    """A reference and a candidate with the same parameters, both in eval mode as constructed."""

    reference: torch.nn.Module
    candidate: Any
    load: Callable[[Mapping[str, torch.Tensor]], None]  # copies tensors under the candidate's keys into it, in place
    match: StateMatch | None  # which of the candidate's tensors are the reference's; None: not known
    truth: torch.nn.Module | None  # the reference in float64; follows `reference` only through `sync`
    no_truth: str = ""  # why there is none

    def sync(self) -> None:
        """Copy the reference's parameters to the candidate and to the float64 copy, in place."""
        with torch.no_grad():
            state = self.reference.state_dict()
            if self.match is not None:
                self.load(state_for(self.match, state))
            if self.truth is not None:
                self.truth.load_state_dict(state)

    def float64(self) -> torch.nn.Module:
        """The reference in float64. NotApplicable for one that cannot be widened."""
        if self.truth is None:
            raise NotApplicable(self.no_truth)
        return self.truth


class Rig(ABC):
    """`calls`: how often the long-run guard calls the candidate. Tensors live on `device` in the task's dtype."""

    def __init__(self, task: Task, modules: Modules, device: torch.device, calls: int) -> None:
        self.task, self.modules = task, modules
        self.device, self.dtype, self.calls = device, task.dtype, calls
        with reference_asked(NotApplicable):
            self.init = modules.get_init_inputs()
        self._inputs: dict[int, list[Any]] = {}
        self.faults = self._known_faults()

    # ---- what the task is ----

    def _known_faults(self) -> Faults | None:
        """None: nothing is known. NotApplicable: the declared operator is not the Model's, or there is none such."""
        with fork_rng(), reference_asked(NotApplicable):
            try:
                return operator_of(self.task).faults(self.modules, self.init)
            except (OracleError, TaskFolderError) as why:
                raise NotApplicable(str(why)) from why

    def fault(self, name: str) -> Fault:
        """What the task's operator knows of a fault. NotApplicable where it knows nothing."""
        if self.faults is None:
            raise NotApplicable(NOTHING_KNOWN)
        try:
            return self.faults.fault(name, self.main_input(1))
        except OracleError as why:
            raise NotApplicable(str(why)) from why

    def pair_for(self, fault: Fault) -> tuple[Pair, list[Any]]:
        """A pair and the inputs on which the fault shows."""
        return self.build(fault.init_inputs), self.with_main(1, fault.x)

    # ---- inputs ----

    def inputs(self, seed: int) -> list[Any]:
        """Fresh copies of the task's inputs for a seed."""
        if seed not in self._inputs:
            with fork_rng(), reference_asked(NotApplicable):
                torch.manual_seed(seed)
                values = self.modules.inputs_on(self.device)
            self._inputs[seed] = self.task.cast(values, self.device)
        return [value.clone() if isinstance(value, torch.Tensor) else value for value in self._inputs[seed]]

    def main_input(self, seed: int) -> torch.Tensor:
        """The first floating-point input: the tensor that probes transform."""
        main: torch.Tensor = self.inputs(seed)[self.main_index]
        return main

    @cached_property
    def main_index(self) -> int:
        for index, value in enumerate(self.inputs(0)):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return index
        raise NotApplicable("the task has no floating-point input")

    def with_main(self, seed: int, main: torch.Tensor) -> list[Any]:
        """The task's inputs for a seed with the main one replaced by `main`, cast to the task's dtype."""
        values = self.inputs(seed)
        values[self.main_index] = main.to(device=self.device, dtype=self.dtype).contiguous()
        return values

    # ---- models ----

    def build(self, init: list[Any] | None = None) -> Pair:
        """A pair with equal parameters: upstream's seed before each constructor, then the reference's state dict."""
        arguments = self.task.cast(self.init if init is None else init, self.device)
        with fork_rng(), torch.no_grad():
            torch.manual_seed(SEED)
            with reference_asked(NotApplicable):
                reference = self.modules.Model(*arguments).to(device=self.device, dtype=self.dtype)
            made = self.construct(arguments)
            match = match_of(made.forms, made.state, reference, reference.state_dict())
        pair = Pair(reference, made.candidate, made.load, match, *_widened(reference))
        pair.sync()  # without a match: same seed, same constructor order; upstream relies on no more than that
        return pair

    @abstractmethod
    def construct(self, arguments: list[Any]) -> Made:
        """A new instance of the candidate, after upstream's seed."""

    @abstractmethod
    def call(self, pair: Pair, inputs: list[Any], *, grad: bool = False) -> torch.Tensor:
        """One forward of the candidate, under no_grad (upstream's correctness trials) or not (its timed ones).

        Returns the output detached. ValueError is a refusal of the input and passes through.
        """

    def expected(self, pair: Pair, inputs: list[Any]) -> torch.Tensor:
        """The reference's own answer, under no_grad. NotApplicable where it has none: no candidate is to blame."""
        with torch.no_grad(), reference_asked(NotApplicable):
            answer = pair.reference(*inputs)
        if not isinstance(answer, torch.Tensor):
            raise JudgeFailure(
                Status.NOT_RUN, f"guards judge tasks that return one tensor, not {type(answer).__name__}"
            )
        return answer

    def truth(self, pair: Pair, inputs: list[Any]) -> torch.Tensor:
        """The float64 answer to the inputs as given."""
        wide = [
            value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for value in inputs
        ]
        self.require_repeatable()
        model = pair.float64()
        try:
            with fork_rng(), torch.no_grad():
                answer = model(*wide)
        except Exception as error:
            raise NotApplicable(_NO_FLOAT64.format(short_error(error))) from error
        if not isinstance(answer, torch.Tensor):
            raise JudgeFailure(Status.NOT_RUN, "guards judge tasks that return one tensor")
        return answer

    def of_rounding(self, pair: Pair, inputs: list[Any], truth: torch.Tensor, answer: torch.Tensor) -> bool:
        """Whether the reference's own answer is rounding for the most part, as where the true one is next to zero (the
        mean of a normalised tensor), and this one is off by no more than eight times as much."""
        own = distance(self.expected(pair, inputs), truth)
        return own > LOOSE * rms(truth) and distance(answer, truth) <= 8 * own

    @cached_property
    def reference_draws(self) -> bool:
        """Whether the task itself moves the global generator in forward (dropout): then a candidate may, too."""
        with fork_rng(), torch.no_grad(), reference_asked(NotApplicable):
            model = self.modules.Model(*self.task.cast(self.init, self.device)).to(device=self.device, dtype=self.dtype)
            inputs = self.inputs(0)
            before = _generators()
            model(*inputs)
            return any(not torch.equal(old, new) for old, new in zip(before, _generators(), strict=True))

    def require_repeatable(self) -> None:
        if self.reference_draws:
            raise NotApplicable("the task draws random numbers in forward, so no two answers need be alike")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def one_tensor(output: Any) -> torch.Tensor:
    """What a candidate returned, where it is one tensor. JudgeFailure NOT_RUN otherwise."""
    if not isinstance(output, torch.Tensor):
        raise JudgeFailure(
            Status.NOT_RUN, f"guards judge candidates that return one tensor, not {type(output).__name__}"
        )
    return output


def cuda_is_up() -> bool:
    """Whether this process has a CUDA context; asking creates none."""
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _widened(reference: torch.nn.Module) -> tuple[torch.nn.Module | None, str]:
    """(a float64 copy, ""), or (None, why there is none): only the guards that need the truth go without it."""
    try:
        return copy.deepcopy(reference).double(), ""
    except Exception as error:
        return None, _NO_FLOAT64.format(short_error(error))


def _generators() -> list[torch.Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if cuda_is_up() else ())]


@contextmanager
def fork_rng() -> Iterator[None]:
    """torch.random.fork_rng for the CPU and every CUDA device, without its warning about many devices."""
    devices = list(range(torch.cuda.device_count())) if cuda_is_up() else []
    with torch.random.fork_rng(devices=devices):
        yield


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square difference in float64; infinite when the shapes differ or any difference is not finite."""
    if one.shape != other.shape:
        return math.inf
    if one.numel() == 0:
        return 0.0
    value = float(torch.mean((one.detach().double() - other.detach().double()).square()).sqrt())
    return value if math.isfinite(value) else math.inf


def rms(tensor: torch.Tensor) -> float:
    """Root mean square of a tensor's finite elements, never zero."""
    finite = tensor.isfinite()
    total = float(torch.where(finite, tensor.double(), 0.0).square().sum())
    return max(math.sqrt(total / max(int(finite.sum()), 1)), 1e-30)


def nearer(answer: torch.Tensor, fault: torch.Tensor, truth: torch.Tensor) -> tuple[float, float] | None:
    """(distance to the fault's answer, to the truth) when the answer is twice as near to the fault, else None."""
    to_fault, to_truth = distance(answer, fault), distance(answer, truth)
    return (to_fault, to_truth) if 2 * to_fault < to_truth else None


def same(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-3) -> bool:
    """Equal bits, or equal within `tolerance` of the rms with NaN and infinities in the same places."""
    if torch.equal(one, other):
        return True
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=tolerance, atol=tolerance * rms(other), equal_nan=True
    )
