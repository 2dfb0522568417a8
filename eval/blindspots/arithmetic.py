"""Variants of arithmetic (coarser: ought to fail), the truth in float64 and the reference again (ought to pass)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kbsub.eval.blindspots.calls import PRODUCTS, name_of
from kbsub.eval.blindspots.reference import NotTried, Reference, Trial
from kbsub.eval.blindspots.variants import Variant

Rounding = Callable[[torch.Tensor], torch.Tensor]
AGAIN = "reference again"
SUM_PARTS = 16  # a sum in bf16 is added up in so many parts


def to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def to_fp16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float16).to(x.dtype)


def to_tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to 10 explicit bits of mantissa, ties away from zero, as tensor cores convert; float32 only."""
    if x.dtype != torch.float32:
        return x
    bits = x.contiguous().view(torch.int32) + 0x1000
    bits &= ~0x1FFF
    return bits.view(torch.float32)


def arithmetic(reference: Reference) -> list[Variant]:
    """The whole task in bf16 and fp16; operands of products (without one: the inputs) rounded; sums kept in bf16."""
    products = any(call.function in PRODUCTS for call in reference.calls)
    what = "operands" if products else "inputs"
    found = [
        _whole("bf16", torch.bfloat16),
        _whole("fp16", torch.float16),
        *(
            Variant(
                f"{what} rounded to {name}",
                "precision",
                f"{what} in {name}",
                _operands(rounding) if products else _inputs(rounding),
                light=False,
            )
            for name, rounding in (("bf16", to_bf16), ("fp16", to_fp16), ("tf32", to_tf32))
        ),
        Variant("sums in bf16", "precision", "sums in bf16", _sums, light=False),
    ]
    return found


def expected(reference: Reference) -> list[Variant]:
    """What ought to pass: the reference again, the task in float64 rounded, and on a GPU fp32 without TF32."""
    found = [
        Variant(AGAIN, "unstable", "", lambda trial: trial.run(), light=False),
        Variant("truth: float64", "hostile", "", _truth, light=False),
    ]
    if reference.device != "cpu" and any(call.function.startswith("conv") for call in reference.calls):
        found.append(Variant("truth: fp32 without TF32", "hostile", "", _without_tf32, light=False))
    return found


def _whole(name: str, dtype: torch.dtype) -> Variant:
    return Variant(
        f"all in {name}", "precision", f"all of it in {name}", lambda t: _like(t, t.run_as(dtype)), light=False
    )


def _like(trial: Trial, output: torch.Tensor) -> torch.Tensor:
    return output.to(trial.output.dtype)


def _truth(trial: Trial) -> torch.Tensor:
    return _like(trial, trial.run_as(torch.float64))


def _without_tf32(trial: Trial) -> torch.Tensor:
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return trial.run()
    finally:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def _is_product(func: Any) -> bool:
    return name_of(func) in PRODUCTS


def _operands(rounding: Rounding) -> Callable[[Trial], torch.Tensor]:
    def visit(index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _is_product(func):
            return func(*args, **kwargs)
        return func(*_rounded(args, rounding), **kwargs)

    return lambda trial: trial.run_with(visit)


def _rounded(args: tuple[Any, ...], rounding: Rounding) -> list[Any]:
    """Floating arguments with two axes and more rounded: a bias is added in fp32."""
    return [
        rounding(each) if isinstance(each, torch.Tensor) and each.is_floating_point() and each.ndim > 1 else each
        for each in args
    ]


def _inputs(rounding: Rounding) -> Callable[[Trial], torch.Tensor]:
    def make(trial: Trial) -> torch.Tensor:
        floats = [isinstance(each, torch.Tensor) and each.is_floating_point() for each in trial.inputs]
        return trial.run([rounding(each) if is_ else each for each, is_ in zip(trial.inputs, floats, strict=True)])

    return make


# ---- sums ----


def _sums(trial: Trial) -> torch.Tensor:
    changed = []

    def visit(index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        made = _sum_in_parts(func, args, kwargs)
        if made is None:
            return func(*args, **kwargs)
        changed.append(index)
        return made

    output = trial.run_with(visit)
    if not changed:
        raise NotTried("no sum that can be split: no linear layer, matrix product, sum or mean")
    return output


def _sum_in_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """A linear layer, product, sum or mean with its total kept in bf16 over 16 parts; None of another call."""
    name = name_of(func).strip("_")
    if name == "linear":
        x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        total = _added(func(x[..., at], weight[:, at]) for at in _slices(x.shape[-1]))
        return total if bias is None else to_bf16(total + bias)
    if name in ("matmul", "mm", "bmm") and len(args) == 2 and args[0].ndim > 1 and args[1].ndim > 1:
        a, b = args
        return _added(func(a[..., at], b[..., at, :]) for at in _slices(a.shape[-1]))
    if name in ("sum", "mean"):
        return _split_sum(func, args, kwargs, name)
    return None


def _split_sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> torch.Tensor | None:
    x = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    first = dim[0] if isinstance(dim, (tuple, list)) and dim else dim
    axis = 0 if first is None else first
    if not isinstance(axis, int) or not x.ndim or x.shape[axis] < SUM_PARTS:
        return None
    weights = [((at.stop - at.start) / x.shape[axis] if name == "mean" else 1.0, at) for at in _slices(x.shape[axis])]
    return _added(
        func(x.narrow(axis, at.start, at.stop - at.start), *args[1:], **kwargs) * weight for weight, at in weights
    )


def _slices(size: int) -> list[slice]:
    parts = min(SUM_PARTS, size)
    return [slice(size * k // parts, size * (k + 1) // parts) for k in range(parts)]


def _added(parts: Any) -> torch.Tensor:
    total: torch.Tensor | None = None
    for each in parts:
        total = to_bf16(each) if total is None else to_bf16(total + each)
    assert total is not None, "there is at least one part"
    return total
