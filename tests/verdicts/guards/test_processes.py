"""The guards' processes as the product starts them: what they share with the candidate, and what it can say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.verdicts.guards import run
from kbsub.eval.verdicts.guards.findings import REGISTER, Findings
from support.paths import TESTS

TARGET = "kbsub.eval.verdicts.guards:judge"
TASK = f"local:{TESTS / 'support' / 'small_layer_norm_task' / 'reference.py'}"
CHEATS = TESTS / "support" / "remote_candidates"
HONEST = CHEATS / "honest.py"


def judged(file: Path, **more: Any) -> Outcome:
    payload = {"candidate_source": file.read_text("utf-8"), "task": TASK, "device": "cpu", "guards_calls": 12}
    return run_isolated(TARGET, {**payload, **more}, timeout_s=240)


def guards_of(outcome: Outcome) -> set[str]:
    assert outcome.status is Status.OK and outcome.value is not None, outcome.message + outcome.log
    return {finding["guard"] for finding in outcome.value["findings"]}


# file: guards that must be among those that find something
CAUGHT = {
    CHEATS / "knows_the_guards.py": {"changes_on_call_n", "cached_in_timed_trials"},
    CHEATS / "refuses_the_guards.py": {"cached_in_timed_trials"},
    CHEATS / "lazy_by_instance_attribute.py": {"changes_on_call_n", "cached_in_timed_trials"},
    CHEATS / "first_instance_timed.py": {"cached_in_timed_trials"},
    CHEATS / "forge_json_dumps.py": {"zeros"},  # inside it can write what it likes
    TESTS / "twins" / "result_file_written.py": {"result_written"},  # in a cell the file cannot be opened at all
    TESTS / "twins" / "descriptor_written.py": {"result_written"},
}


@pytest.mark.slow  # three workers and a process inside for each
@pytest.mark.parametrize("file", CAUGHT, ids=lambda file: file.stem)
def test_a_file_that_knows_its_judges_is_caught(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert guards_of(judged(file)) >= CAUGHT[file]


@pytest.mark.slow
def test_an_honest_file_is_clean_and_the_record_says_how_far_it_was_confined() -> None:
    outcome = judged(HONEST)
    assert guards_of(outcome) == set()
    assert outcome.value["confined"]["level"] in ("namespaces", "landlock", "unconfined")


# ---- one run of the product, with a candidate that writes down where it is ----

WITNESS = """
import os, sys, torch

KBSUB = sorted(name for name in sys.modules if name.startswith("kbsub."))

class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(shape)
        guards = [name for name in KBSUB if "guards" in name or "suite" in name or "verdicts" in name]
        print("WITNESS", sys.argv[0].rpartition("kbsub")[2], len(sys.argv), bool(guards), *sorted(os.environ))

    def forward(self, x):
        return self.ln(x)
"""


def test_a_worker_of_the_guards_looks_like_one_of_stress() -> None:
    """The same program with the same words and environment, and nothing of guards, suite or verdicts imported."""
    off = [name for name in REGISTER if name != "zeros"]
    payload = {"candidate_source": WITNESS, "task": TASK, "precision": "fp32", "kernelbench": None, "device": "cpu"}
    printed = {}
    for target, more in (
        ("kbsub.eval.suite.judge:judge", {"stem": "witness", "only": ["normal/initial/eps1e-05"]}),
        (TARGET, {"guards_disabled": off}),
    ):
        outcome = run_isolated(target, {**payload, **more, "timeout_s": 120}, timeout_s=240)
        assert outcome.status is Status.OK, outcome.message
        printed[target] = {line for line in (outcome.log + "\n").splitlines() if line.startswith("WITNESS")}
    assert len(printed[TARGET]) == 1
    assert printed[TARGET] == printed["kbsub.eval.suite.judge:judge"]
    assert " False " in next(iter(printed[TARGET])), printed


# ---- what the process inside says, which the candidate shares ----

INSIDE = sorted(name for name, entry in REGISTER.items() if entry.inside)
GOOD = {"findings": [], "checked": INSIDE, "not_checked": [], "problem": None}
MALFORMED = {
    "nothing": None,
    "a guard is missing": {**GOOD, "checked": INSIDE[1:]},
    "a guard twice": {**GOOD, "checked": [*INSIDE, INSIDE[0]]},
    "a guard of the other half": {**GOOD, "checked": [*INSIDE, "zeros"]},
    "a finding of no guard": {**GOOD, "findings": [{"guard": "typo", "message": "x"}]},
    "words that are none": {**GOOD, "findings": [{"guard": "zeros", "message": 5}]},
    "a status that is none": {**GOOD, "problem": {"status": "FINE", "message": ""}},
    "a problem that is none": {**GOOD, "problem": {"status": "OK"}},
    "findings without end": {**GOOD, "findings": [{"guard": "zeros", "message": "x"}] * 1001},
    "a key too many": {**GOOD, "clean": True},
}


def said(value: Any, status: Status = Status.OK) -> tuple[Findings, Any]:
    found = Findings([], ["zeros"], [])
    return found, run._from_inside(found, Outcome(status, value, "words", "", 1.0), set(), None)


def test_a_good_answer_is_taken() -> None:
    found, problem = said(GOOD)
    assert problem is None and found.checked == ["zeros", *INSIDE] and not found.findings


@pytest.mark.parametrize("why", MALFORMED)
def test_a_malformed_answer_is_a_crash_of_the_stage(why: str) -> None:
    found, problem = said(MALFORMED[why])
    assert problem is not None and problem.status is Status.CRASHED, why
    assert found.checked == ["zeros"] and not found.findings


@pytest.mark.parametrize("status", [Status.CRASHED, Status.TIMEOUT, Status.OUT_OF_MEMORY])
def test_an_end_inside_is_the_end_of_the_stage(status: Status) -> None:
    _, problem = said(None, status)
    assert problem is not None and problem.status is status and "words" in problem.message


def test_memory_that_runs_out_inside_is_no_finding() -> None:
    none = {**GOOD, "checked": [], "problem": {"status": "OUT_OF_MEMORY", "message": "m"}}
    found, problem = said(none)
    assert not found.findings and problem is not None and problem.status is Status.OUT_OF_MEMORY
    refused, _ = said({**none, "problem": {"status": "RUNTIME_ERROR", "message": "m"}})
    assert [finding.guard for finding in refused.findings] == ["changes_on_call_n"]
