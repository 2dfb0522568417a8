"""Run a candidate's CUDA kernels on the CPU, bit for bit, from the unedited source text. See executor.py."""

from kbsub.eval.host_executor.build import HostBuildError, HostUnavailable, build, kernel_names
from kbsub.eval.host_executor.executor import (
    A100_LIMITS,
    B200_LIMITS,
    H200_LIMITS,
    RTX3090_LIMITS,
    RTX4090_LIMITS,
    RTX5090_LIMITS,
    SMALL_LIMITS,
    HostExecutor,
    HostFault,
    Limits,
    adopt,
    host_namespace,
)
from kbsub.eval.host_executor.memory import POISON, GuardedMemory, poisoned

__all__ = [
    "host_namespace", "adopt", "HostExecutor", "HostFault", "HostBuildError", "HostUnavailable",
    "build", "kernel_names", "GuardedMemory", "POISON", "poisoned", "Limits", "SMALL_LIMITS",
    "H200_LIMITS", "A100_LIMITS", "RTX3090_LIMITS", "RTX4090_LIMITS", "RTX5090_LIMITS", "B200_LIMITS",
]  # fmt: skip
