"""Builds while others are judged: who goes first, who waits, what a killed build leaves. A stub builds, on a CPU."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from kbsub.eval.process.cell import probe
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.run.batch.build_ahead import TARGET, build_one, queue_of
from kbsub.eval.run.batch.build_child import tidy
from kbsub.eval.run.batch.job import Job, Settings
from kbsub.eval.run.batch.work import prepare
from kbsub.eval.tasks.cell import cell_of
from support.paths import child_path

BUILT = Outcome(Status.OK, {"built": ["x.so"], "error": None}, "", "", 0.0)


@pytest.fixture
def batch(tmp_path):
    """Samples 0 and 2 build, 1 and 3 do not."""
    for index in range(4):
        text = "load_inline" if index % 2 == 0 else "x = 1"
        (tmp_path / f"level_1_problem_40_sample_{index}_kernel.py").write_text(text)
    return prepare(tmp_path, Settings(device="cpu"))


def taken(queue):
    return [todo.sample.sample_id for todo in iter(queue.take, None)]


def test_what_needs_no_build_goes_first_and_waiting_is_counted(batch):
    go = threading.Event()

    def build(job, builders, stop):
        assert go.wait(20)
        time.sleep(0.2)
        return BUILT

    with queue_of(batch, 2, build) as queue:
        assert [queue.take(wait=False).sample.sample_id for _ in range(2)] == [1, 3]
        assert queue.take(wait=False) is None and queue.left() == 2 and batch.waited_s == 0
        go.set()
        assert sorted(taken(queue)) == [0, 2]
    assert batch.waited_s >= 0.15 and batch.built == 2


def test_without_builders_the_order_is_that_of_the_folder(batch):
    with queue_of(batch) as queue:
        assert taken(queue) == [0, 1, 2, 3]
    assert (batch.waited_s < 0.1, batch.built) == (True, 0)


def test_a_build_that_raises_lets_its_row_and_the_next_be_judged(batch):
    def build(job, builders, stop):
        raise OSError("no space")

    with queue_of(batch, 1, build) as queue:
        assert sorted(taken(queue)) == [0, 1, 2, 3]


def test_leaving_ends_the_builds(batch):
    ended = []

    def build(job, builders, stop):
        ended.append(stop.wait(20))
        return BUILT

    with queue_of(batch, 1, build) as queue:
        assert queue.take().sample.sample_id == 1
    assert ended == [True], "one was under way, and no other was begun"


def test_no_more_builds_at_once_than_were_asked_for(batch):
    running, most = [], []

    def build(job, builders, stop):
        running.append(job)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(job)
        return BUILT

    with queue_of(batch, 1, build) as queue:
        assert sorted(taken(queue)) == [0, 1, 2, 3]
    assert most == [1, 1]


def test_a_lock_that_a_killed_build_left_is_removed(tmp_path):
    (tmp_path / "ext").mkdir()
    (tmp_path / "ext" / "lock").touch()
    (tmp_path / "ext" / "main.o").touch()
    tidy(tmp_path)
    assert [path.name for path in (tmp_path / "ext").iterdir()] == ["main.o"]


SOURCE = """
import os, torch
folder = os.path.join(os.environ["TORCH_EXTENSIONS_DIR"], "load_inline_stand_in")
os.makedirs(folder, exist_ok=True)
open(os.path.join(folder, os.environ["CUDA_VISIBLE_DEVICES"] + "made.so"), "w").close()
class ModelNew(torch.nn.Module): ...
"""


def test_a_build_lands_where_the_judge_of_that_file_looks(tmp_path, monkeypatch):
    """In the candidate's own cell, below upstream's build folder, with no GPU in sight."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", child_path()["PYTHONPATH"])
    job = Job("s", "level1_40", 1, 40, 0, SOURCE, Settings(device="cpu", cell=probe().level))
    outcome = build_one(job, 1, threading.Event())
    assert outcome.value == {"built": ["made.so"], "error": None}, (outcome.message, outcome.log)
    cache = cell_of([job.sha256], job.task, None).cache
    (made,) = cache.rglob("made.so")
    assert f"extensions/{job.sha256[:16]}/load_inline_stand_in" in str(made)


def test_a_build_is_ended_when_it_is_not_wanted_any_more():
    stop = threading.Event()
    threading.Timer(1.0, stop.set).start()
    payload = {"candidate_source": "import time; time.sleep(60)", "task": "level1_40", "kernelbench": None}
    began = time.monotonic()
    outcome = run_isolated(TARGET, payload, timeout_s=60, cancelled=stop.is_set)
    assert outcome.value is None and time.monotonic() - began < 30


def test_a_file_that_cannot_be_executed_says_so_and_costs_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", child_path()["PYTHONPATH"])
    job = Job("s", "level1_40", 1, 40, 0, "load_inline(", Settings(device="cpu", cell="unconfined"))
    outcome = build_one(replace(job), 1, threading.Event())
    assert outcome.status is Status.OK and "line 1" in outcome.value["error"]
