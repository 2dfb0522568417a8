"""Upstream's predicate on chunks, and beside it the share of the tolerance that is used.

The answer is `torch.allclose(reference, output, atol=t, rtol=t)` on every chunk, t being upstream's own
`get_tolerance_for_precision`: all chunks close is what one call on the whole says. A wrong variant stops at its first
chunk that is not, so most cost one chunk. The share is the largest |r - o| / (t + t |o|), in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CHUNK = 1 << 24  # elements: temporaries of 64 and 128 MiB


@dataclass(frozen=True)
class Margin:
    """`passed`: upstream's word. `share`: of the tolerance, infinite where a special value is out of place.

    `whole`: the share and the count are over all elements, not only up to the first chunk that failed.
    """

    passed: bool
    share: float
    failing: int
    elements: int
    whole: bool
    why: str = ""


def judged(reference: torch.Tensor, output: torch.Tensor, tolerance: float, *, whole: bool = False) -> Margin:
    """`output` against `reference` (same device, any dtype). `whole`: do not stop at the first chunk that fails."""
    if output.shape != reference.shape:
        words = f"shape {tuple(output.shape)} for {tuple(reference.shape)}"
        return Margin(False, math.inf, reference.numel(), reference.numel(), True, words)
    if output.dtype != reference.dtype:
        output = output.to(reference.dtype)
    r, o = reference.detach().reshape(-1), output.detach().reshape(-1)
    passed, share, failing = True, 0.0, 0
    for start in range(0, r.numel(), CHUNK):
        one, other = r[start : start + CHUNK], o[start : start + CHUNK]
        close = torch.allclose(one, other, atol=tolerance, rtol=tolerance)
        used, failed = _share(one, other, tolerance)
        passed, share, failing = passed and close, max(share, used), failing + (0 if close else max(failed, 1))
        if not close and not whole:
            return Margin(False, share, failing, r.numel(), start + CHUNK >= r.numel())
    return Margin(passed, share, failing, r.numel(), True)


def _share(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> tuple[float, int]:
    """(largest share of the tolerance, elements that use more than all of it)."""
    r, o = one.double(), other.double()
    share = (r - o).abs_().div_(o.abs_().mul_(tolerance).add_(tolerance))
    share = torch.where(one == other, torch.zeros((), dtype=share.dtype, device=share.device), share)  # also inf == inf
    share = share.nan_to_num_(nan=math.inf, posinf=math.inf)
    return (share.max().item(), int((share > 1).sum())) if share.numel() else (0.0, 0)
