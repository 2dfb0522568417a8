"""Holds the processes below one of ours, so that nothing of theirs runs until they are let go. Linux's /proc only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_STOPPED = frozenset("TtZX")
PATIENCE_S = 1.0


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, in other namespaces too; [] where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (found := _stat(int(entry.name))) is not None:
            children.setdefault(found[1], []).append(int(entry.name))
    below, todo = [], [pid]
    while todo:
        found_here = children.get(todo.pop(), [])
        below += found_here
        todo += found_here
    return below


def stop(pid: int) -> list[int]:
    """Stop every process below `pid` and wait until all stand still; the processes, for `resume`.

    One that is started meanwhile is stopped too. [] where none is below it. TimeoutError when they do not stand still.
    """
    ends = time.monotonic() + PATIENCE_S
    while True:
        found = descendants(pid)
        running = [each for each in found if (_stat(each) or ("X", 0))[0] not in _STOPPED]
        if not running:
            return found
        if time.monotonic() > ends:
            resume(found)
            raise TimeoutError(f"{len(running)} processes below {pid} do not stand still")
        for each in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGSTOP)


def resume(pids: list[int]) -> None:
    """Let them go."""
    for each in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGCONT)


def _stat(pid: int) -> tuple[str, int] | None:
    """(state, parent) of a process; None when it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)
