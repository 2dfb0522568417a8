"""One scene of a benchmark: a shape and a precision with several input sets, their reference outputs, and the checks.

A program is timed on input *buffers*; what they hold rotates. Round r shows set (r mod S) at the captured address, and
upstream's methods get buffer (p mod S) in pass p, whose set moves on each time round, so that an answer remembered by
address is wrong the next time. Knows torch and the task; nothing of candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbsub.adapters.task import SEED, Modules, Task
from kbsub.eval.baselines import BASELINES
from kbsub.eval.predicate import OFFICIAL_TOLERANCE
from kbsub.eval.stale import StaleCheck

OFFICIAL = "official"


class SceneError(Exception):
    """The reference itself cannot be run in this scene."""


class BenchScene:
    """Contents, buffers and expected outputs of one shape; everything on `device` in the task's dtype.

    `shape` is None for the task's own get_inputs, else {"inputs": [[rows, ...], ...], "init": [[...], ...], "seed": n}:
    uniform inputs of these shapes made on the device, and the constructor's arguments (a list stands for a tuple).
    """

    def __init__(self, task: Task, device: torch.device, shape: Mapping[str, Any] | None, sets: int) -> None:
        self.task, self.device, self.shape = task, device, shape
        self.modules: Modules = task.modules()
        self.tolerance = OFFICIAL_TOLERANCE[task.dtype]
        torch.manual_seed(SEED)
        init = self.modules.get_init_inputs() if shape is None else [_tuple(v) for v in shape["init"]]
        self.init_inputs: list[Any] = task.cast(list(init), device)
        self.contents = [self._inputs(index) for index in range(sets)]
        self.buffers = [_clone(content) for content in self.contents]
        self.reference = self.build(self.modules.Model)
        self.expected: list[torch.Tensor] = []
        for content in self.contents:
            with torch.no_grad():
                output = self.reference(*_clone(content))
            if not isinstance(output, torch.Tensor):
                raise SceneError(f"{task.name}: the reference returns a {type(output).__name__}, a tensor is needed")
            self.expected.append(output)
        self.stale = StaleCheck(self.reference, self.tolerance)
        self.identical: dict[str, list[bool]] = {}
        self.own: dict[str, list[torch.Tensor]] = {}  # what a program that is no implementation of the task gave first
        self._showing: list[int | None] = list(range(sets))  # which set each buffer holds; None: spoiled
        self._active = 0  # the buffer that was loaded last

    def _inputs(self, index: int) -> list[Any]:
        if self.shape is None:
            torch.manual_seed(SEED + index)  # set 0 is the official timing input
            return self.task.cast(list(self.modules.get_inputs()), self.device)
        generator = torch.Generator(self.device).manual_seed(int(self.shape["seed"]) + index)
        sizes = self.shape["inputs"]
        return [torch.rand(size, generator=generator, device=self.device).to(self.task.dtype) for size in sizes]

    def build(self, model_class: Any) -> torch.nn.Module:
        """An instance with the official seed before its constructor, moved and cast as upstream does."""
        torch.manual_seed(SEED)
        with torch.no_grad():
            model = model_class(*self.init_inputs)
            moved: torch.nn.Module = model.to(device=self.device, dtype=self.task.dtype)
        return moved

    @property
    def bytes_moved(self) -> int:
        """Bytes of inputs, parameters, buffers and output: each read or written once."""
        tensors = [t for t in self.contents[0] if isinstance(t, torch.Tensor)]
        tensors += [*self.reference.parameters(), *self.reference.buffers(), self.expected[0]]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs alone: what a second read of them adds."""
        return sum(t.numel() * t.element_size() for t in self.contents[0] if isinstance(t, torch.Tensor))

    def load(self, round_index: int) -> int:
        """Show this round's set at the captured address, buffer 0; returns the number of the set."""
        return self._show(0, round_index % len(self.contents))

    def load_pass(self, pass_index: int) -> tuple[list[Any], int]:
        """This pass's buffer, another address than the last one's, and the set it holds: (arguments, set number).

        Once round, every address holds another set than before.
        """
        sets = len(self.contents)
        buffer = pass_index % sets
        return self.buffers[buffer], self._show(buffer, (pass_index + pass_index // sets) % sets)

    def captured_arguments(self) -> list[Any]:
        """Buffer 0, on which graphs are captured."""
        return self.buffers[0]

    def _show(self, buffer: int, chosen: int) -> int:
        if self._showing[buffer] != chosen:
            _copy(self.buffers[buffer], self.contents[chosen])
            self._showing[buffer] = chosen
        self._active = buffer
        return chosen

    def check(self, name: str, output: Any, set_index: int) -> str | None:
        """What is wrong with an output made from this set, or None. Notes whether it was bit-equal to the reference.

        Upstream's predicate: torch.allclose(reference, candidate) with atol = rtol = its tolerance, equal_nan off. An
        input that the program has changed is a complaint too, and is mended for the next program.
        """
        complaint = self.difference(name, output, set_index)
        if not _equal(self.buffers[self._active], self.contents[set_index]):
            self._showing[self._active] = None  # to be written again before the next program
            complaint = complaint or "it changed its input"
        return complaint

    def difference(self, name: str, output: Any, set_index: int) -> str | None:
        """What is wrong with an output made from this set, whatever buffer it came from; None when nothing is."""
        return self._difference(output, self._expected(name, set_index), name)

    def check_changed(self, name: str, program: Any, set_index: int, seed: int) -> str | None:
        """As kbsub.eval.stale: what is wrong when the program is replayed on buffer 0 with one element changed."""
        complaint = self.changed(name, program, self.buffers[0], set_index, seed)
        self._showing[0] = None  # to be written again, whatever this replay did to it
        return complaint

    def changed(self, name: str, program: Any, held: list[Any], set_index: int, seed: int) -> str | None:
        """`check_changed` on any buffer that holds this set. Nothing is asked of a program that computes another
        function: there is no reference for the changed input."""
        if name in self.own:
            return None
        copies = name in BASELINES and BASELINES[name].floor
        return self.stale.complaint(program, held, self._expected(name, set_index), seed, copies)

    def hold_to_itself(self, name: str, program: Callable[..., Any]) -> None:
        """Expect of this program what it gives now, for a program that says it computes another function."""
        self.own[name] = [program(*_clone(content)) for content in self.contents]

    def _expected(self, name: str, set_index: int) -> torch.Tensor:
        """The reference's output, a floor program's input that it copies, or what a program is held to of its own."""
        if name in self.own:
            return self.own[name][set_index]
        if name in BASELINES and BASELINES[name].floor:
            return next(value for value in self.contents[set_index] if isinstance(value, torch.Tensor))
        return self.expected[set_index]

    def _difference(self, output: Any, expected: torch.Tensor, name: str) -> str | None:
        if not isinstance(output, torch.Tensor):
            return f"returned a {type(output).__name__}"
        if output.shape != expected.shape:
            return f"output shape {tuple(output.shape)}, expected {tuple(expected.shape)}"
        if output.dtype != expected.dtype:
            return f"output dtype {output.dtype}, expected {expected.dtype}"
        self.identical.setdefault(name, []).append(bool(torch.equal(output, expected)))
        if torch.allclose(expected, output, atol=self.tolerance, rtol=self.tolerance):
            return None
        difference = (expected.float() - output.float()).abs().flatten()
        bad = int(torch.argmax(torch.nan_to_num(difference, nan=float("inf"))).item()) if difference.numel() else 0
        right, wrong = expected.flatten()[bad].item(), output.flatten()[bad].item()
        return f"wrong output: element {bad} is {wrong!r}, the reference has {right!r} (tolerance {self.tolerance:g})"


def _tuple(value: Any) -> Any:
    return tuple(_tuple(v) for v in value) if isinstance(value, list) else value


def _clone(values: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, torch.Tensor) else v for v in values]


def _copy(target: list[Any], source: list[Any]) -> None:
    with torch.no_grad():
        for to, value in zip(target, source, strict=True):
            if isinstance(to, torch.Tensor):
                to.copy_(value)


def _equal(left: list[Any], right: list[Any]) -> bool:
    """Bit equality of the float tensors; NaN inputs compare by torch.equal, which no task of the suite has."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True) if isinstance(a, torch.Tensor))
