"""Both norms of CPU tensors in the order of PyTorch's CUDA kernels, as NumPy models. fp32.

GroupNorm (`RowwiseMomentsCUDAKernel`): 512 threads a group, one warp where a group has fewer elements; thread t folds
elements t, t + threads, ... by Welford's update; lanes meet at distances 16 to 1, own value first, then the warps
likewise. y = a x + b with a = rstd gamma and b = beta - a mean, each fused.

InstanceNorm without parameters is `native_batch_norm` of the planes (`batch_norm_collect_statistics_kernel`): 32 to 512
threads have pixels, the others of 512 a count of nothing; lanes meet at distances 1 to 16, warps likewise, by a factor
rounded from float64. y = (x - mean) rstd + 0, fused.

rstd is the correctly rounded reciprocal root here; the device's may be two ulps off. Where lanes of an instance norm
meet, two products are added, and the first is taken to be the fused one: with counts that are powers of two it does not
matter.

Credit: the orders are those of `group_norm_kernel.cu`, `block_reduce.cuh`, `SharedReduceOps.h` and `Normalization.cuh`
of PyTorch, (c) the PyTorch contributors, BSD-style licence (licenses/PYTORCH_251_LICENSE.txt).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from kbsub.eval.operators.layer_norm.order import Float32, fma

THREADS = 512
WARP = 32
WIDTHS = (32, 64, 128, 256)  # of a block of an instance norm, 512 behind the last


@dataclass(frozen=True)
class Folded:
    """What threads hold: mean and the sum of squared differences (rows, threads), and how many elements (threads,)."""

    mean: Float32
    m2: Float32
    count: Float32


def fold(x: Float32, threads: int) -> Folded:
    """Welford's update of x (rows, n): thread t takes elements t, t + threads, ... in turn, dividing at each."""
    rows, n = x.shape
    mean, m2 = np.zeros((rows, threads), np.float32), np.zeros((rows, threads), np.float32)
    for step in range(-(-n // threads)):
        v = x[:, step * threads : (step + 1) * threads]
        there = v.shape[1]
        d = v - mean[:, :there]
        mean[:, :there] += d / np.float32(step + 1)
        m2[:, :there] = fma(d, v - mean[:, :there], m2[:, :there])
    counts = np.array([-(-(n - t) // threads) if t < n else 0 for t in range(threads)], np.float32)
    return Folded(mean, m2, counts)


# ---- group norm ----


def group_moments(x: Float32) -> tuple[Float32, Float32, Float32]:
    """(mean, m2, count) of each row of x (rows, n), (rows,) each."""
    rows, n = x.shape
    threads = WARP if n < THREADS else THREADS
    folded = fold(x, threads)
    counts = np.broadcast_to(folded.count, (rows, threads))
    own = tuple(each.reshape(rows, threads // WARP, WARP) for each in (folded.mean, folded.m2, counts))
    warps = _fall(own)
    if threads == WARP:
        return warps[0][:, 0], warps[1][:, 0], warps[2][:, 0]
    padded = tuple(np.zeros((rows, 1, WARP), np.float32) for _ in warps)
    for room, each in zip(padded, warps, strict=True):
        room[:, 0, : each.shape[1]] = each
    mean, m2, count = _fall(padded)
    return mean[:, 0], m2[:, 0], count[:, 0]


def _fall(own: tuple[Float32, ...]) -> tuple[Float32, ...]:
    """(..., 32) -> what lane 0 has once lanes have met at distances 16, 8, 4, 2, 1."""
    while own[0].shape[-1] > 1:
        half = own[0].shape[-1] // 2
        own = _combined(tuple(each[..., :half] for each in own), tuple(each[..., half:] for each in own))
    return tuple(each[..., 0] for each in own)


def _combined(a: tuple[Float32, ...], b: tuple[Float32, ...]) -> tuple[Float32, ...]:
    delta, count = b[0] - a[0], a[2] + b[2]
    share = b[2] / np.where(count == 0, np.float32(1), count)
    mean = fma(delta, share, a[0])
    m2 = fma(delta * delta * a[2], share, a[1] + b[1])
    merged = (mean, m2, count)
    return tuple(np.where(a[2] == 0, y, np.where(b[2] == 0, x, z)) for x, y, z in zip(a, b, merged, strict=True))


def group_norm(x: torch.Tensor, groups: int, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """y of x (batch, channels, *) fp32, contiguous, more than one pixel a channel; weight, bias (channels,)."""
    batch, channels, pixels = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if not x.numel():
        return torch.empty_like(x)
    wide = x.detach().contiguous().numpy().reshape(batch * groups, -1)
    with np.errstate(all="ignore"):
        mean, m2, count = group_moments(wide)
        rstd = rsqrt(m2 / count + np.float32(eps)).reshape(batch, groups, 1)
        gamma = weight.detach().float().numpy().reshape(1, groups, channels // groups)
        beta = bias.detach().float().numpy().reshape(1, groups, channels // groups)
        a = rstd * gamma
        b = fma(-a, mean.reshape(batch, groups, 1), np.broadcast_to(beta, a.shape))
        shape = (batch * channels, pixels)
        spread = [np.broadcast_to(each.reshape(-1, 1), shape) for each in (a, b)]
        y = fma(spread[0], wide.reshape(shape), spread[1])
    return torch.from_numpy(np.ascontiguousarray(y)).reshape(x.shape)


# ---- instance norm ----


def plane_moments(x: Float32) -> tuple[Float32, Float32]:
    """(mean, m2) of each row of x (planes, pixels), (planes,) each."""
    planes, pixels = x.shape
    width = next((each for each in WIDTHS if pixels <= each), THREADS)
    folded = fold(x, width)
    mean, m2, count = (np.zeros((planes, THREADS), np.float32) for _ in range(3))
    mean[:, :width], m2[:, :width], count[:, :width] = folded.mean, folded.m2, folded.count
    warps = _cross(*(each.reshape(planes, THREADS // WARP, WARP) for each in (mean, m2, count)))
    rooms = [np.zeros((planes, 1, WARP), np.float32) for _ in warps]
    for room, each in zip(rooms, warps, strict=True):
        room[:, 0, : THREADS // WARP] = each
    mean, m2, _ = _cross(*rooms)
    return mean[:, 0], m2[:, 0]


def _cross(mean: Float32, m2: Float32, count: Float32) -> tuple[Float32, Float32, Float32]:
    """(..., 32) -> what lane 0 has once lanes have met at distances 1, 2, 4, 8, 16, each with its own value first."""
    lanes = np.arange(WARP)
    for distance in (1, 2, 4, 8, 16):
        other = lanes ^ distance
        their_mean, their_m2, their_count = mean[..., other], m2[..., other], count[..., other]
        total = count + their_count
        factor = (1.0 / np.maximum(np.float32(1), total).astype(np.float64)).astype(np.float32)
        d = mean - their_mean
        m2 = m2 + fma(d * d * count * their_count, factor, their_m2)
        mean = fma(count, mean, their_count * their_mean) * factor
        count = total
    return mean[..., 0], m2[..., 0], count[..., 0]


def instance_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """y of x (batch, channels, *) fp32, contiguous, fewer than 2^31 elements, more than one pixel a plane."""
    if not x.numel():
        return torch.empty_like(x)
    wide = x.detach().contiguous().numpy().reshape(x.shape[0] * x.shape[1], -1)
    with np.errstate(all="ignore"):
        mean, m2 = plane_moments(wide)
        rstd = rsqrt(m2 / np.float32(wide.shape[1]) + np.float32(eps))
        y = fma(wide - mean[:, None], np.broadcast_to(rstd[:, None], wide.shape), np.zeros_like(wide))
    return torch.from_numpy(np.ascontiguousarray(y)).reshape(x.shape)


def rsqrt(values: Float32) -> Float32:
    """The reciprocal root, rounded once to fp32 (64 bits of significand: no second rounding can meet a tie)."""
    root: Float32 = (np.longdouble(1) / np.sqrt(values.astype(np.longdouble))).astype(np.float32)
    return root
