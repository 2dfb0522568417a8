"""What the guards ask of an operator: wrong answers that a task's own inputs may hide, inputs that show them.

Nothing here, and nothing that implements it, knows a candidate or a guard: a fault is asked for by its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fault:
    """One wrong answer, and an input on which it is far from the true one.

    x: the task's main input; the judge casts it to the task's dtype. where: what x is, in words. init_inputs: the
    constructor arguments that go with x; None: the task's own. answer: (the reference in float64, x as cast) -> the
    faulty answer, float64, of the output's shape; None: the fault has no formula. wrong: that answer, in words.
    """

    x: torch.Tensor
    where: str
    wrong: str = ""
    answer: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor] | None = None
    init_inputs: list[Any] | None = None


class Faults:
    """What is known of the faults of one task, at the size that its constructor arguments give."""

    def fault(self, name: str, x: torch.Tensor) -> Fault:
        """The fault of this name for a task whose own main input is `x`, of any device and float dtype.

        Raises OracleError where this task has no such fault; its message says why.
        """
        raise NotImplementedError
