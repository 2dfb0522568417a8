"""Facts about the machine and the software a verdict was made with: the `environment` block of a result file.

Runs in a child process, after the candidate (torch is imported there anyway); `project_commit` is the parent's.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kbsub.adapters.pin import PIN

_HEAD = "# branch.oid "  # of git status --porcelain=v2 --branch
_CUPY_WHEELS = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
_NVRTC_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")


def facts(device: str, stand_ins: Iterable[str] = ()) -> dict[str, Any]:
    """The environment block for "cuda", "cuda:1" or "cpu"; null where this machine has no such thing.

    `memory_bytes` and `multiprocessors` are added on a GPU, `cpu` always.
    """
    import torch

    block: dict[str, Any] = {
        "gpu": None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "cupy": _version(_CUPY_WHEELS),
        "nvrtc": nvrtc_version(),
        "python": platform.python_version(),
        "kernelbench_commit": PIN,
        "project_commit": None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "stand_ins": sorted(stand_ins),
        "cpu": cpu_name(),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.device(device))
        block["gpu"] = properties.name
        block["memory_bytes"] = properties.total_memory
        block["multiprocessors"] = properties.multi_processor_count
    return block


def judge(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target for run_isolated: {"environment": facts}, for runs that have no official stage."""
    return {"environment": facts(payload.get("device", "cpu"))}


def driver_version() -> str | None:
    """The NVIDIA driver ("580.95.05"), from the kernel module, else from nvidia-smi; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
        match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
        if match:
            return match[1]
    except OSError:
        pass  # containers may hide it; nvidia-smi asks the driver itself
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None


def nvrtc_version() -> str | None:
    """What the NVRTC library says that CuPy's binding loads ("13.0"), else the installed wheel's version, else None.

    Asked for every row, whether its candidate compiles anything or not: rows of one run must agree.
    """
    try:
        binding = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
        return ".".join(map(str, binding.getVersion()))
    except Exception:  # no CuPy, or a binding that finds no library and says so in an exception of its own
        return _version(_NVRTC_WHEELS)


def cpu_name() -> str | None:
    """The processor's model name, where the system says it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or None


def project_commit() -> str | None:
    """The commit of this project's checkout, with "-dirty" when tracked files differ; None outside a git checkout.

    KBSUB_PROJECT_COMMIT overrides it, for copies of the tree that travel without their history.
    """
    if os.environ.get("KBSUB_PROJECT_COMMIT"):
        return os.environ["KBSUB_PROJECT_COMMIT"]
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "-c", "safe.directory=*", "status", "--porcelain=v2", "--branch"]
    command.append("--untracked-files=no")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    head = next((line.removeprefix(_HEAD) for line in said if line.startswith(_HEAD)), "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", head):
        return None  # no commit yet
    return head + ("-dirty" if any(not line.startswith("#") for line in said) else "")


def _version(names: Iterable[str]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
