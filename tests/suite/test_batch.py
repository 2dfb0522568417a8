"""Several candidates in one child, whose rows are not lost when one of them takes the child down: stress_batch.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run import shared as shared_stages
from kbsub.eval.run.shared import SHARES, SharedStages
from kbsub.eval.suite.batch import MAX_CRASHES, Finished, run_batch
from support.sizes import SMALL_LEVEL1_40
from support.stress_stand_ins import NATIVE, RIGHT, source

pytestmark = pytest.mark.usefixtures("warm_children")

COMMON = {"task": "level1_40", "precision": "fp32", "kernelbench": None, "device": "cpu", "size": SMALL_LEVEL1_40}
CASES = ["normal/random/eps1e-05", "+1000/random/eps1e-05", "zero/random/eps1e-05"]


def candidate(stem: str, text: str) -> dict[str, Any]:
    return {"stem": stem, "candidate_source": text}


def test_a_candidate_that_ends_the_process_loses_one_row_and_others_none():
    dies = "if x.mean() > 500:\n    import os\n    os._exit(7)\nreturn self.exact(x)"
    batch = [candidate("right", source(RIGHT)), candidate("dies", source(dies)), candidate("native", source(NATIVE))]
    found = run_batch(batch, {**COMMON, "only": CASES}, timeout_s=120)
    assert {stem: each.status for stem, each in found.items()} == dict.fromkeys(found, Status.OK)
    classes = {stem: {row["name"]: row["class"] for row in each.rows} for stem, each in found.items()}
    assert classes["dies"] == {CASES[0]: "pass", CASES[1]: "fail", CASES[2]: "pass"}
    assert set(classes["right"].values()) <= {"pass", "nearer_than_reference"} and len(classes["right"]) == 3
    assert set(classes["native"].values()) == {"pass"} and len(classes["native"]) == 3
    lost = next(row for row in found["dies"].rows if row["class"] == "fail")
    assert "exit code 7" in lost["reason"] and lost["seed"] == 104
    assert found["native"].oracle[CASES[0]]["nearer"] == "equal"
    assert found["native"].stress["passed"] == 3 and found["native"].stress["equal_nan"] is True


def test_a_file_that_ends_the_process_when_executed_costs_only_itself():
    batch = [
        candidate("rude", "import os\nos._exit(3)\n"),
        candidate("wrong syntax", "class ModelNew(:\n"),
        candidate("native", source(NATIVE)),
    ]
    found = run_batch(batch, {**COMMON, "only": CASES[:1]}, timeout_s=120)
    assert found["rude"].status is Status.CRASHED and not found["rude"].rows
    assert found["wrong syntax"].status is Status.COMPILE_ERROR and "line 1" in found["wrong syntax"].message
    assert found["native"].status is Status.OK and found["native"].rows[0]["class"] == "pass"


class FakeRunner:
    """Stands for run_isolated: plays `cases` for each candidate, and ends early at (stem, case) pairs in `fatal`."""

    def __init__(self, cases: list[str], fatal: set[tuple[str, str]], ending: Status = Status.CRASHED) -> None:
        self.cases, self.fatal, self.ending, self.calls = cases, fatal, ending, 0

    def __call__(
        self, target: str, payload: Mapping[str, Any], *, timeout_s: float, on_progress: Any, env: Any
    ) -> Outcome:
        self.calls += 1
        for case in self.cases:
            for each in payload["candidates"]:
                stem = each["stem"]
                if case in payload["done"][stem]:
                    continue
                on_progress({"stage": "case", "candidate": stem, "case": case, "seed": 1})
                if (stem, case) in self.fatal:
                    return Outcome(self.ending, None, f"{self.ending} in case {case}", "", 1.0)
                on_progress({"stage": "row", "candidate": stem, "row": {"name": case, "class": "pass"}})
        return Outcome(Status.OK, {"facts": {"seconds": 1.0}, "failed": {}}, "", "", 1.0)


def test_every_case_is_run_once_for_everyone_despite_restarts():
    runner = FakeRunner(["a", "b", "c"], {("second", "b")})
    found = run_batch([candidate("first", ""), candidate("second", "")], {}, timeout_s=1, runner=runner)
    assert runner.calls == 2
    assert [row["name"] for row in found["first"].rows] == ["a", "b", "c"]
    assert [(row["name"], row["class"]) for row in found["second"].rows] == [
        ("a", "pass"),
        ("b", "fail"),
        ("c", "pass"),
    ]


def test_a_candidate_that_keeps_ending_the_child_is_given_up():
    runner = FakeRunner(list("abcdef"), {("bad", case) for case in "abcdef"})
    found = run_batch([candidate("bad", ""), candidate("good", "")], {}, timeout_s=1, runner=runner)
    assert found["bad"].status is Status.CRASHED and len(found["bad"].rows) == MAX_CRASHES
    assert found["good"].status is Status.OK and len(found["good"].rows) == 6


def test_a_candidate_that_hangs_is_waited_for_once():
    runner = FakeRunner(list("abc"), {("slow", case) for case in "abc"}, Status.TIMEOUT)
    found = run_batch([candidate("slow", ""), candidate("good", "")], {}, timeout_s=1, runner=runner)
    assert runner.calls == 2
    assert (found["slow"].status, len(found["slow"].rows)) == (Status.TIMEOUT, 1)
    assert found["good"].status is Status.OK and len(found["good"].rows) == 3


def test_a_run_asks_once_for_this_repositorys_candidates_and_apart_for_others(monkeypatch):
    batches = []

    def fake(candidates, common, **_):
        batches.append([each["stem"] for each in candidates])
        row = {"name": "a", "class": "pass", "in_error_table": True, "oracle": {"nearer": "equal"}}
        return {each["stem"]: Finished(each["stem"], Status.OK, rows=[row]) for each in candidates}

    monkeypatch.setattr(shared_stages, "run_batch", fake)
    mine = [{**candidate(stem, ""), SHARES: True, "device": "cpu"} for stem in "ab"]
    stages = SharedStages(lambda: mine, ("stress", "oracle"), 10.0, {})
    other = {**candidate("other", ""), SHARES: False, "declaration": {"contract": "tolerance"}, "device": "cpu"}
    outcomes = [
        stages.outcome(name, each, print) for each in (mine[0], other, mine[1]) for name in ("stress", "oracle")
    ]
    assert batches == [["a", "b"], ["other"]]
    assert [outcome.status for outcome in outcomes] == [Status.OK] * 6
    assert outcomes[0].value["passed"] == 1 and outcomes[1].value == {"a": {"nearer": "equal"}}


def test_a_file_edited_since_is_run_again_alone(monkeypatch):
    """The row's sha256 is of the text in its payload: an answer computed from an older text is not that row's."""
    batches = []

    def fake(candidates, common, **_):
        batches.append([(each["stem"], each["candidate_source"]) for each in candidates])
        row = {"name": "a", "class": "pass", "in_error_table": True, "oracle": {"nearer": "equal"}}
        return {each["stem"]: Finished(each["stem"], Status.OK, rows=[row]) for each in candidates}

    monkeypatch.setattr(shared_stages, "run_batch", fake)
    declared = {SHARES: True, "device": "cpu"}
    stages = SharedStages(lambda: [{**candidate(stem, "old"), **declared} for stem in "ab"], ("stress",), 10.0, {})
    for stem, text in (("a", "old"), ("b", "new"), ("b", "new")):
        stages.outcome("stress", {**candidate(stem, text), **declared}, print)
    assert batches == [[("a", "old"), ("b", "old")], [("b", "new")]]
