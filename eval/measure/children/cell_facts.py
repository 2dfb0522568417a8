"""What the kernel grants a process that bears on its speed, asked from inside it: priority, cores, limits, mitigations.

`facts` is a target of process.isolated; `measure cell` asks it inside a cell and outside, and shows what differs.
Imports no torch, and knows no cell.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Names of variables that may change how a program computes; no other name, and no value, is told.
TELLING = re.compile(r"^(CUDA|NVIDIA|TORCH|PYTORCH|TRITON|OMP|MKL|GOMP|KMP|MALLOC|GLIBC|LD|CUBLAS|CUDNN|NCCL|PYTHON)_")
STATUS = """Seccomp NoNewPrivs CapEff Speculation_Store_Bypass SpeculationIndirectBranch Cpus_allowed_list
Mems_allowed_list THP_enabled""".split()
PR_GET_TIMERSLACK, PR_GET_THP_DISABLE, GET_MEMPOLICY, IOPRIO_GET = 30, 42, 239, 252  # the last two: x86-64
REPEATS = 7


def facts(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """{"grants": {name: words}, "variables": [names], "host_us": {name: microseconds, median of seven}}."""
    libc = ctypes.CDLL(None)
    grants = {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "scheduler": os.sched_getscheduler(0),
        "cores": len(os.sched_getaffinity(0)),
        "timer slack ns": libc.prctl(PR_GET_TIMERSLACK),
        "huge pages off": libc.prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0),
        "memory policy": _memory_policy(libc),
        "io priority": libc.syscall(IOPRIO_GET, 1, 0) if os.uname().machine == "x86_64" else None,
        "autogroup nice": _read("/proc/self/autogroup").rpartition("nice")[2].strip(),
        "oom_score_adj": _read("/proc/self/oom_score_adj"),
        "cgroup": hashlib.sha256(_read("/proc/self/cgroup").encode()).hexdigest()[
            :12
        ],  # its name is this machine's own
        **{
            name: "{} {}".format(*resource.getrlimit(getattr(resource, name)))
            for name in dir(resource)
            if name.startswith("RLIMIT_")
        },
        **dict(
            line.split(":\t", 1) for line in _read("/proc/self/status").splitlines() if line.split(":")[0] in STATUS
        ),
    }
    return {
        "grants": {name: str(value) for name, value in grants.items()},
        "variables": sorted(name for name in os.environ if TELLING.match(name)),
        "host_us": {name: round(_microseconds(act), 3) for name, act in HOST.items()},
    }


def _loop() -> None:
    total = 0
    for number in range(1000):
        total += number


def _touch_memory() -> None:
    data = bytearray(1 << 20)
    data[:: 1 << 12] = b"x" * 256


# What a launch costs the host is made of these: interpreted code, the clock, system calls, fresh memory.
HOST: dict[str, Callable[[], Any]] = {
    "a loop of 1000": _loop,
    "clock": time.perf_counter,
    "system call": os.getppid,
    "open and close": lambda: os.close(os.open(os.__file__, os.O_RDONLY)),
    "1 MiB of fresh memory": _touch_memory,
}


def _microseconds(act: Callable[[], Any]) -> float:
    """Of one call, the median over REPEATS batches of about ten milliseconds."""
    found = []
    act()
    started = time.perf_counter()
    act()
    calls = max(1, int(0.01 / max(time.perf_counter() - started, 1e-7)))
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            act()
        found.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(found)


def _memory_policy(libc: ctypes.CDLL) -> int | None:
    mode = ctypes.c_int(-1)
    if os.uname().machine != "x86_64" or libc.syscall(GET_MEMPOLICY, ctypes.byref(mode), None, 0, None, 0):
        return None
    return mode.value


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
