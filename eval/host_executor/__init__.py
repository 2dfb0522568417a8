"""Run a candidate's CUDA kernels on the CPU, bit for bit, from the unedited source text. See executor.py."""

from kbsub.eval.host_executor.build import HostBuildError, HostUnavailable, build, kernel_names
from kbsub.eval.host_executor.executor import (
    HostExecutor,
    HostFault,
    LimitsNotChecked,
    adopt,
    host_namespace,
)
from kbsub.eval.host_executor.launch_limits import LaunchRefused
from kbsub.eval.host_executor.limits import (
    A100_LIMITS,
    B200_LIMITS,
    H200_LIMITS,
    L40S_LIMITS,
    RTX3090_LIMITS,
    RTX4090_LIMITS,
    RTX5090_LIMITS,
    SMALL_LIMITS,
    Limits,
)
from kbsub.eval.host_executor.memory import POISON, GuardedMemory, poisoned

__all__ = [
    "host_namespace", "adopt", "HostExecutor", "HostFault", "HostBuildError", "HostUnavailable",
    "build", "kernel_names", "GuardedMemory", "POISON", "poisoned", "Limits", "SMALL_LIMITS",
    "LaunchRefused", "LimitsNotChecked",
    "H200_LIMITS", "A100_LIMITS", "L40S_LIMITS", "RTX3090_LIMITS", "RTX4090_LIMITS", "RTX5090_LIMITS", "B200_LIMITS",
]  # fmt: skip
