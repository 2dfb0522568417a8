"""The official predicate as a value: not only whether two tensors agree, but how nearly and where not.

KernelBench asks `torch.allclose(reference, candidate, atol=tol, rtol=tol)`: the relative term scales with the
*second* argument, the candidate. `compare` answers the same question with the same bits (`torch.isclose` on
chunks), and beside it the question asked the other way round, the share of the tolerance budget used, special
values at different positions, the worst element and the share of bit-equal elements.

It works on CPU and CUDA tensors in chunks, and must know nothing of tasks, candidates or cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

CHUNK_ELEMENTS = 1 << 22  # float64 temporaries of 32 MiB each: about 0.25 GiB beside the two tensors

# The official tolerance (atol = rtol) of each dtype, at the pin.
OFFICIAL_TOLERANCE: dict[torch.dtype, float] = {
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 1e-2,
}

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PredicateError(ValueError):
    """The two tensors cannot be compared: another shape, dtype or device."""


@dataclass(frozen=True)
class Worst:
    """The element that uses the largest share of its budget, or one whose special value is out of place."""

    index: tuple[int, ...]
    reference: float
    candidate: float
    ratio: float  # |r - c| / (atol + rtol * |c|); inf where a special value is out of place


@dataclass(frozen=True)
class Comparison:
    """What `torch.allclose(reference, candidate)` sees, and what it hides.

    Ratios are over elements finite on both sides, computed in float64; 1.0 is the whole budget.
    """

    elements: int
    atol: float
    rtol: float
    equal_nan: bool
    allclose: bool  # torch.allclose(reference, candidate): the budget scales with |candidate|
    allclose_swapped: bool  # torch.allclose(candidate, reference): the budget scales with |reference|
    ratio: float  # largest |r - c| / (atol + rtol * |c|)
    ratio_swapped: float  # largest |r - c| / (atol + rtol * |r|)
    max_abs: float  # largest |r - c|
    failing: int  # elements finite on both sides that fail the official way
    failing_swapped: int
    nan_mismatches: int  # NaN on one side only
    posinf_mismatches: int  # +Inf on one side only
    neginf_mismatches: int
    bit_equal_elements: int  # same bits
    nan_payload_differences: int  # NaN on both sides with other bits: equal here, reported apart
    worst: Worst | None = field(default=None)

    @property
    def bit_equal(self) -> float:
        """Fraction of elements with the same bits; 1.0 for an empty tensor."""
        return self.bit_equal_elements / self.elements if self.elements else 1.0

    @property
    def identical(self) -> bool:
        """Every element has the same bits, any NaN counting as equal to any NaN."""
        return self.bit_equal_elements + self.nan_payload_differences == self.elements

    @property
    def special_mismatches(self) -> int:
        """Elements whose NaN, +Inf or -Inf is on one side only, a +Inf facing a -Inf or a NaN counted for each."""
        return self.nan_mismatches + self.posinf_mismatches + self.neginf_mismatches

    def to_json(self) -> dict[str, Any]:
        """A small JSON-able record: zero counts and the worst element of a close pair are left out.

        Floats that are not finite are written as the strings "inf", "-inf" and "nan".
        """
        record: dict[str, Any] = {
            "allclose": self.allclose,
            "allclose_swapped": self.allclose_swapped,
            "equal_nan": self.equal_nan,
            "tolerance": self.atol if self.atol == self.rtol else [self.atol, self.rtol],
            "ratio": short_float(self.ratio),
            "ratio_swapped": short_float(self.ratio_swapped),
            "max_abs": short_float(self.max_abs),
            "bit_equal": self.bit_equal,
            "identical": self.identical,
        }
        for name in (
            "failing",
            "failing_swapped",
            "nan_mismatches",
            "posinf_mismatches",
            "neginf_mismatches",
            "nan_payload_differences",
        ):
            if getattr(self, name):
                record[name] = getattr(self, name)
        if self.worst is not None and not (self.allclose and self.allclose_swapped):
            record["worst"] = {
                "index": list(self.worst.index),
                "reference": json_float(self.worst.reference),
                "candidate": json_float(self.worst.candidate),
                "ratio": json_float(self.worst.ratio),
            }
        return record

    def describe(self) -> str:
        """One line for a person."""
        parts = [f"{'close' if self.allclose else 'NOT close'} (equal_nan={self.equal_nan})"]
        parts.append(f"uses {self.ratio:.3g} of its budget" if self.elements else "empty")
        if self.failing:
            parts.append(f"{self.failing} of {self.elements} finite elements fail")
        for name, count in (
            ("NaN", self.nan_mismatches),
            ("+Inf", self.posinf_mismatches),
            ("-Inf", self.neginf_mismatches),
        ):
            if count:
                parts.append(f"{count} {name} on one side only")
        if self.worst is not None and not self.allclose:
            parts.append(
                f"worst at {list(self.worst.index)}: reference {self.worst.reference!r}, "
                f"candidate {self.worst.candidate!r}"
            )
        return "; ".join(parts)


def json_float(value: float) -> float | str:
    """A float as JSON can hold it: non-finite values become "inf", "-inf" or "nan" (`float()` reads them back)."""
    return value if math.isfinite(value) else str(value)


def short_float(value: float) -> float | str:
    """`json_float` of six significant digits: a ratio or an error, where more would only fill the file."""
    return json_float(float(f"{value:.6g}"))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width, for bit comparisons."""
    return tensor.view(_BITS[tensor.element_size()])


def same_bits(first: torch.Tensor, second: torch.Tensor, *, any_nan: bool = True) -> bool:
    """Bit for bit equal, any NaN counting as any other when `any_nan`; chunked, any device."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    for _, a, b in _chunks(first, second):
        equal = bits(a) == bits(b)
        if any_nan:
            equal |= a.isnan() & b.isnan()
        if not bool(equal.all()):
            return False
    return True


def compare(
    reference: torch.Tensor,
    candidate: torch.Tensor,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    equal_nan: bool = True,
) -> Comparison:
    """Compare two float tensors of the same shape, dtype and device.

    `atol` and `rtol` default to the official tolerance of the dtype. The official check has `equal_nan=False`;
    with it, a NaN in the reference can never pass. Booleans are those of `torch.allclose` in the tensors' own
    dtype; ratios are float64. Raises PredicateError when the tensors cannot be compared.
    """
    _comparable(reference, candidate)
    tolerance = OFFICIAL_TOLERANCE.get(reference.dtype, 1e-4)
    atol = tolerance if atol is None else atol
    rtol = tolerance if rtol is None else rtol
    tally = _Tally()
    for start, r, c in _chunks(reference, candidate):
        tally.add(start, r, c, atol, rtol, equal_nan)
    return tally.finish(reference, candidate, atol, rtol, equal_nan)


def _comparable(reference: torch.Tensor, candidate: torch.Tensor) -> None:
    for attribute in ("shape", "dtype", "device"):
        mine, other = getattr(reference, attribute), getattr(candidate, attribute)
        if mine != other:
            shown = [tuple(each) if attribute == "shape" else each for each in (mine, other)]
            raise PredicateError(f"candidate output: {attribute} is {shown[1]}, the reference's is {shown[0]}")
    if not reference.is_floating_point():
        raise PredicateError(f"reference output: dtype {reference.dtype} is not a real floating dtype")


def _chunks(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(flat start, chunk, chunk). A non-contiguous tensor is copied once; outputs rarely are."""
    a, b = first.detach().reshape(-1), second.detach().reshape(-1)
    for start in range(0, a.numel(), CHUNK_ELEMENTS):
        yield start, a[start : start + CHUNK_ELEMENTS], b[start : start + CHUNK_ELEMENTS]


class _Tally:
    """Running totals over chunks; one transfer to the host a chunk."""

    COUNTS = ("far", "far_swapped", "failing", "failing_swapped", "nan", "posinf", "neginf", "bit_equal", "payload")

    def __init__(self) -> None:
        self.counts = dict.fromkeys(self.COUNTS, 0)
        self.ratio = self.ratio_swapped = self.max_abs = 0.0
        self.worst_flat = -1
        self.worst_ratio = -1.0

    def add(self, start: int, r: torch.Tensor, c: torch.Tensor, atol: float, rtol: float, equal_nan: bool) -> None:
        close = torch.isclose(r, c, rtol=rtol, atol=atol, equal_nan=equal_nan)
        swapped = torch.isclose(c, r, rtol=rtol, atol=atol, equal_nan=equal_nan)
        nan_r, nan_c = r.isnan(), c.isnan()
        posinf = r.isposinf() ^ c.isposinf()
        neginf = r.isneginf() ^ c.isneginf()
        finite = r.isfinite() & c.isfinite()
        equal = bits(r) == bits(c)
        r64, c64 = r.double(), c.double()
        zero = torch.zeros((), dtype=torch.float64, device=r.device)
        difference = torch.where(finite, (r64 - c64).abs(), zero)
        # 0 / 0 (both tolerances zero, equal values) is no use of the budget
        ratio = torch.where(difference > 0, difference / (atol + rtol * c64.abs()), zero)
        ratio_swapped = torch.where(difference > 0, difference / (atol + rtol * r64.abs()), zero)
        out_of_place = (nan_r ^ nan_c) | posinf | neginf
        placed = torch.where(out_of_place, torch.full_like(zero, math.inf), torch.where(finite, ratio, zero))
        worst, at = placed.max(dim=0)
        counts = [
            ~close,
            ~swapped,
            finite & ~close,
            finite & ~swapped,
            nan_r ^ nan_c,
            posinf,
            neginf,
            equal,
            nan_r & nan_c & ~equal,
        ]
        integers = torch.stack([*(mask.sum() for mask in counts), at]).double()  # exact: far below 2^53
        numbers = torch.cat(
            [integers, torch.stack([ratio.max(), ratio_swapped.max(), difference.max(), worst])]
        ).tolist()
        for name, value in zip(self.COUNTS, numbers, strict=False):
            self.counts[name] += int(value)
        self.ratio = max(self.ratio, numbers[10])
        self.ratio_swapped = max(self.ratio_swapped, numbers[11])
        self.max_abs = max(self.max_abs, numbers[12])
        if numbers[13] > self.worst_ratio:
            self.worst_ratio, self.worst_flat = numbers[13], start + int(numbers[9])

    def finish(
        self, reference: torch.Tensor, candidate: torch.Tensor, atol: float, rtol: float, equal_nan: bool
    ) -> Comparison:
        worst = None
        if self.worst_flat >= 0:
            index = unravel(self.worst_flat, tuple(reference.shape))
            worst = Worst(index, float(reference[index]), float(candidate[index]), self.worst_ratio)
        counts = self.counts
        return Comparison(
            elements=reference.numel(),
            atol=atol,
            rtol=rtol,
            equal_nan=equal_nan,
            allclose=counts["far"] == 0,
            allclose_swapped=counts["far_swapped"] == 0,
            ratio=self.ratio,
            ratio_swapped=self.ratio_swapped,
            max_abs=self.max_abs,
            failing=counts["failing"],
            failing_swapped=counts["failing_swapped"],
            nan_mismatches=counts["nan"],
            posinf_mismatches=counts["posinf"],
            neginf_mismatches=counts["neginf"],
            bit_equal_elements=counts["bit_equal"],
            nan_payload_differences=counts["payload"],
            worst=worst,
        )


def unravel(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index of element number `flat` of a row-major tensor of this shape."""
    index: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        index.append(at)
    return tuple(reversed(index))
