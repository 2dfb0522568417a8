"""The float64 oracle: how far the reference and a candidate are from the real-number answer.

The answer comes from the task's operator (operators/operator.py): a formula written out in float64, or the task's own
Model in float64. An oracle row never decides an official verdict; it makes a candidate that disagrees with native
because *native* is wrong visible as such.

Memory: one float64 output (twice the bytes of an fp32 one) and about 0.3 GiB of chunks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.adapters.refusal import short_error
from kbsub.eval.operators.compare.predicate import OFFICIAL_TOLERANCE, json_float, short_float, unravel

CHUNK_ELEMENTS = 1 << 22

# The bound for a candidate that declares `accurate`: fp32 unit roundoff 2^-24, five of them for the roundings of
# mean, difference, rstd, product and sum, and one smallest subnormal for underflow.
BOUND_RELATIVE = 5 * 2.0**-24
BOUND_ABSOLUTE = 2.0**-149

FLOAT32_MAX = float(torch.finfo(torch.float32).max)


class OracleError(ValueError):
    """The oracle has no answer for this task or input."""


@dataclass(frozen=True)
class Truth:
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


# ---- the answer ----


def model_in_float64(model: torch.nn.Module, inputs: Sequence[Any]) -> Truth:
    """The answer of a float64 copy of `model` (float tensors are widened, everything else is passed as it is).

    Raises OracleError when the model does not run in float64 or returns no single float tensor.
    """
    try:
        twin = copy.deepcopy(model).double()
        wide = [each.double() if _is_float(each) else each for each in inputs]
        with torch.no_grad():
            y = twin(*wide)
    except Exception as error:
        raise OracleError(f"the task's Model does not run in float64: {short_error(error)}") from error
    if isinstance(y, (tuple, list)) and y and all(isinstance(each, torch.Tensor) for each in y):
        y = torch.cat([each.double().reshape(-1) for each in y]) if len(y) > 1 else y[0]  # as the suite lays them
    if not isinstance(y, torch.Tensor):
        raise OracleError(f"the task's Model returns {type(y).__name__}, no tensor")
    return Truth(y.double(), None, False)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- the error ----


def error_of(answer_: Truth, output: torch.Tensor, *, tolerance: float | None = None) -> ErrorOf:
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


def spread_of(truth: torch.Tensor, output: torch.Tensor) -> tuple[float, float]:
    """(largest, root mean square) of |output - truth| / (1 + |truth|): errors in units of a tolerance's atol = rtol.

    Over elements where both are finite; 0 where there is none. Tensors of one shape, any float dtype; chunked.
    """
    true, got = truth.reshape(-1), output.detach().reshape(-1)
    largest, total, count = 0.0, 0.0, 0
    for start in range(0, true.numel(), CHUNK_ELEMENTS):
        one = true[start : start + CHUNK_ELEMENTS].double()
        other = got[start : start + CHUNK_ELEMENTS].double()
        both = one.isfinite() & other.isfinite()
        error = torch.where(both, (other - one).abs() / (1 + one.abs()), 0.0)
        numbers = torch.stack([error.max(), error.square().sum(), both.sum().double()]).tolist()
        largest, total, count = max(largest, numbers[0]), total + numbers[1], count + int(numbers[2])
    return largest, math.sqrt(total / max(count, 1))


def _magnitude(answer_: Truth, true: torch.Tensor, start: int) -> torch.Tensor | None:
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
