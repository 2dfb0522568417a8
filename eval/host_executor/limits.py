"""What a device allows, as far as a candidate's geometry may depend on it; the GPUs that the checks speak of.

Values as cuDeviceGetAttribute gives them. Must not know kernels or launches (launch_limits.py has the rules).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Limits:
    """The fields of a candidate's own DeviceLimits: bytes, threads, counts."""

    index: int
    compute_capability: int
    multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    fp32_to_fp64_ratio: int


H200_LIMITS = Limits(0, 90, 132, 232_448, 233_472, 2048, 60 << 20, 2)
A100_LIMITS = Limits(0, 80, 108, 166_912, 167_936, 2048, 40 << 20, 2)
L40S_LIMITS = Limits(0, 89, 142, 101_376, 102_400, 1536, 96 << 20, 64)
RTX3090_LIMITS = Limits(0, 86, 82, 101_376, 102_400, 1536, 6 << 20, 64)
RTX4090_LIMITS = Limits(0, 89, 128, 101_376, 102_400, 1536, 72 << 20, 64)
B200_LIMITS = Limits(0, 100, 148, 232_448, 233_472, 2048, 126 << 20, 2)
RTX5090_LIMITS = Limits(0, 120, 170, 101_376, 102_400, 1536, 96 << 20, 64)
# A device with few multiprocessors: a persistent kernel then has few blocks, and small cases run fast.
SMALL_LIMITS = replace(H200_LIMITS, multiprocessors=4)
