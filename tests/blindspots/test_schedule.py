"""What runs beside what, what a child's death costs, and what is done again alone. No child is started."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from kbsub.adapters.task import TaskError, load_task
from kbsub.eval.blindspots.schedule import (
    ScheduleError,
    Terms,
    Wanted,
    bundles,
    gpu_bytes,
    is_current,
    judge_all,
    wanted,
)
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.results.blindspots import read_blindspots
from kbsub.eval.tasks.sizes import Costs, Size

GB = 1 << 30


def task(number: int, gpu: int = GB, inputs: int = 0) -> Wanted:
    return Wanted(f"level1_{number}", f"sha{number}", "official", Size(), inputs, gpu)


def terms(workers: int = 2, total: int = 10 * GB, deadline: float | None = None) -> Terms:
    return Terms("kb", "cuda", "fp32", 10.0, time.time() + 60 if deadline is None else deadline, workers, total)


def record(name: str, **more: Any) -> dict[str, Any]:
    head = {"task": name, "name": name, "sha256": f"sha{name.partition('_')[2]}", "provenance": "p", "tolerance": 1e-4}
    return {**head, "precision": "fp32", "size": "official", "seeds": [1], "another_seed": 2, **more}


def ended(status: Status = Status.OK) -> Outcome:
    return Outcome(status, {} if status is Status.OK else None, "" if status is Status.OK else "why", "", 1.0)


def run_of(answer: Any) -> Any:
    """A stand-in for run_isolated: `answer(name, payload)` gives a record's extra keys, or a Status to end with."""

    def run(target: str, payload: dict[str, Any], *, timeout_s: float, on_progress: Any, env: Any) -> Outcome:
        for item in payload["tasks"]:
            on_progress({"stage": "task", "case": item["task"]})
            found = answer(item["task"], payload)
            if isinstance(found, Status):
                return ended(found)
            on_progress({"stage": "record", "record": record(item["task"], **found)})
        return ended()

    return run


def test_large_inputs_come_last_and_like_sizes_share_a_child():
    tasks = [task(1, 40 * GB, 6 * GB), task(2), task(3), task(4, 19 * GB), task(5, 60 * GB)]
    assert [[each.task for each in bundle] for bundle in bundles(tasks)] == [
        ["level1_2", "level1_3"],
        ["level1_4"],
        ["level1_5"],
        ["level1_1"],
    ]
    assert len(bundles([task(n) for n in range(25)])) == 3


def test_no_more_at_once_than_the_memory_holds(tmp_path):
    taken, most, lock = [0], [0], threading.Lock()

    def answer(name: str, payload: dict[str, Any]) -> dict[str, Any]:
        with lock:
            taken[0] += 4
            most[0] = max(most[0], taken[0])
        time.sleep(0.02)
        with lock:
            taken[0] -= 4
        return {}

    tasks = [task(n, 30 * GB) for n in range(8)]
    assert judge_all(tasks, terms(workers=8, total=70 * GB), tmp_path, lambda _: None, run_of(answer)) == []
    assert most[0] == 8  # two children of 4
    assert len(list(tmp_path.glob("*.json"))) == 8


def test_a_child_that_dies_costs_the_task_it_was_at(tmp_path):
    def answer(name: str, payload: dict[str, Any]) -> Any:
        return Status.CRASHED if name == "level1_2" else {}

    assert judge_all([task(1), task(2), task(3)], terms(), tmp_path, lambda _: None, run_of(answer)) == []
    assert read_blindspots(tmp_path / "level1_2.json").error == "CRASHED: why"
    assert read_blindspots(tmp_path / "level1_3.json").error is None


@pytest.mark.parametrize(("needs", "shares"), [(2, [1, 3]), (7, [1, 3, 9]), (99, [1, 3, 9, 10])])
def test_out_of_memory_is_tried_again_with_more_at_last_with_all(tmp_path, needs, shares):
    seen: list[float] = []

    def answer(name: str, payload: dict[str, Any]) -> dict[str, Any]:
        seen.append(payload["memory_bytes"] / GB + 0.5)
        return {"not_tried": [{"name": "truth", "why": "out of memory"}]} if seen[-1] < needs else {}

    judge_all([task(1)], terms(total=10 * GB), tmp_path, lambda _: None, run_of(answer))
    assert seen == shares
    stored = read_blindspots(tmp_path / "level1_1.json")
    assert stored.alone == (shares[-1] == 10)
    assert stored.out_of_memory == (needs == 99)
    assert is_current(tmp_path / "level1_1.json", task(1), 10.0)


def test_children_that_never_begin_end_the_run(tmp_path):
    started = []

    def run(target: str, payload: dict[str, Any], **more: Any) -> Outcome:
        started.append(payload)
        return ended(Status.RUNTIME_ERROR)

    with pytest.raises(ScheduleError, match="no child gets as far as a task: RUNTIME_ERROR: why"):
        judge_all([task(n, 30 * GB) for n in range(20)], terms(workers=1), tmp_path, lambda _: None, run)
    assert len(started) == 3


def test_after_the_deadline_nothing_is_begun(tmp_path):
    undone = judge_all([task(1), task(2)], terms(deadline=0.0), tmp_path, lambda _: None, run_of(lambda *_: {}))
    assert undone == ["level1_1", "level1_2"]


@pytest.mark.parametrize(
    ("more", "current"),
    [
        ({}, True),
        ({"sha256": "other"}, False),
        ({"size": "small"}, False),
        ({"version": 0}, False),
        ({"not_tried": [{"name": "x", "why": "time limit"}], "granted_s": 9.0}, False),
        ({"not_tried": [{"name": "x", "why": "time limit"}], "granted_s": 10.0}, True),
        ({"not_tried": [{"name": "x", "why": "out of memory"}]}, False),
        ({"not_tried": [{"name": "x", "why": "out of memory"}], "alone": True}, True),
        ({"not_tried": [{"name": "x", "why": "axis 0 is too short for 1/4"}]}, True),
    ],
)
def test_what_is_resumed(tmp_path, more, current):
    path = tmp_path / "level1_1.json"
    assert not is_current(path, task(1), 10.0)
    path.write_text(json.dumps({**record("level1_1"), **more}), "utf-8")
    assert is_current(path, task(1), 10.0) is current


def test_gpu_bytes_count_the_truth_in_float64():
    relu = Costs(inputs=6 * GB, outputs=6 * GB, largest=6 * GB)
    assert 50 * GB < gpu_bytes(relu) < 64 * GB
    assert gpu_bytes(None) == 24 * GB


@pytest.mark.kernelbench
def test_a_size_that_nobody_recorded_is_said(kernelbench):
    found = load_task(1, 19, kernelbench=kernelbench.path)
    assert wanted(found, "small").size.values
    with pytest.raises(TaskError, match=r"level1_19: no tiny size is recorded"):
        wanted(found, "tiny")


def test_a_child_ended_by_the_runs_deadline_leaves_its_task_undone(tmp_path):
    found = terms(deadline=time.time() + 0.05)

    def answer(name: str, payload: dict[str, Any]) -> Any:
        time.sleep(0.1)
        return Status.TIMEOUT

    assert judge_all([task(1), task(2)], found, tmp_path, lambda _: None, run_of(answer)) == ["level1_1", "level1_2"]
    assert not list(tmp_path.glob("*.json"))
