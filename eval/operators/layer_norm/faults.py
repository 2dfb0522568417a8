"""The faults of a LayerNorm that its official inputs may hide, as formulas in float64, and the inputs that show them.

Asked for by name: hard_coded_statistics, eps_dropped, unbiased_variance, cancelling_variance, half_inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.faults import Fault, Faults
from kbsub.eval.operators.layer_norm.formula import layer_norm_of

NARROW = (64, 4)  # rows and width of the shape where N - 1 differs most from N
OFFSET = 3e4  # squares of 9e8 are spaced 64 apart in float32, so mean(x^2) - mean(x)^2 loses a variance of 1/12
HALF_OFFSET = 1024.0  # float16 counts in ones there, bfloat16 in eights: [0, 1) on top of it disappears


class LayerNormFaults(Faults):
    """`layer`: the reference's LayerNorm, of any device; its one constructor argument is the normalised shape."""

    def __init__(self, layer: torch.nn.LayerNorm, argument: Any) -> None:
        self.shape, self.eps, self._argument = tuple(layer.normalized_shape), layer.eps, argument
        self._known: dict[str, Callable[[torch.Tensor], Fault]] = {
            "hard_coded_statistics": self._hard_coded_statistics,
            "eps_dropped": self._eps_dropped,
            "unbiased_variance": self._unbiased_variance,
            "cancelling_variance": lambda x: Fault(x + OFFSET, f"x + {OFFSET:g}"),
            "half_inside": lambda x: Fault(x + HALF_OFFSET, f"x + {HALF_OFFSET:g}"),
        }

    def names(self) -> list[str]:
        """The faults that can be asked for."""
        return list(self._known)

    def fault(self, name: str, x: torch.Tensor) -> Fault:
        if name not in self._known:
            raise OracleError(f"no fault of a LayerNorm is called {name}; there are: {', '.join(self._known)}")
        return self._known[name](x)

    def _hard_coded_statistics(self, x: torch.Tensor) -> Fault:
        mean, variance = x.double().mean(), x.double().var()
        wrong = f"that of mean {float(mean):.3f} and variance {float(variance):.3f}"

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return _affine(model, given, mean, variance, self.eps)

        return Fault(3 * x + 7, "3 * x + 7", wrong, answer)

    def _eps_dropped(self, x: torch.Tensor) -> Fault:
        if self.eps <= 0:
            raise OracleError("the task's eps is 0")
        # A variance of eps / 100: with eps the answer shrinks tenfold.
        scale = (self.eps / 100 / float(x.double().var())) ** 0.5

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return _affine(model, given, *_statistics(given, len(self.shape)), 0.0)

        return Fault(x * scale, "a variance of eps / 100", "that of eps 0", answer)

    def _unbiased_variance(self, x: torch.Tensor) -> Fault:
        """On 64 rows of width 4, with as many dimensions as the task's own shapes have."""
        rows, width = NARROW
        shape = (width, *(1 for _ in self.shape[1:]))
        sizes = (rows, *(1 for _ in range(x.dim() - len(shape) - 1)), *shape)
        narrow = torch.randn(sizes, generator=torch.Generator().manual_seed(5))

        def answer(model: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            return _affine(model, given, *_statistics(given, len(shape), correction=1), self.eps)

        where = f"rows of {width}"
        return Fault(narrow, where, f"that of a variance divided by {width - 1}", answer, self._init_of(shape))

    def _init_of(self, shape: Sequence[int]) -> list[Any]:
        """Constructor arguments for another shape, of the type that the task's own have."""
        return [shape[0] if isinstance(self._argument, int) else type(self._argument)(shape)]


def faults_of(layer: torch.nn.LayerNorm, init_inputs: Sequence[Any]) -> LayerNormFaults | None:
    """The faults of a task with this layer; None where its other sizes are not known: its constructor takes anything
    but the normalised shape."""
    if len(init_inputs) != 1 or not isinstance(init_inputs[0], (int, list, tuple)):
        return None
    argument = init_inputs[0]
    shape = (argument,) if isinstance(argument, int) else tuple(argument)
    return LayerNormFaults(layer, argument) if shape == tuple(layer.normalized_shape) else None


def _statistics(x: torch.Tensor, normalised: int, correction: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance over the last `normalised` dimensions in float64, those dimensions kept as ones."""
    dims, wide = tuple(range(x.dim() - normalised, x.dim())), x.double()
    return wide.mean(dims, keepdim=True), wide.var(dims, correction=correction, keepdim=True)


def _affine(
    model: torch.nn.Module, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float
) -> torch.Tensor:
    """The formula in float64 with statistics of one's choice, and the model's own gamma and beta where it has them."""
    layer = layer_norm_of(model)
    if layer is None:
        raise OracleError("the Model is not one LayerNorm")
    y = (x.double() - mean) / torch.sqrt(variance + eps)
    if layer.weight is not None:
        y = y * layer.weight.detach().double()
    return y if layer.bias is None else y + layer.bias.detach().double()
