"""Upstream's predicate on whatever a candidate returns: shape, then torch.allclose(reference, candidate); NaN never.

Integers and bools must be equal: upstream's tolerance takes an index of 10001 for one of 10000.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 1 << 26  # elements; temporaries of a comparison are a few times that


def difference(expected: Any, got: Any, tolerance: float) -> str | None:
    """What upstream would not accept of `got`, in words; None when it is as good as `expected`.

    Lists and tuples are compared by their parts, which upstream cannot; what is no tensor must be equal.
    """
    if isinstance(expected, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(expected):
            return f"a {type(got).__name__}, not {len(expected)} values"
        found = [difference(a, b, tolerance) for a, b in zip(expected, got, strict=True)]
        return next((f"value {index}: {why}" for index, why in enumerate(found) if why), None)
    if not isinstance(expected, torch.Tensor):
        return None if type(got) is type(expected) and got == expected else f"a {type(got).__name__}, another value"
    if not isinstance(got, torch.Tensor):
        return f"a {type(got).__name__}, not a tensor"
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)}, the reference's is {tuple(expected.shape)}"
    if got.dtype != expected.dtype:
        return f"dtype {got.dtype}, the reference's is {expected.dtype}"
    if got.device != expected.device:
        return f"on {got.device}, the reference's is on {expected.device}"
    return None if _close(expected, got, tolerance) else _worst(expected, got)


def _close(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> bool:
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(expected, got)
    if expected.numel() <= CHUNK:
        return torch.allclose(expected, got, atol=tolerance, rtol=tolerance)
    pairs = zip(torch.split(expected.reshape(-1), CHUNK), torch.split(got.reshape(-1), CHUNK), strict=True)
    return all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in pairs)


def _worst(expected: torch.Tensor, got: torch.Tensor) -> str:
    part = slice(0, CHUNK)
    a, b = expected.reshape(-1)[part].double(), got.reshape(-1)[part].double()
    return f"differs from the reference by up to {float((a - b).abs().max()):.3g}" if a.numel() else "differs"


def spread(first: Any, second: Any) -> float:
    """The largest difference between two answers of the reference's own; 0.0 where they are the same."""
    if isinstance(first, (tuple, list)):
        return max((spread(a, b) for a, b in zip(first, second, strict=True)), default=0.0)
    if not isinstance(first, torch.Tensor) or torch.equal(first, second) or not first.numel():
        return 0.0
    return float((first.double() - second.double()).abs().max())
