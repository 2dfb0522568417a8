"""Processes stand still while they are held, all of them, and go on afterwards."""

from __future__ import annotations

import subprocess
import sys
import time

from kbsub.eval.process.stop import descendants, resume, stop

COUNT = "import time\nfor n in range(10**6):\n    print(n, flush=True)\n    time.sleep(0.005)\n"
TREE = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COUNT!r}])\n"


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


def test_nothing_below_is_nothing_to_hold():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert stop(child.pid) == []
    child.communicate(b"\n")
