"""The float64 oracle: what the real-number answer is, and how far the reference and a candidate are from it.

LayerNorm is written out here, in float64, two passes, with the mean corrected once: never torch's layer_norm, whose
order of operations is what is being judged. Any other task is answered by its own `Model` in float64.
An oracle row never decides an official verdict; it makes a candidate that disagrees with native because *native* is
wrong visible as such.

Memory: one float64 output (twice the bytes of an fp32 one) and about 0.3 GiB of chunks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.eval.predicate import OFFICIAL_TOLERANCE, json_float, short_float, unravel
from kbsub.eval.refusal import short_error

CHUNK_ELEMENTS = 1 << 22

# Issue 4's bound for a candidate that declares `accurate`: fp32 unit roundoff 2^-24, five of them for the roundings of
# mean, difference, rstd, product and sum, and one smallest subnormal for underflow.
BOUND_RELATIVE = 5 * 2.0**-24
BOUND_ABSOLUTE = 2.0**-149

FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class OracleError(ValueError):
    """The oracle has no answer for this task or input."""


@dataclass(frozen=True)
class Answer:
    """The float64 answer of one case.

    y: float64, the output's shape. beta: float64, one row, flat (|gamma z| + |beta| needs it); None without a bias.
    normalised: the written-out formula was used, so that the bound has a meaning. rows: number of normalised rows.
    rstd_overflows: some row's float64 rstd is finite but above the largest fp32 number.
    """

    y: torch.Tensor
    beta: torch.Tensor | None
    normalised: bool
    rows: int = 0
    rstd_max: float = math.nan
    rstd_overflows: bool = False

    @functools.cached_property
    def finite(self) -> bool:
        """Every element of the answer is finite."""
        return bool(self.y.isfinite().all())


@dataclass(frozen=True)
class ErrorOf:
    """How far one output is from the float64 answer.

    max_abs is over elements where the answer is finite; an output that is not finite there makes it inf.
    max_ulp counts units in the last place of the output's dtype at the true value.
    special_mismatches: elements whose NaN or infinity differs from that of the answer rounded to the dtype.
    """

    max_abs: float
    max_ulp: float
    special_mismatches: int
    allclose: bool  # torch.allclose(answer rounded to the dtype, output) with equal_nan=True
    bound_ratio: float  # largest |error| / (5 * 2^-24 * (|gamma z| + |beta|) + 2^-149); nan where it has no meaning
    worst: tuple[tuple[int, ...], float, float] | None  # index, true value, output

    @property
    def rank(self) -> tuple[int, float, bool]:
        """Smaller is nearer: special values in place first, then the largest error, then (in half the largest outputs
        round alike) what is within the tolerance everywhere."""
        return self.special_mismatches, self.max_abs, not self.allclose

    def to_json(self) -> dict[str, Any]:
        """Non-finite floats as the strings "inf" and "nan"; zero counts left out."""
        record: dict[str, Any] = {
            "max_abs": short_float(self.max_abs),
            "max_ulp": short_float(self.max_ulp),
            "allclose": self.allclose,
        }
        if self.special_mismatches:
            record["special_mismatches"] = self.special_mismatches
        if not math.isnan(self.bound_ratio):
            record["bound_ratio"] = short_float(self.bound_ratio)
        if self.worst is not None and not self.allclose:
            index, truth, got = self.worst
            record["worst"] = {"index": list(index), "true": json_float(truth), "got": json_float(got)}
        return record


def nearer(reference: ErrorOf, candidate: ErrorOf) -> str:
    """Which of the two is nearer to the float64 answer: "reference", "candidate" or "equal"."""
    if reference.rank == candidate.rank:
        return "equal"
    return "candidate" if candidate.rank < reference.rank else "reference"


def judge(payload: Mapping[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Stage target: {case: errors of the reference and of one candidate} over the cases of the error table."""
    from kbsub.eval.stress import judge_oracle  # the suite runs the cases; it imports this module

    return judge_oracle(payload, progress)


# ---- the answer ----


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    normalized_shape: Sequence[int],
) -> Answer:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta in float64, var the biased variance of each row.

    x: (*, *normalized_shape), any float dtype; weight, bias: normalized_shape or None; eps >= 0. Its error is a few
    float64 roundings: mean and variance are taken twice, the second time about the first mean.
    A zero-variance row with eps = 0 is 0/0, NaN, as in the formula.
    """
    width = math.prod(normalized_shape)
    if tuple(x.shape[x.dim() - len(normalized_shape) :]) != tuple(normalized_shape):
        raise OracleError(f"input of shape {tuple(x.shape)} does not end in normalized_shape {tuple(normalized_shape)}")
    rows = x.numel() // width if width else 0
    flat = x.reshape(rows, width)
    y = torch.empty(rows, width, dtype=torch.float64, device=x.device)
    gamma = None if weight is None else weight.detach().reshape(width).double()
    beta = None if bias is None else bias.detach().reshape(width).double()
    rstd_max = 0.0
    for block in _row_blocks(rows, width):
        mean = _mean(flat[block], width)
        variance = _variance(flat[block], mean, width)
        rstd = 1.0 / (variance + eps).sqrt()
        finite = rstd[rstd.isfinite()]
        if finite.numel():
            rstd_max = max(rstd_max, float(finite.max()))
        for columns in _column_blocks(block, width):
            z = (flat[block, columns].double() - mean) * rstd
            if gamma is not None:
                z *= gamma[columns]
            if beta is not None:
                z += beta[columns]
            y[block, columns] = z
    overflows = rstd_max > FLOAT32_MAX
    return Answer(y.reshape(x.shape), beta, True, rows=rows, rstd_max=rstd_max, rstd_overflows=overflows)


def _row_blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _column_blocks(block: slice, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, block.stop - block.start))
    for start in range(0, width, step):
        yield slice(start, min(width, start + step))


def _sum(rows: torch.Tensor, mean: torch.Tensor | None, power: int) -> torch.Tensor:
    """Sum over each row of (x - mean) ** power in float64, as a column; rows: (r, width)."""
    total = torch.zeros(rows.shape[0], 1, dtype=torch.float64, device=rows.device)
    for columns in _column_blocks(slice(0, rows.shape[0]), rows.shape[1]):
        part = rows[:, columns].double()
        if mean is not None:
            part = part - mean
        total += (part * part if power == 2 else part).sum(dim=1, keepdim=True)
    return total


def _mean(rows: torch.Tensor, width: int) -> torch.Tensor:
    mean = _sum(rows, None, 1) / width
    # The second look removes the rounding of the first sum; a row with an infinity stays what it is.
    correction = _sum(rows, mean, 1) / width
    return torch.where(correction.isfinite(), mean + correction, mean)


def _variance(rows: torch.Tensor, mean: torch.Tensor, width: int) -> torch.Tensor:
    return _sum(rows, mean, 2) / width


def layer_norm_of(model: torch.nn.Module) -> torch.nn.LayerNorm | None:
    """The LayerNorm that is all there is in this model, else None (the model then answers for itself)."""
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    if len(leaves) != 1 or not isinstance(leaves[0], torch.nn.LayerNorm):
        return None
    own = {id(each) for each in (*leaves[0].parameters(), *leaves[0].buffers())}
    everything = {id(each) for each in (*model.parameters(), *model.buffers())}
    return leaves[0] if own == everything else None


def is_bare_layer_norm(model: torch.nn.Module) -> bool:
    """Whether `model(x)` is its one LayerNorm and nothing more: tried in float64 on a small row of its own width.

    Torch's float64 LayerNorm only says here *whether the formula applies*; no oracle value comes from it.
    """
    layer = layer_norm_of(model)
    if layer is None:
        return False
    generator = torch.Generator().manual_seed(20)
    x = torch.randn((2, *layer.normalized_shape), generator=generator, dtype=torch.float64)
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    x = x.to(device)
    try:
        twin = copy.deepcopy(model).double()
        with torch.no_grad():
            got = twin(x)
    except Exception:
        return False  # another signature, more inputs, or a Model that takes no float64: not this formula
    truth = layer_norm(x, layer.weight, layer.bias, layer.eps, layer.normalized_shape).y
    return isinstance(got, torch.Tensor) and got.shape == truth.shape and bool(torch.allclose(truth, got, 1e-9, 1e-9))


def answer(model: torch.nn.Module, inputs: Sequence[Any], *, formula: bool | None = None) -> Answer:
    """The float64 answer of `model` on `inputs` (float tensors are widened, everything else is passed as it is).

    `formula`: whether the written-out LayerNorm applies, when the caller has asked `is_bare_layer_norm` already.
    Raises OracleError when the model does not run in float64 or returns no single tensor.
    """
    if formula if formula is not None else is_bare_layer_norm(model):
        layer = layer_norm_of(model)
        assert layer is not None  # that is what `formula` says
        return layer_norm(inputs[0], layer.weight, layer.bias, layer.eps, layer.normalized_shape)
    try:
        twin = copy.deepcopy(model).double()
        wide = [each.double() if _is_float(each) else each for each in inputs]
        with torch.no_grad():
            y = twin(*wide)
    except Exception as error:
        raise OracleError(f"the task's Model does not run in float64: {short_error(error)}") from error
    if not isinstance(y, torch.Tensor) or not y.is_floating_point():
        raise OracleError("the task's Model does not return one float tensor")
    return Answer(y.double(), None, False)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- the error ----


def error_of(answer_: Answer, output: torch.Tensor, *, tolerance: float | None = None) -> ErrorOf:
    """How far `output` (any float dtype, the answer's shape) is from the float64 answer; chunked.

    `tolerance`: atol = rtol of the allclose against the rounded answer; default the official one of the dtype.
    Raises OracleError on another shape.
    """
    if output.shape != answer_.y.shape:
        raise OracleError(f"output of shape {tuple(output.shape)}, the float64 answer has {tuple(answer_.y.shape)}")
    tolerance = OFFICIAL_TOLERANCE.get(output.dtype, 1e-4) if tolerance is None else tolerance
    truth, got = answer_.y.reshape(-1), output.detach().reshape(-1)
    max_abs = max_ulp = bound = 0.0
    specials, far, worst_at = 0, 0, -1
    for start in range(0, truth.numel(), CHUNK_ELEMENTS):
        true, out = truth[start : start + CHUNK_ELEMENTS], got[start : start + CHUNK_ELEMENTS]
        numbers = _chunk_error(true, out, _magnitude(answer_, true, start), tolerance)
        if numbers[0] > max_abs or worst_at < 0:
            worst_at = start + int(numbers[5])
        max_abs, max_ulp, bound = max(max_abs, numbers[0]), max(max_ulp, numbers[1]), max(bound, numbers[2])
        specials += int(numbers[3])
        far += int(numbers[4])
    worst = None
    if worst_at >= 0:
        index = unravel(worst_at, tuple(output.shape))
        worst = (index, float(truth[worst_at]), float(got[worst_at]))
    meaningful = answer_.normalised and not answer_.rstd_overflows and truth.numel() > 0
    return ErrorOf(max_abs, max_ulp, specials, far == 0, bound if meaningful else math.nan, worst)


def _magnitude(answer_: Answer, true: torch.Tensor, start: int) -> torch.Tensor | None:
    """|gamma z| + |beta| of a chunk. gamma z is y - beta: what that rounds away in float64 is far below the bound."""
    if not answer_.normalised:
        return None
    if answer_.beta is None:
        return true.abs()
    width = answer_.beta.numel()
    first = start % width
    if first + true.numel() <= width:
        beta = answer_.beta[first : first + true.numel()]
    else:
        beta = answer_.beta[(torch.arange(true.numel(), device=true.device) + first) % width]
    return (true - beta).abs() + beta.abs()


def _chunk_error(
    true: torch.Tensor, out: torch.Tensor, magnitude: torch.Tensor | None, tolerance: float
) -> list[float]:
    """[max abs, max ulp, max bound ratio, special mismatches, not close, index of the worst], one transfer."""
    rounded = true.to(out.dtype)  # overflow to infinity is what rounding means here
    specials = (
        (rounded.isnan() ^ out.isnan()) | (rounded.isposinf() ^ out.isposinf()) | (rounded.isneginf() ^ out.isneginf())
    )
    close = torch.isclose(rounded, out, rtol=tolerance, atol=tolerance, equal_nan=True)
    zero = torch.zeros((), dtype=torch.float64, device=true.device)
    both = rounded.isfinite() & out.isfinite()
    error = torch.where(both, (out.double() - true).abs(), zero)
    error = torch.where(specials & rounded.isfinite(), torch.full_like(zero, math.inf), error)
    step = ulp(true, out.dtype)
    in_ulps = torch.where(error > 0, error / step, zero)
    ratio = torch.zeros_like(zero)
    if magnitude is not None:
        allowed = BOUND_RELATIVE * magnitude + BOUND_ABSOLUTE
        if out.dtype != torch.float32:
            allowed = allowed + 0.5 * step * (1 + 2.0**-9)  # the one rounding to the narrower dtype
        ratio = torch.where(error > 0, error / allowed, zero).max()
    worst, at = error.max(dim=0)
    numbers: list[float] = torch.stack(
        [worst, in_ulps.max(), ratio, specials.sum().double(), (~close).sum().double(), at.double()]
    ).tolist()
    return numbers


def ulp(true: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of `dtype` at each float64 value (the subnormal spacing below its smallest normal number)."""
    info = torch.finfo(dtype)
    digits = -round(math.log2(info.eps))  # 23 for float32, 10 for float16, 7 for bfloat16
    lowest = round(math.log2(info.tiny))
    _, exponent = torch.frexp(torch.where(true.isfinite(), true, torch.ones_like(true)))
    exponent = torch.where(true == 0, lowest, exponent - 1)  # frexp calls the exponent of zero 0
    return torch.exp2(exponent.clamp(min=lowest).double() - digits)
