"""What the parent process may know about this machine without importing torch: GPU and memory."""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from pathlib import Path
from typing import Any

from kbsub.adapters.environment import project_commit
from kbsub.eval.process.isolated import run_isolated


def measured_on(device: str) -> dict[str, Any] | None:
    """The environment block of a record that `kbsub eval` does not make: a child's facts, with this project's commit.

    None when torch does not answer in two minutes.
    """
    found = run_isolated("kbsub.adapters.environment:judge", {"device": device}, timeout_s=120)
    return None if found.value is None else {**found.value["environment"], "project_commit": project_commit()}


def gpu_index(device: str) -> int | None:
    """The number of the GPU that "cuda:N" or "cuda" (or "", where none is asked for: 0) names; None for "cpu".

    ValueError, in words for the person who wrote --device, for anything else.
    """
    if device == "cpu":
        return None
    kind, colon, number = device.partition(":")
    if kind not in ("", "cuda") or (colon and not number.isdecimal()):
        raise ValueError(f"--device {device}: write cuda, cuda:<index> or cpu")
    return int(number or 0)


def gpu_name(index: int | None = 0) -> str | None:
    """The name of a GPU that the NVIDIA driver offers to this process ("NVIDIA H200"), or None.

    Asked of the driver library itself: no context is made, and CUDA_VISIBLE_DEVICES counts.
    """
    name = ctypes.create_string_buffer(256)
    found = _gpu(index)
    if found is None or found[0].cuDeviceGetName(name, len(name), found[1]):
        return None
    return name.value.decode()


def no_such_gpu(device: str, way_out: str = "see kbsub doctor") -> str:
    """The sentence for a --device that the driver does not offer: one wording for every command."""
    return f"--device {device}: the NVIDIA driver offers no such GPU; {way_out}"


def gpu_uuid(index: int | None = 0) -> str | None:
    """The UUID of that GPU as torch writes it, or None: two GPUs of one machine have one name."""
    number = (ctypes.c_ubyte * 16)()
    found = _gpu(index)
    if found is None or found[0].cuDeviceGetUuid(number, found[1]):
        return None
    return str(uuid.UUID(bytes=bytes(number)))


def gpu_memory_bytes(index: int | None = 0) -> int | None:
    """All memory of that GPU, used or not, or None."""
    found, total = _gpu(index), ctypes.c_size_t()
    if found is None or found[0].cuDeviceTotalMem_v2(ctypes.byref(total), found[1]):
        return None
    return total.value


def gpu_count() -> int | None:
    """How many GPUs the NVIDIA driver offers to this process (CUDA_VISIBLE_DEVICES counts); None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int()
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


def _gpu(index: int | None) -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """(the driver library, its handle of a GPU), or None without either; index None is no GPU."""
    if index is None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or index >= count.value:
        return None
    return None if driver.cuDeviceGet(ctypes.byref(device), index) else (driver, device)


def gpu_folder(name: str | None) -> str:
    """The result folder of a GPU: "NVIDIA H200" -> "h200", "NVIDIA GeForce RTX 3090" -> "rtx_3090", None -> "cpu"."""
    if name is None:
        return "cpu"
    short = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "_", short).strip("_") or "gpu"


def memory_limit_bytes() -> int | None:
    """What a candidate on the CPU may take: 85% of what is free now, the container's limit counted; None if unknown."""
    free: list[int] = []
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        free += [int(match[1]) * 1024] if match else []
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        free += [int(limit) - int((group / "memory.current").read_text())] if limit != "max" else []
    except (OSError, ValueError):
        pass  # not Linux, or another cgroup version: what was read so far counts
    return max(int(0.85 * min(free)), 1 << 30) if free else None


def display_path(path: Path) -> str:
    """Relative to the working directory where that is shorter: no absolute path of a machine gets into a result."""
    resolved = path.resolve()
    try:
        return str(resolved.relative_to(Path.cwd()))
    except ValueError:
        return os.path.join(*resolved.parts[-2:])
