"""The reference order of PyTorch's CUDA LayerNorm forward, in NumPy: an independent model of its bits.

Written from the order itself (shared by every bit-identical candidate), not from any kernel: chains are vectorised
over rows and over the 128 threads of a row, and the fused multiply-add is exact. Knows no torch, no kernel, no GPU.

Differences from the device that remain: `rsqrt` is correctly rounded here and approximate there, so rstd may differ
by two units in the last place and y by what follows from that; mean and M2 are equal in every bit (NaN being NaN).

Credit: the arithmetic follows `layer_norm_kernel.cu` of PyTorch, (c) the PyTorch contributors, BSD-style licence
(licenses/PYTORCH_251_LICENSE.txt).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Array = NDArray[Any]

LANES, WARPS = 32, 4
THREADS = LANES * WARPS  # one block a row, whatever the device: it fixes which thread folds which element
VECTOR = 4
MAX_WIDTH = 2**24  # above it fp32 cannot count the elements of a row


@dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared differences of groups of elements: fp32 arrays of one shape."""

    count: Float32
    mean: Float32
    m2: Float32

    def at(self, index: Any) -> Moments:
        """The groups that `index` selects."""
        return Moments(self.count[index], self.mean[index], self.m2[index])


@dataclass(frozen=True)
class Normalised:
    """y of shape (rows, n) in the input's format; mean, var, rstd of shape (rows,) fp32."""

    y: Array
    mean: Float32
    var: Float32
    rstd: Float32


def fma(a: Array, b: Array, c: Array) -> Float32:
    """fp32 a * b + c rounded once (to nearest, ties to even), for every fp32 operand, subnormal and special ones too.

    The product of two fp32 numbers is exact in fp64. The sum is rounded to fp64 with round-to-odd (Boldo and Melquiond,
    "Emulation of FMA and correctly rounded sums", 2008), after which rounding to fp32's 24 bits cannot go wrong twice.
    """
    product = np.asarray(a, np.float32).astype(np.float64) * np.asarray(b, np.float32).astype(np.float64)
    addend = np.asarray(c, np.float32).astype(np.float64)
    total = product + addend
    back = total - product  # Knuth's TwoSum: `error` is what rounding `total` lost, exactly
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (error != 0)  # a NaN or infinite total is its own result
    toward = np.where((error > 0) == (total > 0), 1, -1)  # the neighbour on the other side of the exact sum
    odd = np.where(inexact & (bits & 1 == 0), bits + toward, bits)
    result: Float32 = odd.view(np.float64).astype(np.float32)
    return result


def fold(moments: Moments, x: Float32) -> Moments:
    """One more element in every group (Welford's update)."""
    one = np.float32(1)
    count = moments.count + one
    delta = x - moments.mean
    mean = fma(delta, one / count, moments.mean)
    return Moments(count, mean, fma(delta, x - mean, moments.m2))


def combine(b: Moments, a: Moments) -> Moments:
    """Two groups into one; not symmetric in its rounding. Groups may be empty; two empty ones make zeros."""
    count = a.count + b.count
    empty = ~(count > 0)
    c = np.float32(1) / np.where(empty, np.float32(1), count)
    share_a, share_b = a.count * c, b.count * c
    delta = b.mean - a.mean
    # Contractions as nvcc makes them of the published text: see the PTX check of test_order.py.
    mean = fma(share_a, a.mean, share_b * b.mean)
    m2 = fma(delta * delta * a.count, share_b, a.m2 + b.m2)
    zero = np.float32(0)
    return Moments(count, np.where(empty, zero, mean), np.where(empty, zero, m2))


def chains(x: Float32) -> Moments:
    """What each of the 128 threads of a row has before the first merge. x (rows, n) fp32 -> groups (rows, 128).

    Thread t folds vec4 number t, t + 128, t + 256, ...; threads without one keep count 0. ValueError for a width that
    PyTorch does not send down its vectorised path.
    """
    rows, n = x.shape
    if n % VECTOR or not 0 < n <= MAX_WIDTH:
        raise ValueError(f"x: rows of {n} elements, must be a multiple of {VECTOR}, above 0 and at most 2^24")
    vectors = x.reshape(rows, n // VECTOR, VECTOR)
    zeros = np.zeros((rows, THREADS), np.float32)
    state = Moments(zeros, zeros, zeros)
    for start in range(0, n // VECTOR, THREADS):
        tile = vectors[:, start : start + THREADS]  # (rows, up to 128, 4): the last tile of a row may be short
        width = tile.shape[1]
        some = state if width == THREADS else state.at(np.s_[:, :width])
        for element in range(VECTOR):
            some = fold(some, np.ascontiguousarray(tile[:, :, element]))
        if width < THREADS:  # the threads past the row's end keep what they had
            rest = state.at(np.s_[:, width:])
            some = Moments(*(np.concatenate(pair, axis=1) for pair in zip(_fields(some), _fields(rest), strict=True)))
        state = some
    return state


def _fields(moments: Moments) -> tuple[Float32, Float32, Float32]:
    return moments.count, moments.mean, moments.m2


def merge(groups: Moments) -> Moments:
    """The tree over the threads of a row: (rows, 128) groups -> (rows,)."""
    rows = groups.count.shape[0]
    state = Moments(*(field.reshape(rows, WARPS, LANES) for field in _fields(groups)))
    for lanes in (16, 8, 4, 2, 1):
        # Only the lower lanes matter; what the upper ones compute from lanes beyond the warp is never used.
        state = combine(state.at(np.s_[:, :, :lanes]), state.at(np.s_[:, :, lanes : 2 * lanes]))
    warps = state.at(np.s_[:, :, 0])
    for half in (2, 1):
        warps = combine(warps.at(np.s_[:, :half]), warps.at(np.s_[:, half : 2 * half]))
    return warps.at(np.s_[:, 0])


def rsqrt(x: Float32) -> Float32:
    """1 / sqrt(x), correctly rounded to fp32 (extended precision where the machine has it)."""
    result: Float32 = (np.longdouble(1) / np.sqrt(x.astype(np.longdouble))).astype(np.float32)
    return result


def row_moments(x: Float32) -> tuple[Float32, Float32]:
    """mean and M2 of each row. x (rows, n) fp32 -> two (rows,) fp32. ValueError as `chains`."""
    with np.errstate(all="ignore"):
        total = merge(chains(np.ascontiguousarray(x, dtype=np.float32)))
    return total.mean, total.m2


def to_bfloat16(x: Float32) -> NDArray[np.uint16]:
    """bfloat16 bits, rounded to nearest even; a NaN becomes 0x7fff."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    result: NDArray[np.uint16] = np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)
    return result


def from_bfloat16(bits: NDArray[np.uint16]) -> Float32:
    """The fp32 numbers of bfloat16 bits (exact)."""
    result: Float32 = (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return result


def widened(x: Array) -> Float32:
    """fp32 of fp32, fp16 or (as uint16 bits) bfloat16 numbers: exact."""
    if x.dtype == np.uint16:
        return from_bfloat16(x)
    if x.dtype not in (np.float32, np.float16):
        raise ValueError(f"dtype {x.dtype}: float32, float16, or uint16 for the bits of bfloat16")
    wide: Float32 = x.astype(np.float32)
    return wide


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float, rstd: Float32 | None = None) -> Normalised:
    """LayerNorm of each row. x (rows, n); gamma, beta (n,); one dtype: float32, float16, or uint16 = bfloat16 bits.

    `rstd` (rows,) replaces the computed one: with the device's own values y then has the device's own bits.
    """
    wide = widened(x)
    with np.errstate(all="ignore"):
        mean, m2 = row_moments(wide)
        var = m2 / np.float32(wide.shape[1])
        if rstd is None:
            rstd = rsqrt(var + np.float32(eps))
        scaled = rstd[:, None] * (wide - mean[:, None])
        y = fma(widened(gamma)[None, :], scaled, widened(beta)[None, :])
        narrow = to_bfloat16(y) if x.dtype == np.uint16 else y.astype(x.dtype)
    return Normalised(narrow, mean, var, rstd)
