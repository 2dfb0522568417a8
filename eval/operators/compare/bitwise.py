"""Where two tensors first differ, and by how many units in the last place; hashes of repeated runs.

Complements eval.predicate, which says how near they are. CPU and CUDA tensors; knows no cases and no candidates.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from kbsub.eval.operators.compare.predicate import (
    CHUNK_ELEMENTS,
    PredicateError,
    bits,
    compare,
    json_float,
    same_bits,
    unravel,
)


def ulps(first: int, second: int, width: int) -> int:
    """The number of steps between two floats of `width` bits given as signed integers of the same bits.

    +0 and -0 are 0 steps apart, though their bits differ. Meaningless for NaN.
    """
    low = -(1 << (width - 1))

    def rank(pattern: int) -> int:
        return pattern if pattern >= 0 else low - pattern

    return abs(rank(first) - rank(second))


def first_difference(reference: torch.Tensor, candidate: torch.Tensor) -> dict[str, Any] | None:
    """The first element, in row-major order, with other bits and not NaN on both sides; None when there is none.

    {"index", "reference", "candidate", "reference_bits", "candidate_bits", "ulps"}; `ulps` is None beside a NaN.
    """
    a, b = reference.detach().reshape(-1), candidate.detach().reshape(-1)
    for start in range(0, a.numel(), CHUNK_ELEMENTS):
        r, c = a[start : start + CHUNK_ELEMENTS], b[start : start + CHUNK_ELEMENTS]
        differ = (bits(r) != bits(c)) & ~(r.isnan() & c.isnan())
        if bool(differ.any()):
            at = int(differ.to(torch.uint8).argmax())  # the first of equal maxima
            return _describe(start + at, r[at], c[at], tuple(reference.shape))
    return None


def _describe(flat: int, r: torch.Tensor, c: torch.Tensor, shape: tuple[int, ...]) -> dict[str, Any]:
    width = 8 * r.element_size()
    r_bits, c_bits = int(bits(r.reshape(1))), int(bits(c.reshape(1)))
    mask = (1 << width) - 1
    return {
        "index": list(unravel(flat, shape)),
        "reference": json_float(float(r)),
        "candidate": json_float(float(c)),
        "reference_bits": f"0x{r_bits & mask:0{width // 4}x}",
        "candidate_bits": f"0x{c_bits & mask:0{width // 4}x}",
        "ulps": None if bool(r.isnan()) or bool(c.isnan()) else ulps(r_bits, c_bits, width),
    }


def judge_pair(reference: torch.Tensor, candidate: torch.Tensor, tolerance: float) -> dict[str, Any]:
    """Bit identity (any NaN equals any NaN) and closeness (`equal_nan=True`, atol = rtol = tolerance) of one output.

    A tensor of another shape or dtype is not identical, and says why; nothing is raised.
    """
    try:
        found = compare(reference, candidate, atol=tolerance, rtol=tolerance, equal_nan=True)
    except PredicateError as error:
        return {"identical": False, "allclose": False, "reason": str(error)}
    record: dict[str, Any] = {
        "identical": found.identical,
        "allclose": found.allclose,
        "budget_ratio": json_float(found.ratio),
        "bit_equal": found.bit_equal,
        "max_abs": json_float(found.max_abs),
        "nan_payload_differences": found.nan_payload_differences,
    }
    if not found.identical:
        record["first_difference"] = first_difference(reference, candidate)
    if found.special_mismatches:
        record["special_mismatches"] = found.special_mismatches
    return record


def sha256(tensor: torch.Tensor) -> str:
    """The digest of a tensor's bytes in row-major order."""
    flat = bits(tensor.detach().contiguous().reshape(-1)).cpu().numpy()
    return hashlib.sha256(memoryview(flat)).hexdigest()  # type: ignore[arg-type]


def repeated_hashes(run: Callable[[], tuple[torch.Tensor, ...]], runs: int) -> dict[str, Any]:
    """Call `run` `runs` times; how many different results it gave, every bit counting, and the digest of each.

    Outputs are compared on their device with the distinct ones seen before, and only those are hashed: equal bits,
    equal hash. Stops at 8 distinct results.
    """
    distinct: list[tuple[torch.Tensor, ...]] = []
    done = 0
    for _ in range(runs):
        outputs = run()
        done += 1
        if not any(_same(outputs, seen) for seen in distinct):
            distinct.append(tuple(output.clone() for output in outputs))  # a candidate may reuse its output memory
        if len(distinct) == 8:
            break
    return {"runs": done, "distinct": len(distinct), "sha256": [[sha256(each) for each in seen] for seen in distinct]}


def _same(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> bool:
    return len(first) == len(second) and all(same_bits(a, b, any_nan=False) for a, b in zip(first, second, strict=True))
