"""The faults of such a norm that its official inputs may hide, in float64, and the inputs that show them.

Asked for by name: hard_coded_statistics, eps_dropped, half_inside, and for a mean unbiased_variance (n - 1 for n).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.faults import Fault, Faults
from kbsub.eval.operators.unit_norm.formula import DIM, Norm, divisor

NARROW = (64, 4, 1, 1)  # where n - 1 differs most from n
HALF_OFFSET = 1024.0  # float16 counts in ones there, bfloat16 in eights: [0, 1) on top of it disappears


class UnitNormFaults(Faults):
    """init_inputs: the task's own constructor arguments, which fix no size."""

    def __init__(self, norm: Norm, eps: float, init_inputs: list[Any]) -> None:
        self.norm, self.eps, self._init = norm, eps, list(init_inputs)
        self._known: dict[str, Callable[[torch.Tensor], Fault]] = {
            "hard_coded_statistics": self._hard_coded,
            "eps_dropped": self._eps_dropped,
            "half_inside": lambda x: Fault(x + HALF_OFFSET, f"x + {HALF_OFFSET:g}"),
            "unbiased_variance": self._unbiased,
        }

    def fault(self, name: str, x: torch.Tensor) -> Fault:
        if name not in self._known:
            raise OracleError(
                f"no fault of x / ({self.norm.value}) is called {name}; there are: {', '.join(self._known)}"
            )
        return self._known[name](x)

    def _hard_coded(self, x: torch.Tensor) -> Fault:
        by = float(divisor(x, self.norm, self.eps).mean())

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return given.double() / by

        return Fault(3 * x + 7, "3 * x + 7", f"that of x divided by {by:.4f}", answer)

    def _eps_dropped(self, x: torch.Tensor) -> Fault:
        if self.norm is not Norm.RMS or self.eps <= 0:
            raise OracleError("this norm adds no eps")
        # A mean square of eps / 100: with eps the answer shrinks tenfold.
        scale = (self.eps / 100 / float((x.double() ** 2).mean())) ** 0.5

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return given.double() / divisor(given, self.norm, 0.0)

        return Fault(x * scale, "a mean square of eps / 100", "that of eps 0", answer)

    def _unbiased(self, x: torch.Tensor) -> Fault:
        if self.norm is Norm.L2:
            raise OracleError("this norm divides by no count")
        shape = NARROW[: x.dim()]
        narrow = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        n = shape[DIM]

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            wide = given.double()
            if self.norm is Norm.MEAN_ABS:
                return wide / (wide.abs().sum(DIM, keepdim=True) / (n - 1))
            return wide / ((wide * wide).sum(DIM, keepdim=True) / (n - 1) + self.eps).sqrt()

        return Fault(narrow, f"{n} elements a norm", f"that of a mean over {n - 1}", answer, self._init)
