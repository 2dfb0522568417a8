"""A reference that cannot answer costs the case or guard that asked it, and nothing else; one that never answers leaves
no verdict. Small tasks on the CPU, with an honest candidate and a wrong one each.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kbsub.adapters.refusal import REFERENCE_REFUSES
from kbsub.eval.process.isolated import JudgeFailure, Outcome, Status
from kbsub.eval.run.shared import as_outcome
from kbsub.eval.suite import judge as stress
from kbsub.eval.suite import questions
from kbsub.eval.suite.batch import Finished, run_batch
from kbsub.eval.suite.records import no_verdict
from kbsub.eval.tasks.cases import FAIL, OFFICIAL_CASE, PASS, REFUSED, SKIPPED, suite
from kbsub.eval.verdicts.identity import judge as identity
from support.warm import run_forked

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = """
import torch

class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
{constructor}        self.bn = torch.nn.BatchNorm1d(features)
{methods}
    def forward(self, x):
{forward}        return self.bn(x)

def get_inputs():
{inputs}    return [torch.rand(8, 4)]

def get_init_inputs():
    return [4]
"""
HONEST = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(features)

    def forward(self, x):
        return self.bn(x)
"""
WRONG = HONEST.replace("self.bn(x)", "self.bn(x) * 1.1")

# id: (what the reference does more than a BatchNorm, a case that it then refuses, a word of the reason).
# BatchNorm itself refuses eps 0, in every one of them: L1/33, L2/41 and L2/77 of KernelBench do.
SOMETIMES: dict[str, tuple[dict[str, str], str, str]] = {
    "eps 0": ({}, "normal/random/eps0", "ValueError: batch_norm eps must be positive"),
    "eps 0, the official inputs": ({}, "official/initial/eps0", "ValueError: batch_norm eps must be positive"),
    "a kind nobody expects": (
        {"forward": "        if x.abs().max() > 1e4: raise KeyError('scale')\n"},
        "+1e5/random/eps1e-05",
        "KeyError: 'scale'",
    ),
    "an assertion": (
        {"forward": "        assert self.bn.weight.std() < 5, 'gamma is too large'\n"},
        "normal/large/eps1e-05",
        "AssertionError: gamma is too large",
    ),
    "a row alone": (
        {"forward": "        if len(x) == 1: raise LookupError('a batch of one')\n"},
        "row_alone/normal/random",
        "LookupError: a batch of one",
    ),
    "new contents after many calls": (
        # -0.5 * randn + 0.25, which the check makes of its inputs; ramp has that spread, too, and is refused as well
        {"forward": "        if 0.3 < x.std() < 0.7 and x.min() < -0.5: raise OSError('tired')\n"},
        "after_1000_calls/normal/random",
        "OSError: tired",
    ),
}
# The reference answers, but has no float64 twin: nothing is refused, and no oracle is there.
NO_FLOAT64 = {
    "float64": {"forward": "        if x.dtype == torch.float64: raise ArithmeticError('no doubles here')\n"},
    "a copy": {"methods": "    def __deepcopy__(self, memo):\n        raise LookupError('one of a kind')\n"},
    "widening": {"methods": "    def double(self):\n        raise NotImplementedError('single only')\n"},
}
NEVER = {  # id: (what the reference does, a word of the reason)
    "constructor": ({"constructor": "        raise OSError('weights: no such file')\n"}, "weights: no such file"),
    "own inputs": ({"inputs": "    raise KeyError('no data')\n"}, "no data"),
    "plain official input": (
        {"forward": "        if abs(x - 0.5).max() <= 0.5: raise TypeError('tame')\n"},
        "tame",
    ),
    "every input": ({"forward": "        raise RuntimeError('not today')\n"}, "not today"),
    "no tensor": ({"forward": "        return {'y': x}\n"}, "tensor"),
}


def task_of(folder: Path, change: dict[str, str]) -> str:
    blank = dict.fromkeys(("constructor", "methods", "forward", "inputs"), "")
    (folder / "batch_norm.py").write_text(TASK.format(**blank | change))
    return f"local:{folder / 'batch_norm.py'}"


def payload(task: str, source: str) -> dict[str, Any]:
    return {"stem": "mine", "candidate_source": source, "task": task, "device": "cpu", "calls": 3, "guards_calls": 5}


def quiet(_: dict[str, Any]) -> None:
    pass


def rows_of(task: str, source: str, only: list[str] | None = None) -> dict[str, dict[str, Any]]:
    try:
        found = stress.judge({**payload(task, source), "only": only}, quiet)
    except JudgeFailure as failure:  # most of its cases were refused: the rows are there all the same
        assert failure.status is Status.NOT_CHECKED and failure.value is not None, failure.message
        found = failure.value
    return {row["name"]: row for row in found["cases"]}


@pytest.mark.parametrize("name", SOMETIMES)
def test_a_refused_case_is_its_own_row_and_an_honest_candidate_passes_the_rest(name: str, tmp_path: Path) -> None:
    change, case, words = SOMETIMES[name]
    rows = rows_of(task_of(tmp_path, change), HONEST)
    assert rows[case]["class"] == SKIPPED, rows[case]
    assert rows[case]["reason"].startswith(f"{REFERENCE_REFUSES}: {words}"), rows[case]
    assert not [row for row in rows.values() if row["class"] not in (PASS, SKIPPED)]
    assert rows[OFFICIAL_CASE]["class"] == PASS and len(rows) == len(suite())


@pytest.mark.parametrize("name", SOMETIMES)
def test_a_wrong_candidate_still_fails_where_the_reference_answers(name: str, tmp_path: Path) -> None:
    rows = rows_of(task_of(tmp_path, SOMETIMES[name][0]), WRONG, only=[OFFICIAL_CASE])
    assert rows[OFFICIAL_CASE]["class"] == FAIL, rows[OFFICIAL_CASE]


@pytest.mark.parametrize("name", NO_FLOAT64)
def test_a_reference_without_a_float64_twin_is_judged_against_itself(name: str, tmp_path: Path) -> None:
    task = task_of(tmp_path, NO_FLOAT64[name])
    honest, wrong = (rows_of(task, source, [OFFICIAL_CASE])[OFFICIAL_CASE] for source in (HONEST, WRONG))
    assert (honest["class"], wrong["class"]) == (PASS, FAIL), (honest, wrong)
    assert "does not run in float64" in honest["no_oracle"]


@pytest.mark.parametrize("name", NO_FLOAT64)
def test_an_oracle_stage_without_one_float64_answer_is_not_ok(name: str, tmp_path: Path) -> None:
    with pytest.raises(JudgeFailure, match="float64") as caught:
        stress.judge_oracle(payload(task_of(tmp_path, NO_FLOAT64[name]), HONEST), quiet)
    assert caught.value.status is Status.NOT_CHECKED


def test_the_oracle_keeps_the_cases_that_have_an_answer(tmp_path: Path) -> None:
    change, refused, _ = SOMETIMES["a kind nobody expects"]
    found = stress.judge_oracle(payload(task_of(tmp_path, change), HONEST), quiet)
    assert refused not in found and found[OFFICIAL_CASE]["candidate_allclose"], found


@pytest.mark.parametrize(
    "judge", [stress.judge, stress.judge_oracle, identity.judge], ids=["stress", "oracle", "ident"]
)
@pytest.mark.parametrize("name", NEVER)
def test_a_reference_that_refuses_its_own_task_leaves_no_verdict(judge: Any, name: str, tmp_path: Path) -> None:
    change, words = NEVER[name]
    for source in (HONEST, WRONG):
        with pytest.raises(JudgeFailure, match=words) as caught:
            judge(payload(task_of(tmp_path, change), source), quiet)
        assert caught.value.status is Status.NOT_CHECKED, caught.value.message


@pytest.mark.parametrize("judge", [stress.judge, identity.judge], ids=["stress", "identity"])
def test_a_reference_program_that_does_not_run_is_no_candidates_fault(judge: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ImportError('no module of that name')\n")
    with pytest.raises(JudgeFailure, match="the reference program does not run: no module") as caught:
        judge(payload(f"local:{tmp_path / 'broken.py'}", HONEST), quiet)
    assert caught.value.status is Status.NOT_RUN


def test_identity_goes_on_after_a_seed_that_the_reference_refuses(tmp_path: Path) -> None:
    """Seed by seed: the second official input is refused, the first decides whether there is a verdict at all."""
    second = {"forward": "        self.n = getattr(self, 'n', 0) + 1\n        if self.n == 2: raise KeyError('two')\n"}
    task = task_of(tmp_path, second)
    honest, wrong = (identity.judge(payload(task, source), quiet) for source in (HONEST, WRONG))
    assert honest["cases"][1]["skipped"] == f"{REFERENCE_REFUSES}: KeyError: 'two'"
    assert honest["skipped"] == 1 and honest["identical"] == honest["total"] > 0
    assert wrong["identical"] == 0 and wrong["total"] == honest["total"]


# ---- guards, in processes of their own ----


def guarded(task: str, source: str, folder: Path) -> dict[str, Any]:
    return run_forked("kbsub.eval.verdicts.guards:judge", payload(task, source), str(folder))


@pytest.mark.parametrize("name", ["constructor", "own inputs", "plain official input", "every input", "no tensor"])
def test_guards_of_a_reference_that_refuses_its_own_input_are_not_run(name: str, tmp_path: Path) -> None:
    change, words = NEVER[name]
    with pytest.raises(RuntimeError, match=f"NOT_RUN: .*{words}") as caught:
        guarded(task_of(tmp_path, change), HONEST, tmp_path)
    assert "candidate" not in str(caught.value)


@pytest.mark.parametrize("name", NO_FLOAT64)
def test_a_guard_that_needs_float64_is_not_asked_and_the_others_are(name: str, tmp_path: Path) -> None:
    task = task_of(tmp_path, NO_FLOAT64[name])
    found = guarded(task, HONEST, tmp_path)
    assert found["clean"] and "input_mutated" in found["checked"], found
    reasons = {entry["guard"]: entry["reason"] for entry in found["not_checked"]}
    assert "does not run in float64" in reasons["uninitialised_output"]
    meddler = HONEST.replace("return self.bn(x)", "return self.bn(x.mul_(2))")
    assert "input_mutated" in {each["guard"] for each in guarded(task, meddler, tmp_path)["findings"]}


def test_a_probe_that_the_reference_refuses_is_not_the_candidates_finding(tmp_path: Path) -> None:
    """Probes beside the official range: the reference raises there, the candidate would answer."""
    task = task_of(tmp_path, {"forward": "        if x.max() > 1: raise OverflowError('probe')\n"})
    found = guarded(task, HONEST, tmp_path)
    assert found["clean"] and found["not_checked"], found


# ---- what a stage says ----


ROW = {"name": "zero/initial/eps1e-05", "class": PASS, "in_error_table": True, "oracle": {}}
GONE = {"name": OFFICIAL_CASE, "class": SKIPPED, "reason": f"{REFERENCE_REFUSES}: RuntimeError: no"}
LARGE = {"name": OFFICIAL_CASE, "class": SKIPPED, "reason": "9 elements: left to a GPU (or --size official)"}
SKIPPED_FOR_EPS = {"name": "zero/initial/eps0", "class": SKIPPED, "reason": "its eps cannot be set: none is there"}
UNSET = {"name": "zero/random/eps1e-05", "class": SKIPPED, "reason": "its parameters cannot be set"}
ASKS = {"name": "one_nan/random/eps1e-05", "class": SKIPPED, "reason": "needs an NVIDIA GPU (no driver)"}
VERDICTS = [  # rows, what is said of them ("" is a verdict)
    ([ROW], ""),
    ([ROW, {**GONE, "name": "official/initial/eps0"}], ""),
    ([ROW, LARGE], ""),  # a machine too small for the official shape is no refusal of the reference's
    ([ROW, GONE], f"{OFFICIAL_CASE}: {REFERENCE_REFUSES}"),
    ([LARGE, {**LARGE, "name": "zero"}], "no case was judged: 2 skipped"),
    ([{**ROW, "class": REFUSED}], ""),
    ([], "no case was judged: 0 skipped"),
    ([ROW, SKIPPED_FOR_EPS, SKIPPED_FOR_EPS], ""),
    ([ROW, UNSET, UNSET], "2 of 3 cases were not asked, 2 of them: its parameters cannot be set"),
    ([ROW, ROW, ASKS], "1 of 3 cases were not asked, 1 of them: needs an NVIDIA GPU (no driver)"),
    ([ROW, ROW, {**ASKS, "reason": "no time was left"}], ""),  # the gate's answer says so of these
    ([ROW, ROW, ROW, UNSET], "1 of 4 cases were not asked, 1 of them: its parameters cannot be set"),
    ([{**ROW, "class": FAIL}, UNSET, UNSET], ""),
]


@pytest.mark.parametrize(("rows", "words"), VERDICTS)
def test_what_is_no_verdict(rows: list[dict[str, Any]], words: str) -> None:
    said = no_verdict("stress", rows)
    assert said.startswith(words) and bool(said) == bool(words), said


def test_an_oracle_of_which_cases_were_left_out_for_want_of_time_is_no_verdict() -> None:
    """Its record holds none of them: a file that slept until the hard ones could not be begun was passed."""
    measured = {**ROW, "oracle": {"candidate_max_abs": 0.0}}
    assert no_verdict("oracle", [measured] * 9) == ""
    said = no_verdict("oracle", [*[measured] * 9, {**ASKS, "reason": "no time was left"}])
    assert said == "1 cases were not asked, no time was left: a larger --timeout asks them"


def test_a_stage_of_rows_without_a_float64_answer_is_not_ok() -> None:
    row = {"name": "zero", "class": PASS, "no_oracle": "the task's Model does not run in float64: x"}
    found = as_outcome(Finished("a", Status.OK, rows=[row]), "oracle", 1.0)
    assert found.status is Status.NOT_CHECKED and "does not run in float64" in found.message
    assert as_outcome(Finished("a", Status.OK, rows=[row]), "stress", 1.0).status is Status.OK


def test_a_batch_whose_reference_never_answers_is_not_run() -> None:
    def runner(target: str, payload: Any, *, timeout_s: float, on_progress: Any, env: Any) -> Outcome:
        on_progress({"stage": "row", "candidate": "mine", "row": GONE})
        return Outcome(Status.OK, {"facts": {}}, "", "", 1.0)

    found = run_batch([{"stem": "mine"}], {}, timeout_s=1, runner=runner)["mine"]
    assert found.status is Status.NOT_CHECKED and REFERENCE_REFUSES in found.message
    assert found.stress["skipped"] == 1


def test_a_reference_that_breaks_the_device_costs_nobody_a_failed_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a sticky CUDA error of the reference's the process is over; the case is said to be refused, not failed."""

    def broken(device: Any, error: BaseException) -> None:
        raise questions.Broken(f"{error}; the CUDA context is unusable after it")

    monkeypatch.setattr(questions, "still_usable", broken)
    sent: list[dict[str, Any]] = []
    with pytest.raises(JudgeFailure, match="unusable") as caught:
        only = ["normal/random/eps0"]
        stress.judge({**payload(task_of(tmp_path, {}), HONEST), "only": only}, sent.append)
    assert caught.value.status is Status.CRASHED
    (row,) = [event["row"] for event in sent if "row" in event]
    assert row["class"] == SKIPPED and row["reason"].startswith(REFERENCE_REFUSES), row
