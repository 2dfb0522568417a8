"""The order of PyTorch's other CUDA LayerNorm forward, in NumPy: rows that its vectorised kernel does not take.

Where n is not a multiple of 4, or above 2^24, or where x, gamma, beta or the output does not start at a multiple of
four elements, PyTorch runs RowwiseMomentsCUDAKernel and LayerNormForwardCUDAKernel. One block of 512 threads a row;
thread t folds element t, t + 512, ... with a division where the vectorised path (order.py) multiplies by a reciprocal;
warps by shuffle-down, then one warp over the sixteen results. A group without elements gives the other one back as it
is. M2 is divided by the count that the groups have added up, in fp32.

Written from layer_norm_kernel.cu, block_reduce.cuh and SharedReduceOps.h of PyTorch, read at 2.11 and 2.13
(BSD-style licence: licenses/PYTORCH_251_LICENSE.txt). Knows no torch, no kernel, no GPU; `rsqrt` as in order.py.
"""

from __future__ import annotations

import numpy as np

from kbsub.eval.operators.layer_norm.order import (
    MAX_WIDTH,
    VECTOR,
    Array,
    Float32,
    Moments,
    Normalised,
    fma,
    rsqrt,
    to_bfloat16,
    widened,
)

LANES, WARPS = 32, 16
THREADS = LANES * WARPS
MAX_ELEMENTS = 2**31 - 1


def taken(n: int, itemsize: int, addresses: tuple[int, ...]) -> bool:
    """Whether PyTorch sends rows of n elements of `itemsize` bytes this way; addresses of x, gamma, beta and y."""
    return n % VECTOR != 0 or n > MAX_WIDTH or any(address % (VECTOR * itemsize) for address in addresses)


def fold(moments: Moments, x: Float32) -> Moments:
    """One more element in every group (Welford's update, with a division)."""
    count = moments.count + np.float32(1)
    delta = x - moments.mean
    mean = moments.mean + delta / count
    return Moments(count, mean, fma(delta, x - mean, moments.m2))


def combine(a: Moments, b: Moments) -> Moments:
    """Two groups into one; not symmetric in its rounding. An empty group leaves the other one as it is."""
    count = a.count + b.count
    share = b.count / np.where(count == 0, np.float32(1), count)
    delta = b.mean - a.mean
    # Contractions as nvcc makes them of the published text: see the PTX check of test_rowwise_order.py.
    mean = fma(delta, share, a.mean)
    m2 = fma(delta * delta * a.count, share, a.m2 + b.m2)
    fields = (("count", count), ("mean", mean), ("m2", m2))
    no_a, no_b = a.count == 0, b.count == 0
    return Moments(*(np.where(no_a, getattr(b, f), np.where(no_b, getattr(a, f), both)) for f, both in fields))


def chains(x: Float32) -> Moments:
    """What each of the 512 threads of a row has before the first merge. x (rows, n) fp32 -> groups (rows, 512)."""
    rows, n = x.shape
    count, mean, m2 = (np.zeros((rows, THREADS), np.float32) for _ in range(3))
    for start in range(0, n, THREADS):
        tile = np.ascontiguousarray(x[:, start : start + THREADS])
        here = np.s_[:, : tile.shape[1]]
        state = fold(Moments(count[here], mean[here], m2[here]), tile)
        count[here], mean[here], m2[here] = state.count, state.mean, state.m2
    return Moments(count, mean, m2)


def _merge_lanes(groups: Moments) -> Moments:
    """The shuffle-down tree over the last axis, of 32."""
    for lanes in (16, 8, 4, 2, 1):
        groups = combine(groups.at(np.s_[..., :lanes]), groups.at(np.s_[..., lanes : 2 * lanes]))
    return groups.at(np.s_[..., 0])


def merge(groups: Moments) -> Moments:
    """The tree over the threads of a row: (rows, 512) groups -> (rows,)."""
    rows = groups.count.shape[0]
    warps = _merge_lanes(Moments(*(f.reshape(rows, WARPS, LANES) for f in (groups.count, groups.mean, groups.m2))))
    absent = np.zeros((rows, LANES - WARPS), np.float32)
    padded = (np.concatenate((f, absent), axis=1) for f in (warps.count, warps.mean, warps.m2))
    return _merge_lanes(Moments(*padded))


def layer_norm(x: Array, gamma: Array, beta: Array, eps: float, rstd: Float32 | None = None) -> Normalised:
    """LayerNorm of each row. x (rows, n); gamma, beta (n,); one dtype: float32, float16, or uint16 = bfloat16 bits.

    `rstd` (rows,) replaces the computed one: with the device's own values y then has the device's own bits.
    ValueError for rows without elements and for more than 2^31 - 1 elements.
    """
    if x.shape[1] == 0 or x.size > MAX_ELEMENTS:
        raise ValueError(f"x: shape {x.shape}, must have rows of at least one element and fewer than 2^31 in all")
    wide = widened(x)
    with np.errstate(all="ignore"):
        total = merge(chains(np.ascontiguousarray(wide)))
        var = total.m2 / total.count
        if rstd is None:
            rstd = rsqrt(var + np.float32(eps))
        scaled = (wide - total.mean[:, None]) * rstd[:, None]
        y = fma(scaled, widened(gamma)[None, :], widened(beta)[None, :])
        narrow = to_bfloat16(y) if x.dtype == np.uint16 else y.astype(x.dtype)
    return Normalised(narrow, total.mean, var, rstd)
