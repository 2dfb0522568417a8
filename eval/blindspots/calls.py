"""The calls of a reference's forward: what they are, and a forward with one of them changed.

A TorchFunctionMode sees every torch function, method and operator that forward (or a module in it) calls from Python,
at the outermost level, whatever the control flow: nothing has to be traced, so nothing fails to trace. A call is named
after its function, with a number where there are several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Only move or describe data: no operator of the task.
PLUMBING = frozenset(
    "__get__ __set__ view reshape flatten unflatten permute transpose t swapaxes movedim contiguous clone to float "
    "double half bfloat16 type type_as squeeze unsqueeze expand expand_as repeat size dim numel detach chunk split "
    "unbind __getitem__ __setitem__ narrow select index_select item tolist __len__ __bool__ shape is_floating_point "
    "stride data_ptr cpu cuda requires_grad_ empty_like zeros_like ones_like full_like new_zeros new_ones unfold cat "
    "concat stack roll is_contiguous dropout".split()
)
REDUCTIONS = frozenset(
    "mean sum norm max min amax amin logsumexp prod var std argmax argmin median vector_norm any all var_mean".split()
)
PRODUCTS = frozenset(
    "matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm linear bilinear einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d scaled_dot_product_attention multi_head_attention_forward mv dot".split()
)


@dataclass(frozen=True)
class Call:
    """One call of forward, as the profile saw it: number, name, shape and mean of its first tensor result.

    alike: positions of arguments that could stand for the result; axes: what a reduction reduces of its first argument.
    """

    index: int
    name: str
    function: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mean: float
    alike: tuple[int, ...]
    axes: tuple[int, ...]
    plain: bool  # the result is one tensor, not a tuple

    @property
    def in_place(self) -> bool:
        return self.function.endswith("_") and not self.function.startswith("__")


Visit = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], Any]


class Calls(TorchFunctionMode):
    """Numbers the calls and lets `visit(index, function, args, kwargs)` give the result of each."""

    def __init__(self, visit: Visit) -> None:
        super().__init__()
        self.visit, self.count = visit, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if name_of(func) in PLUMBING or not any(each.is_floating_point() for each in tensors):
            return func(*args, **kwargs)
        index, self.count = self.count, self.count + 1
        return self.visit(index, func, args, kwargs)


def name_of(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def first_tensor(result: Any) -> torch.Tensor | None:
    """The tensor that a result is, or the first of a tuple's."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple):
        return next((each for each in result if isinstance(each, torch.Tensor)), None)
    return None


def with_first(result: Any, value: torch.Tensor) -> Any:
    """`result` with `value` in the place of its first tensor."""
    if isinstance(result, torch.Tensor):
        return value
    items = list(result)
    items[next(i for i, each in enumerate(items) if isinstance(each, torch.Tensor))] = value
    return tuple(items) if type(result) is tuple else type(result)(items)


class Profile:
    """Runs a forward once and keeps what each call is."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.seen: Counter[str] = Counter()

    def visit(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = [(i, each.shape, each.dtype) for i, each in enumerate(args) if isinstance(each, torch.Tensor)]
        result = func(*args, **kwargs)
        value = first_tensor(result)
        raw = name_of(func)
        name = raw.strip("_")
        self.seen[name] += 1
        shape: tuple[int, ...] = ()
        mean, dtype, alike = 0.0, torch.float32, tuple[int, ...]()
        if value is not None and value.is_floating_point() and value.numel():
            shape, dtype, mean = tuple(value.shape), value.dtype, _mean(value)
            alike = tuple(i for i, its_shape, its in before if its_shape == value.shape and its == value.dtype)
        axes = _axes(name, args, kwargs, value)
        numbered = name if self.seen[name] == 1 else f"{name}#{self.seen[name]}"
        plain = isinstance(result, torch.Tensor)
        self.calls.append(Call(index, numbered, raw, shape, dtype, mean, alike, axes, plain))
        return result


def _mean(value: torch.Tensor) -> float:
    """Mean of the finite values, without a second copy where all are finite."""
    mean = float(value.mean(dtype=torch.float64 if value.numel() < 1 << 24 else None))
    if mean == mean and abs(mean) != float("inf"):
        return mean
    finite = value[value.isfinite()]
    return float(finite.double().mean()) if finite.numel() else 0.0


def _axes(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], value: torch.Tensor | None) -> tuple[int, ...]:
    """The axes that a reduction reduces, without those of fewer than two elements."""
    if name not in REDUCTIONS or value is None or not isinstance(args[0], torch.Tensor) or not args[0].ndim:
        return ()
    source = args[0]
    if value.numel() * 2 > source.numel():
        return ()
    place = 2 if name == "norm" else 1
    dim = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if dim is None or isinstance(dim, (str, float)):
        dims = list(range(source.ndim))
    else:
        dims = [each % source.ndim for each in (dim if isinstance(dim, (tuple, list)) else [dim])]
    return tuple(each for each in dims if source.shape[each] > 1)


def part(tensor: torch.Tensor, axis: int, share: int) -> torch.Tensor | None:
    """The first 1/share along `axis`, repeated to the whole length; None where there is not one element in it."""
    size = tensor.shape[axis]
    keep = size // share
    if keep < 1 or keep == size:
        return None
    piece = tensor.narrow(axis, 0, keep)
    copies = -(-size // keep)
    return torch.cat([piece] * copies, dim=axis).narrow(axis, 0, size) if copies > 1 else piece
