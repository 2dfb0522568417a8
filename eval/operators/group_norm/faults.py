"""The faults of these norms that official inputs may hide, in float64, and the inputs that show them.

Asked for by name: hard_coded_statistics, eps_dropped, unbiased_variance, cancelling_variance, half_inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.faults import Fault, Faults
from kbsub.eval.operators.group_norm.formula import Layer, layer_of

OFFSET = 3e4  # squares of 9e8 are spaced 64 apart in float32, so mean(x^2) - mean(x)^2 loses a variance of 1/12
HALF_OFFSET = 1024.0  # float16 counts in ones there, bfloat16 in eights: [0, 1) on top of it disappears
FEW_PIXELS = (2, 2)  # where n - 1 differs from n


class GroupNormFaults(Faults):
    """kind: of the Model's one module; layer: what was read from it; init_inputs: the task's constructor arguments."""

    def __init__(self, kind: type[torch.nn.Module], layer: Layer, init_inputs: list[Any]) -> None:
        self.kind, self.eps, self._init = kind, layer.eps, list(init_inputs)
        self._known: dict[str, Callable[[torch.Tensor], Fault]] = {
            "hard_coded_statistics": self._hard_coded,
            "eps_dropped": self._eps_dropped,
            "unbiased_variance": self._unbiased,
            "cancelling_variance": lambda x: Fault(x + OFFSET, f"x + {OFFSET:g}"),
            "half_inside": lambda x: Fault(x + HALF_OFFSET, f"x + {HALF_OFFSET:g}"),
        }

    def fault(self, name: str, x: torch.Tensor) -> Fault:
        if name not in self._known:
            raise OracleError(f"no fault of {self.kind.__name__} is called {name}; there are: {', '.join(self._known)}")
        return self._known[name](x)

    def _hard_coded(self, x: torch.Tensor) -> Fault:
        mean, variance = x.double().mean(), x.double().var()
        wrong = f"that of mean {float(mean):.3f} and variance {float(variance):.3f}"

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return self._affine(model, (given.double() - mean) / torch.sqrt(variance + self.eps))

        return Fault(3 * x + 7, "3 * x + 7", wrong, answer)

    def _eps_dropped(self, x: torch.Tensor) -> Fault:
        if self.eps <= 0:
            raise OracleError("the task's eps is 0")
        scale = (self.eps / 100 / float(x.double().var())) ** 0.5  # with eps the answer shrinks tenfold

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return self._affine(model, self._normalised(model, given, 0, 0.0))

        return Fault(x * scale, "a variance of eps / 100", "that of eps 0", answer)

    def _unbiased(self, x: torch.Tensor) -> Fault:
        shape = (4, x.shape[1], *FEW_PIXELS)
        narrow = torch.randn(shape, generator=torch.Generator().manual_seed(5))

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return self._affine(model, self._normalised(model, given, 1, self.eps))

        return Fault(narrow, f"planes of {math.prod(FEW_PIXELS)}", "that of n - 1 for n", answer, self._init)

    def _normalised(self, model: torch.nn.Module, x: torch.Tensor, correction: int, eps: float) -> torch.Tensor:
        groups = layer_of(model, self.kind).groups or x.shape[1]
        rows = x.double().reshape(x.shape[0] * groups, -1)
        var = rows.var(dim=1, correction=correction, keepdim=True)
        return ((rows - rows.mean(dim=1, keepdim=True)) / torch.sqrt(var + eps)).reshape(x.shape)

    def _affine(self, model: torch.nn.Module, z: torch.Tensor) -> torch.Tensor:
        layer = layer_of(model, self.kind)
        shape = (1, -1, *(1 for _ in range(z.dim() - 2)))
        if layer.weight is not None:
            z = z * layer.weight.detach().double().reshape(shape)
        return z if layer.bias is None else z + layer.bias.detach().double().reshape(shape)
