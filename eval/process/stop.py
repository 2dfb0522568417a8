"""Holds the processes below one of ours, so that nothing of theirs runs until they are let go. Linux's /proc only."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

_STOPPED = frozenset("TtZX")
PATIENCE_S = 1.0
AT_ONCE_S = 0.05
STILL_NS = 100_000  # of all threads together: what standing still itself may take, once it is seen

Threads = dict[tuple[int, int], int]  # (process, thread) -> ns that it has run


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


def stop(pid: int, *, of_a_cell: bool = False) -> list[int]:
    """Stop every process below `pid` and wait until all stand still; the processes, for `resume`.

    One that is started meanwhile is stopped too; but one that is another every millisecond may never be seen.
    of_a_cell: `pid` is a launcher, whose namespace's init stops everything at once, such a one too.
    [] where none is below it. TimeoutError when they do not stand still.
    """
    ends = time.monotonic() + PATIENCE_S
    if of_a_cell:
        _stop_at_once(pid)
    while True:
        found = descendants(pid)
        running = [each for each in found if not _stands(each)]
        if not running:
            return found
        if time.monotonic() > ends:
            resume(found)
            raise TimeoutError(f"{len(running)} processes below {pid} do not stand still")
        for each in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(each, signal.SIGSTOP)


def _stop_at_once(launcher: int) -> None:
    """Ask for it, and wait until all below the init stand still, or for a moment where there is no init."""
    os.kill(launcher, signal.SIGUSR2)
    ends = time.monotonic() + AT_ONCE_S
    while time.monotonic() < ends:
        below = descendants(launcher)[1:]
        if below and all(_stands(each) for each in below):
            return
        time.sleep(0.0005)


def resume(pids: list[int]) -> None:
    """Let them go."""
    for each in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGCONT)


def settled_times(pids: list[int]) -> Threads:
    """`times` of processes that were just stopped, once they do not change: what a thread ran last is added to its
    time only when it leaves its core, a moment after it is seen to stand."""
    found, ends = times(pids), time.monotonic() + AT_ONCE_S
    while time.monotonic() < ends:
        time.sleep(0.001)
        before, found = found, times(pids)
        if found == before:
            break
    return found


def times(pids: list[int]) -> Threads:
    """How long every thread of these processes has run, in ns, by the scheduler."""
    found: Threads = {}
    for pid in pids:
        for thread in _threads(pid):
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[pid, thread] = int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return found


def stood_still(pid: int, before: Threads) -> bool:
    """Whether nothing below `pid` has run since `before`, the times of all that was there.

    A process can wake itself: a timer of its own that sends SIGCONT outlasts a SIGSTOP from outside.
    """
    after = times(descendants(pid))
    return after.keys() == before.keys() and sum(after[each] - before[each] for each in after) <= STILL_NS


def _stands(pid: int) -> bool:
    """Whether every thread stands still: the first one can have ended (Z) while others work."""
    return all((_stat(pid, thread) or ("X", 0))[0] in _STOPPED for thread in _threads(pid))


def _threads(pid: int) -> list[int]:
    try:
        return [int(each) for each in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return []


def _stat(pid: int, thread: int | None = None) -> tuple[str, int] | None:
    """(state, parent) of a process, or the state of one of its threads; None when it is gone."""
    place = f"/proc/{pid}" if thread is None else f"/proc/{pid}/task/{thread}"
    try:
        state, parent = Path(f"{place}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return None
    return state, int(parent)
