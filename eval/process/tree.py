"""Ends a child process with everything it started, whichever session its descendants fled to. Linux's /proc helps."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path


def kill_everything(child: subprocess.Popen[bytes], variable: str, started: int) -> None:
    """End the child, its process group and every descendant that had left the group.

    Descendants are known by `variable` ("NAME=value") in their environment; `started` is the child's `start_ticks`.
    """
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass  # the group is gone already
    child.wait()
    for _ in range(40):
        # A process in the middle of its exec shows no environment yet: look again, for 0.2 s at the most.
        if not _kill_marked(variable.encode(), started):
            return
        time.sleep(0.005)


def _kill_marked(mark: bytes, started: int) -> bool:
    """Kill the processes whose environment holds `mark`; True when there is reason to look again."""
    again = False
    for entry in Path("/proc").glob("[0-9]*"):  # empty where there is no /proc
        try:
            variables = (entry / "environ").read_bytes()
            if mark in variables.split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)
                again = True
            elif not variables and start_ticks(int(entry.name)) >= started and os.readlink(entry / "exe"):
                again = True
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return again


def start_ticks(pid: int) -> int:
    """When a process was started, in clock ticks since boot (field 22 of its stat); 0 where it cannot be read."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
