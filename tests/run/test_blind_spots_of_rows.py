"""The row of every verdict names the blind spots of its task: in the result file, a batch's rows, and on the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from kbsub.adapters.pin import PIN
from kbsub.adapters.task import load_task
from kbsub.eval.commands.eval import _summary
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.report.batch_report import row_words
from kbsub.eval.results.model import Candidate
from kbsub.eval.run import runner
from kbsub.eval.run.batch.job import Job, Settings, row_of
from kbsub.eval.run.runner import Plan, Row, run_stage
from kbsub.eval.verdicts.register import KINDS, OFFICIAL

WORDS = "this task also accepts zeros"


@pytest.fixture
def asked(monkeypatch):
    """What was asked for: (task, provenance, precision) of each row."""
    calls: list[tuple[str, ...]] = []

    def known(*asked_for: str) -> str:
        calls.append(asked_for)
        return WORDS

    monkeypatch.setattr(runner, "known_blind_spots", known)
    return calls


def test_the_row_of_an_evaluation(asked, tmp_path, capsys):
    file = tmp_path / "binary.py"
    file.write_bytes(b"\xff\xfe")  # no text: the row is made, and no child is started
    task = load_task(1, 40, kernelbench=None)
    plan = Plan(task, "level1_40", (file,), (OFFICIAL,), "fp32", "cpu", None, 1.0)
    row = Row(file, "binary", {})
    outcome = run_stage(plan, row, KINDS[OFFICIAL], lambda event: None)
    runner.record_outcome(row, KINDS[OFFICIAL], outcome)
    assert asked == [("level1_40", "embedded", "fp32")]
    assert Candidate.model_validate(row.fields).blind_spots == WORDS
    _summary(Console(width=200), plan, [row], Path("result.json"), "")
    assert f"What correct means at level1_40: {WORDS} (docs/blind-spots.md)" in capsys.readouterr().out


def test_the_row_of_a_batch(asked):
    job = Job("level_1_problem_37_sample_0", "level1_37", 1, 37, 0, "x = 1", Settings("bf16", "cuda", 1.0, None))
    official = {"compiled": True, "correctness": True, "metadata": {}, "trials": "(5 / 5)", "runtime": 1.5}
    value = {"official": official, "verdict": {"status": "OK", "reason": None}}
    row = row_of(job, {OFFICIAL: Outcome(Status.OK, value, "", "", 2.0)})
    assert asked == [("level1_37", f"kernelbench@{PIN}", "bf16")]
    assert row["blind_spots"] == WORDS
    assert row_words(row) == f"OK, (5 / 5), 1.5 ms (2.0 s); {WORDS}"
    assert row_words({**row, "blind_spots": None}) == "OK, (5 / 5), 1.5 ms (2.0 s)"
