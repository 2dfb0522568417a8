"""`kbsub measure tasks`: goes on where it stopped, throws no rows away, keeps no code; its table, also of a part."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.measure import tasks
from kbsub.eval.report.evidence import evidence_table, tasks_table
from kbsub.eval.report.papers import ReportError, Request, section
from kbsub.eval.results.model import write_json_atomic

TASKS = ["level1_1", "level1_2", "level2_1"]
ROW = {"ended": "passed", "stages": {}, "seconds": 1.5}


class Asked:
    """Stands for the judge: which were judged, in order; those of `stop` end the run."""

    def __init__(self):
        self.judged, self.stop = [], set()

    def __call__(self, work, *arguments, **more):
        if work.key in self.stop:
            raise KeyboardInterrupt
        self.judged.append(work.key)
        return dict(ROW)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """No judge, and no checkout is needed."""
    found = Asked()
    monkeypatch.setattr(tasks, "judged", found)
    monkeypatch.setattr(tasks, "measured_on", lambda device: {"gpu": None, "torch": "2"})
    monkeypatch.setattr(tasks, "find_checkout", lambda path: type("Checkout", (), {"path": tmp_path}))
    monkeypatch.setattr(tasks, "_references", lambda names, checkout: [tasks.Work(n, n, f"of {n}") for n in names])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


def measure(out, *more):
    call = ["measure", "tasks", *TASKS, "--out", str(out), "--device", "cpu", "--jobs", "1", *more]
    return CliRunner().invoke(app, call)


def test_an_interrupted_run_loses_nothing_and_goes_on(asked, tmp_path):
    out = tmp_path / "tasks.json"
    asked.stop.add("level2_1")
    assert measure(out).exit_code != 0
    assert list(json.loads(out.read_text())["rows"]) == TASKS[:2] == asked.judged
    asked.stop.clear()
    done = measure(out)
    assert done.exit_code == 0 and asked.judged == TASKS and "1 of them not finished" in done.output
    assert list(json.loads(out.read_text())["rows"]) == TASKS
    assert measure(out).exit_code == 0 and asked.judged == TASKS  # nothing is judged twice
    assert measure(out, "--again").exit_code == 0 and asked.judged == TASKS * 2


def test_no_time_left_is_said(asked, tmp_path):
    done = measure(tmp_path / "tasks.json", "--within", "0.000001")
    assert done.exit_code == 4 and not asked.judged and "not finished: 3" in done.output


def test_rows_of_another_measurement_are_not_thrown_away(asked, tmp_path):
    out = tmp_path / "tasks.json"
    measure(out)
    before = out.read_bytes()
    for more, words in ((["--size", "small"], "size check, not small"), (["--stages", "stress"], "rows of stages")):
        done = measure(out, *more)
        assert done.exit_code == 2 and words in done.stderr and out.read_bytes() == before
    out.write_text("[]")
    assert measure(out).exit_code == 2 and out.read_text() == "[]"


def test_the_rows_of_a_corpus(tmp_path):
    lines = [
        {"level_id": 1, "task_id": 3, "custom_code": "a = 1"},
        {"level_id": 1, "task_id": 4, "custom_code": None},
        {"level_id": "2", "task_id": "18", "custom_code": "b = 1"},
    ]
    path = tmp_path / "corpus.json"
    path.write_text("\n\n".join(map(json.dumps, lines)))
    found = tasks._of_corpus(path, "")
    assert [(each.task, each.source) for each in found] == [("level1_3", "a = 1"), ("level2_18", "b = 1")]
    assert [each.task for each in tasks._of_corpus(path, "1:")] == ["level2_18"]


def _strings(value):
    if isinstance(value, dict):
        return [*value, *(text for each in value.values() for text in _strings(each))]
    return [text for each in value for text in _strings(each)] if isinstance(value, list) else [str(value)]


RAISES = """
import torch
M = 3
class ModelNew(torch.nn.Module):
    def forward(self, *x):
        raise RuntimeError("SECRET_WORDS")
"""
SLOW = pytest.mark.slow
FILES = [
    pytest.param("import cupy\n" + RAISES, "not run", "needs an NVIDIA GPU", id="cuda"),
    pytest.param(RAISES, "failed", "in the file's own words", id="raises", marks=SLOW),
    pytest.param("SECRET_WORDS = 1\n", "failed", "defines no ModelNew", id="none", marks=SLOW),
]


@pytest.mark.kernelbench
@pytest.mark.parametrize(("text", "ended", "why"), FILES)
def test_what_is_kept_of_somebody_s_file_is_numbers(kernelbench, text, ended, why):
    """One that redefines a name and raises its own words: none of them is kept, how it ended is."""
    stages = ("identity", "source")
    work = tasks.Work("one", "level1_1", text)
    row = tasks.judged(work, kernelbench.path, "cpu", "small", stages, 60.0, words=False)
    assert "SECRET" not in " ".join(_strings(row)), row
    assert (row["ended"], row["stages"]["identity"]["why"]) == (ended, why)


# ---- the table ----

PASSED = {
    "identity": {"status": "OK", "identical": 3, "total": 3},
    "stress": {
        "status": "OK", "passed": 70, "nearer_than_reference": 1, "apart": 2, "refused": 0, "failed": 0,
        "first_failed": [], "not_asked": {"needs a CUDA device": 2},
    },
    "oracle": {"status": "OK", "cases": 16},
    "guards": {
        "status": "OK", "checked": 20, "clean": True, "findings": [],
        "not_checked": {"eps_dropped": "no operator", "unbiased_variance": "no operator"},
    },
}  # fmt: skip
REFUSED = {name: {"status": "NOT_CHECKED", "why": "the reference refuses it"} for name in PASSED}


def record():
    return {
        "schema": 1,
        "how": {"size": "check", "stages": list(PASSED), "at_once": 14},
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11.0"},
        "rows": {
            "level1_1": {"ended": "passed", "stages": PASSED, "seconds": 20.4},
            "level1_95": {"ended": "not checked", "stages": REFUSED, "seconds": 10.0},
        },
    }


def test_the_table_of_a_part_says_what_is_left():
    found = tasks_table(record())
    words = "2 cases: needs a CUDA device; eps_dropped, unbiased_variance: no operator"
    assert found.rows == [
        ["L1/1", "3/3", "71 passed, 2 apart", "16 cases", "20 asked, clean", words],
        ["L1/95", *["NOT_CHECKED"] * 4, "identity, stress, oracle, guards: the reference refuses it"],
    ]
    (note,) = found.notes
    assert note.startswith(
        "NVIDIA H200, torch 2.11.0, the check size. level 1: 1 passed, 1 not checked, 98 not measured"
    )
    assert "level 2: 100 not measured yet; level 3: 50 not measured yet. 30 s in all." in note


def test_a_failure_stands_out():
    failing = record()
    stages = failing["rows"]["level1_1"]["stages"] = json.loads(json.dumps(PASSED))
    stages["stress"] |= {"failed": 1, "first_failed": ["x100/random/eps1e-05"]}
    stages["guards"] |= {"clean": False, "findings": ["zeros"]}
    (_, _, stress, _, guards, _), _ = tasks_table(failing).rows
    assert "**1 failed: x100/random/eps1e-05**" in stress and "**zeros**" in guards


def test_the_paper_is_made_of_the_file(tmp_path: Path):
    request = Request(tmp_path / "a.md", tmp_path, "tasks", {"gpu": "h200"})
    assert "Nothing of this is committed yet" in section(request)
    path = tmp_path / "results" / "h200" / "tasks.json"
    path.parent.mkdir(parents=True)
    write_json_atomic(path, record())
    assert "| L1/95 | NOT_CHECKED |" in section(request)
    ((label, question, outcome),) = evidence_table(path.parent, tmp_path).rows
    assert label == "`results/h200/tasks.json`" and "own candidate" in question
    assert outcome.startswith("2 of 250 problems at the check size: 1 pass") and "**0 failed**" in outcome
    path.write_text("{}")
    with pytest.raises(ReportError, match="no file of kbsub measure tasks"):
        section(request)
