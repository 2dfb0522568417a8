"""Ten thousand small rows with a stub for a judge: nothing is lost, memory stays flat, little time is spent a row."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from support.paths import child_path

ROWS = 10_000
MOST_MS_A_ROW = 5.0
MOST_GROWTH = 96 << 20  # bytes, from the first thousand rows to the last

# The parent's half alone: the judge answers at once, in this process.
DRIVER = '''
import json, resource, sys, time
from pathlib import Path
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run.batch import job as jobs, work
from kbsub.eval.run.batch.build_ahead import queue_of

WORDS = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {}, "runtime": 1.0}
judged, began, memory = 0, time.process_time(), 0

def resident():
    """Bytes. Not ru_maxrss: that begins with the peak of whoever forked this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

def judge(batch):
    global judged, memory
    with queue_of(batch) as queue:
        while (todo := queue.take()) is not None:
            job = batch.job(todo)
            yield job, jobs.row_of(job, {"official": Outcome(Status.OK, {"official": WORDS}, "", "", 0.0)})
            judged += 1
            if judged == 1000:
                memory = resident()

folder = Path(sys.argv[1])
with work.alone(folder):
    started = time.monotonic()
    batch = work.prepare(folder, jobs.Settings(device="cpu"))
    prepared = time.monotonic() - started
    rows = work.evaluate(batch, judge)
    seconds = time.monotonic() - started
grown = resident() - memory
facts = {"rows": len(rows), "judged": judged, "seconds": seconds, "prepared": prepared, "grown": grown}
facts["cpu"] = time.process_time() - began
print(json.dumps(facts))
'''


@pytest.fixture
def thousands(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", child_path()["PYTHONPATH"])
    for number in range(ROWS):
        name = f"level_1_problem_{number % 100 + 1}_sample_{number // 100}_kernel.py"
        (tmp_path / name).write_text(f"# {number}\n" + "x = 1\n" * 100)
    return tmp_path


def start(folder):
    return subprocess.Popen([sys.executable, "-c", DRIVER, str(folder)], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_thousand_rows_survive_a_kill_in_flat_memory_at_little_cost(thousands):
    process, rows = start(thousands), thousands / "kbsub_rows"
    end = time.monotonic() + 300
    while not rows.is_dir() or len(os.listdir(rows)) < 2000:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {path.name: path.stat().st_mtime_ns for path in rows.glob("*.json")}
    assert 2000 <= len(kept) < ROWS
    output, _ = start(thousands).communicate(timeout=600)
    facts = json.loads(output.splitlines()[-1])
    print(facts)
    assert (facts["rows"], facts["judged"]) == (ROWS, ROWS - len(kept))
    assert all((rows / name).stat().st_mtime_ns == when for name, when in kept.items()), "a kept row was judged again"
    assert facts["grown"] < MOST_GROWTH, facts
    # Of the processor: how busy others keep this machine is not the batch's doing. Kept rows are read, too.
    assert facts["cpu"] * 1000 / facts["judged"] < MOST_MS_A_ROW, facts
