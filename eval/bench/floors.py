"""The hardware's floors, measured in the same run: bytes over copy bandwidth, and a chain of dependent updates.

A floor is no opinion about a kernel: it is what this GPU needs for the bytes alone, or for the arithmetic order alone.
Knows torch and CuPy; nothing of candidates. Times in ms, sizes in bytes, bandwidth in GB/s (1e9 bytes a second).
"""

from __future__ import annotations

import statistics
from typing import Any

COPY_BYTES = 512 << 20  # read once and written once; far beyond any L2, long enough to hide the launch
COPY_REPEATS = 21
CHAIN_REPEATS = 5

# Registers only. One thread of the reference order folds `updates` values into (mean, M2); each value costs two
# dependent instructions for the mean (subtract, fused multiply-add) and M2 rides beside it. The values and the
# reciprocals come from registers that the compiler cannot know, so nothing is folded away and no load is waited for.
CHAIN_SOURCE = r"""
#define UPDATE_MEAN(i) { const float d = __fsub_rn(x##i, mean); mean = __fmaf_rn(d, r##i, mean); }
#define UPDATE_BOTH(i) { const float d = __fsub_rn(x##i, mean); mean = __fmaf_rn(d, r##i, mean); \
                         m2 = __fmaf_rn(d, __fsub_rn(x##i, mean), m2); }
#define KERNEL(name, UPDATE)                                                                                        \
extern "C" __global__ void name(int updates, float x0, float x1, float x2, float x3,                                \
                                float r0, float r1, float r2, float r3, float* out) {                               \
    float mean = 0.0f, m2 = 0.0f;                                                                                   \
    _Pragma("unroll 8") for (int i = 0; i < updates; i += 4) { UPDATE(0) UPDATE(1) UPDATE(2) UPDATE(3) }            \
    if (mean == 12345.0f || m2 == 12345.0f) out[threadIdx.x] = mean + m2;                                           \
}
KERNEL(chain_mean, UPDATE_MEAN)
KERNEL(chain_mean_m2, UPDATE_BOTH)
"""


def memory_floor_ms(bytes_moved: int, copy_gb_s: float) -> float:
    """The time that moving so many bytes (reads and writes counted) takes at the measured copy bandwidth."""
    return bytes_moved / (copy_gb_s * 1e9) * 1e3


def copy_bandwidth(device: Any, size_bytes: int = COPY_BYTES, repeats: int = COPY_REPEATS) -> float:
    """GB/s of a device-to-device copy on a CUDA device, both directions counted; the median of `repeats` copies."""
    import torch

    event: Any = torch.cuda.Event
    free, _ = torch.cuda.mem_get_info(device)
    size_bytes = min(size_bytes, free // 4) // 16 * 16
    source = torch.zeros(size_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times = []
    with torch.cuda.device(device):
        for _ in range(3):
            target.copy_(source)
        for _ in range(repeats):
            start, end = event(enable_timing=True), event(enable_timing=True)
            torch.cuda.synchronize(device)
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    del source, target
    torch.cuda.empty_cache()
    return float(2 * size_bytes / (statistics.median(times) * 1e-3) / 1e9)


def chain_floor(device_index: int, chains: int, updates: int) -> dict[str, float]:
    """Time of `chains` independent chains of `updates` dependent updates each, a warp a block: the arithmetic alone.

    Returns {"chain_ms": mean alone, "chain_mean_m2_ms": mean and M2 in the same warp}. Raises ValueError on sizes that
    are not positive, and whatever CuPy raises when it cannot compile.
    """
    if chains < 1 or updates < 1:
        raise ValueError(f"chain floor: {chains} chains of {updates} updates; both must be positive")
    import cupy
    import numpy as np
    import torch

    event: Any = torch.cuda.Event
    blocks, threads = -(-chains // 32), min(chains, 32)
    result = {}
    with cupy.cuda.Device(device_index), torch.cuda.device(device_index):
        out = torch.zeros(32, device=f"cuda:{device_index}")
        module = cupy.RawModule(code=CHAIN_SOURCE)
        reciprocals = [np.float32(1.0 / n) for n in (2, 3, 5, 7)]
        values = [np.float32(v) for v in (0.1, 0.7, 0.3, 0.9)]
        arguments = (np.int32(updates), *values, *reciprocals, np.uint64(out.data_ptr()))
        # CuPy's current stream and torch's default stream are both the legacy default stream: events see the launch.
        for key, name in (("chain_ms", "chain_mean"), ("chain_mean_m2_ms", "chain_mean_m2")):
            kernel = module.get_function(name)
            times = []
            for repeat in range(CHAIN_REPEATS + 2):
                start, end = event(enable_timing=True), event(enable_timing=True)
                torch.cuda.synchronize(device_index)
                start.record()
                kernel((blocks,), (threads,), arguments)
                end.record()
                end.synchronize()
                if repeat >= 2:
                    times.append(start.elapsed_time(end))
            result[key] = statistics.median(times)
    return result
