"""Processes stand still while they are held, all of them, and go on afterwards."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from kbsub.eval.process.cell import Cell
from kbsub.eval.process.stop import descendants, resume, settled_times, stood_still, stop, times

COUNT = "import time\nfor n in range(10**6):\n    print(n, flush=True)\n    time.sleep(0.005)\n"
TREE = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COUNT!r}])\n"
# Processes that are not where a look at their first thread, or one SIGSTOP, would have them.
FIRST_THREAD_ENDS = f"""
import ctypes, threading
threading.Thread(target=exec, args=({COUNT!r}, {{}})).start()
ctypes.CDLL(None).syscall(ctypes.c_long({{"x86_64": 60}}.get(__import__("platform").machine(), 93)), 0)
"""
WAKES_ITSELF = f"""
import ctypes, signal, struct
signal.signal(signal.SIGCONT, lambda *_: None)  # what is ignored arms no timer again
libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
libc.timer_create(1, struct.pack("QiI48x", 0, 18, 0), ctypes.byref(timer))
libc.timer_settime(timer, 0, struct.pack("4q", 0, 50_000_000, 0, 50_000_000), None)
{COUNT}"""
# Another process every millisecond: what a scan of /proc lists has ended when it is looked at.
ALWAYS_ANOTHER = """
import ctypes, os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
if os.fork():
    time.sleep(600)
for n in range(10**9):
    print(n, flush=True)
    if os.fork():
        os._exit(0)
"""


def lines(path) -> int:
    return path.read_bytes().count(b"\n")


def test_what_is_held_does_nothing_until_it_is_let_go(tmp_path):
    out = tmp_path / "out"
    with out.open("wb") as file:
        child = subprocess.Popen([sys.executable, "-c", TREE], stdout=file)
    try:
        ends = time.monotonic() + 60
        while lines(out) < 3 and time.monotonic() < ends:
            time.sleep(0.01)
        held = stop(child.pid)
        assert len(held) == 1 and held == descendants(child.pid)
        before = lines(out)
        time.sleep(0.2)
        assert lines(out) == before, "a held process went on"
        resume(held)
        ends = time.monotonic() + 60
        while lines(out) == before and time.monotonic() < ends:
            time.sleep(0.01)
        assert lines(out) > before, "a process that was let go stands still"
    finally:
        for each in descendants(child.pid):
            subprocess.run(["kill", "-9", str(each)], check=False)
        child.kill()
        child.wait()


@pytest.fixture
def counting(tmp_path):
    """Starts a program that counts, below another process: (its parent's pid, the file that it counts in)."""
    started = []

    def start(program: str):
        out = tmp_path / "out"
        with out.open("wb") as file:
            outer = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {program!r}])\n"
            started.append(subprocess.Popen([sys.executable, "-c", outer], stdout=file))
        ends = time.monotonic() + 60
        while lines(out) < 3 and time.monotonic() < ends:
            time.sleep(0.01)
        return started[-1].pid, out

    yield start
    for child in started:
        for each in descendants(child.pid):
            subprocess.run(["kill", "-9", str(each)], check=False)
        child.kill()
        child.wait()


def test_a_process_whose_first_thread_has_ended_is_held_too(counting):
    pid, out = counting(FIRST_THREAD_ENDS)
    held = stop(pid)
    ran, before = times(held), lines(out)
    time.sleep(0.2)
    assert len(held) == 1 and lines(out) == before and stood_still(pid, ran)
    resume(held)
    ends = time.monotonic() + 60
    while lines(out) < before + 50 and time.monotonic() < ends:
        time.sleep(0.01)
    assert lines(out) > before and not stood_still(pid, ran)


def test_a_process_that_wakes_itself_is_seen_to_have_run(counting):
    pid, out = counting(WAKES_ITSELF)
    held = stop(pid)
    ran, before = times(held), lines(out)
    time.sleep(0.3)
    assert len(held) == 1 and lines(out) > before and not stood_still(pid, ran)


def test_a_process_of_a_cell_that_is_always_another_is_held_too(tmp_path):
    cell, out = Cell(tmp_path / "cell"), tmp_path / "out"
    if cell.confinement().level != "namespaces":
        pytest.skip("no namespaces here, and so no init that stops everything at once")
    with out.open("wb") as file:
        child = cell.popen([sys.executable, "-c", ALWAYS_ANOTHER], stdout=file)
    try:
        assert child.entered()
        for _ in range(5):
            before, ends = lines(out), time.monotonic() + 60
            while lines(out) < before + 20 and time.monotonic() < ends:
                time.sleep(0.01)
            held = stop(child.pid, of_a_cell=True)
            ran, before = times(held), lines(out)
            time.sleep(0.1)
            assert lines(out) == before and stood_still(child.pid, ran)
            resume(held)
    finally:
        cell.end(child)


def test_nothing_below_is_nothing_to_hold():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert stop(child.pid) == []
    child.communicate(b"\n")


def test_what_a_thread_ran_last_is_waited_for(monkeypatch):
    """Its time grows by up to a tick after it is seen to stand: taken too soon, an honest file seemed to have run."""
    seen = iter([{(1, 1): 5}, {(1, 1): 4_000_005}, {(1, 1): 4_000_005}])
    monkeypatch.setattr("kbsub.eval.process.stop.times", lambda pids: next(seen))
    assert settled_times([1]) == {(1, 1): 4_000_005}
