"""Was the machine quiet? Clocks, throttling, other processes, read (never set) through NVML; and the flags they raise.

Needs the `nvidia-ml-py` package and a driver; without them a snapshot says so and raises no flag of its own. This file
must not know what was timed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

# nvmlClocksEventReason* bits. GpuIdle (bit 0) and the clocks a user asked for (bits 1 and 8) are no disturbance.
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
CLOCK_DROP = 0.02  # the SM clock after the run against before it; less is the usual step of the governor
NOISY_IQR = 0.03  # relative interquartile range above which a median of 35 rounds moves by more than about 1%


def snapshot(uuid: str | None) -> dict[str, Any]:
    """The state of one GPU now. `uuid` is torch's device property; None, or no NVML, gives {"available": False}.

    Clocks in MHz, temperature in Celsius, power in watts, memory in bytes. Read only.
    """
    if uuid is None:
        return {"available": False, "reason": "no NVIDIA GPU"}
    try:
        import pynvml
    except ImportError:
        return {"available": False, "reason": "nvidia-ml-py is not installed: pip install nvidia-ml-py"}
    try:
        pynvml.nvmlInit()
        try:
            return _read(pynvml, uuid)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"available": False, "reason": f"NVML: {error}"}


def _read(nvml: Any, uuid: str) -> dict[str, Any]:
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = nvml.nvmlDeviceGetHandleByUUID(name)

    def read(function: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, function)(handle, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None  # not every driver answers every question; an absent answer is stored as null

    power = read("nvmlDeviceGetPowerUsage")
    reasons = read("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = read("nvmlDeviceGetCurrentClocksThrottleReasons")
    running = read("nvmlDeviceGetComputeRunningProcesses")
    return {
        "available": True,
        "sm_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        "memory_mhz": read("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        "sm_max_mhz": read("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        "temperature_c": read("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power is None else power / 1000,
        "throttle_reasons": None if reasons is None else throttle_words(int(reasons)),
        "other_processes": None if running is None else other_processes([p.pid for p in running], os.getpid()),
    }


def throttle_words(bits: int) -> list[str]:
    """The disturbing bits of NVML's clock event reasons, in words."""
    return [words for bit, words in THROTTLE_REASONS.items() if bits & bit]


def other_processes(pids: Sequence[int], own: int) -> int:
    """How many processes besides this one hold a context on the GPU.

    In a container NVML reports the host's numbers, where ours is unknown: one of those listed is then taken to be us.
    """
    return len([pid for pid in pids if pid != own]) if own in pids else max(0, len(pids) - 1)


def machine_flags(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What the two snapshots around a run say against it."""
    if not (before.get("available") and after.get("available")):
        return []
    flags = []
    reasons = sorted({*(before.get("throttle_reasons") or []), *(after.get("throttle_reasons") or [])})
    if reasons:
        flags.append("throttled: " + ", ".join(reasons))
    first, last = before.get("sm_mhz"), after.get("sm_mhz")
    if first and last and last < first * (1 - CLOCK_DROP):
        flags.append(f"SM clock fell from {first} to {last} MHz")
    others = max(before.get("other_processes") or 0, after.get("other_processes") or 0)
    if others:
        flags.append(f"{others} other process{'es' if others > 1 else ''} on the GPU")
    return flags


def sample_flags(statistics: Mapping[str, Any], taken: int) -> list[str]:
    """What the samples of one program say against their own median (keys of timing.spread)."""
    flags = []
    if statistics["relative_iqr"] > NOISY_IQR:
        flags.append(f"noisy: relative IQR {statistics['relative_iqr']:.1%}")
    needed = statistics.get("samples_for_half_percent")
    if needed is None:
        flags.append("one sample only")
    elif needed > taken:
        flags.append(f"{taken} samples, {needed} needed for a standard error of 0.5%")
    return flags
