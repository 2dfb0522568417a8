"""`kbsub gate`: what counts as required, kept, broken or not certifiable; its exit codes and its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import junitparser
import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.report.gate_report import as_json, as_junit
from kbsub.eval.run.gate import Check, answers, exit_code
from kbsub.eval.verdicts.kind import Answer
from kbsub.eval.verdicts.register import KINDS
from support.paths import ROOT, TESTS

pytestmark = pytest.mark.usefixtures("warm_children")

LADDER = ROOT / "submissions" / "level1_40"
OK = {"status": "OK", "message": "", "seconds": 1.5}
NOT_RUN = {"status": "NOT_RUN", "message": "no GPU here", "seconds": 0.0}
CRASHED = {"status": "CRASHED", "message": "died of SIGSEGV", "seconds": 2.0}
WRONG = {"status": "INCORRECT_NUMERICAL", "message": "Output mismatch", "seconds": 2.0}

GOOD = {"official": {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {}}}
BAD = {"official": {"compiled": True, "correctness": False, "trials": "(0 / 5)", "metadata": {}}}
NO_VERDICT = {"official": {"compiled": None, "correctness": None, "trials": None, "metadata": {}}}
ON_CPU = {"official": None, "reason": "a local check on the CPU, not an official verdict"}

ON_CUDA = {"reference": "native on cuda", "device": "cuda", "cases": []}
EQUAL = {"bit_identity": {"identical": 56, "total": 56, **ON_CUDA}}
UNEQUAL = {"bit_identity": {"identical": 55, "total": 56, **ON_CUDA}}
NO_DEVICE = {"bit_identity": {"identical": 56, "total": 56, "reference": "native on cuda", "cases": []}}
CONTRADICTED = {"bit_identity": {**EQUAL["bit_identity"], "contradictions": ["repeated runs gave 2 different results"]}}
HOSTED = {"reference": "model of native's order (host executor)", "device": "cpu"}
EQUAL_HOSTED = {"bit_identity": {**EQUAL["bit_identity"], **HOSTED}}
UNEQUAL_HOSTED = {"bit_identity": {**UNEQUAL["bit_identity"], **HOSTED}}
EQUAL_CPU = {"bit_identity": {**EQUAL["bit_identity"], "reference": "native on cpu", "device": "cpu"}}
NO_CASE = {"bit_identity": {"identical": 0, "total": 0, **ON_CUDA}}


COUNTS = {"passed": 1, "failed": 0, "refused": 0, "skipped": 0}


def stress(**classes: str) -> dict[str, Any]:
    return {
        "stress": {**COUNTS, "cases": [{"name": name.replace("_", "/"), "class": c} for name, c in classes.items()]}
    }


def reference_refuses(name: str) -> dict[str, Any]:
    refused = {"name": name, "class": "skipped", "reason": "the reference refuses it: no"}
    return {"stress": {**COUNTS, "skipped": 1, "cases": [{"name": "zero/initial", "class": "pass"}, refused]}}


def oracle(**case: Any) -> dict[str, Any]:
    usual = {
        "reference_max_abs": 1e-6,
        "candidate_max_abs": 1e-6,
        "reference_allclose": True,
        "candidate_allclose": True,
    }
    return {"oracle": {"normal/initial": {**usual, "candidate_bound_ratio": 0.5, "nearer": "equal", **case}}}


CLEAN = {"guards": {"clean": True, "findings": [], "checked": ["zeros"], "not_checked": []}}
CAUGHT = {"guards": {"clean": False, "findings": [{"guard": "zeros", "message": "all zero"}], "checked": ["zeros"]}}
UNASKED = {"guards": {"clean": True, "findings": [], "checked": [], "not_checked": [{"guard": "zeros", "reason": "x"}]}}

CONTROL = {"contract": "control"}
DECLARED_CONTROL = {"contract": "control", "expect": {"stress": {"fail": ["+1000/*"]}}}
IDENTICAL = {"contract": "bit-identical", "expect": {"identity": "pass"}}
DIFFERS = {"contract": "control", "expect": {"identity": "fail"}}
SKIPS = {"contract": "tolerance", "expect": {"identity": "skip"}}
FAILS_OFFICIALLY = {"contract": "control", "expect": {"official": "fail"}}
ACCURATE = {"contract": "tolerance", "accurate": True}
P, F, U = Answer.PASS, Answer.FAIL, Answer.UNCERTIFIED

# check, how its stage ended, what it found, what was declared, the answer, and a part of its words
CASES = [
    ("official", OK, GOOD, {}, P, "(5 / 5)"),
    ("official", WRONG, BAD, {}, F, "Output mismatch"),
    ("official", OK, ON_CPU, {}, U, "not an official verdict"),  # however well the local check went
    ("official", WRONG, ON_CPU, {}, F, "Output mismatch"),  # what fails on a CPU already need not wait for a GPU
    ("official", NOT_RUN, {}, {}, U, "no GPU here"),
    ("official", CRASHED, {}, {}, F, "SIGSEGV"),
    ("official", {**WRONG, "status": "COMPILE_ERROR"}, NO_VERDICT, {}, F, "COMPILE_ERROR"),
    ("official", {**WRONG, "status": "RUNTIME_ERROR"}, GOOD, {}, F, "RUNTIME_ERROR"),  # correct, then died while timed
    ("official", OK, GOOD, FAILS_OFFICIALLY, F, "declared to fail the official check, and passes it"),
    ("official", WRONG, BAD, FAILS_OFFICIALLY, P, "fails as declared"),
    ("identity", OK, EQUAL, IDENTICAL, P, "56/56"),
    ("identity", OK, UNEQUAL, IDENTICAL, F, "55/56"),
    ("identity", OK, EQUAL, {}, P, "56/56"),  # undeclared and required: then it is meant
    ("identity", OK, UNEQUAL, {}, F, "55/56"),
    ("identity", OK, UNEQUAL, DIFFERS, P, "differs as declared"),
    ("identity", OK, EQUAL, DIFFERS, F, "declared to differ"),
    ("identity", OK, UNEQUAL, SKIPS, P, "nothing is claimed"),
    ("identity", OK, CONTRADICTED, IDENTICAL, F, "2 different results"),
    # The model of native's order can convict on a CPU; that no case differs is for a GPU to say.
    ("identity", OK, EQUAL_HOSTED, IDENTICAL, U, "model of native's order"),
    ("identity", OK, EQUAL_HOSTED, {}, U, "promised against native on CUDA"),
    ("identity", OK, NO_DEVICE, IDENTICAL, U, "promised against native on CUDA"),  # no judge of ours leaves that out
    ("identity", OK, UNEQUAL_HOSTED, IDENTICAL, F, "55/56"),
    ("identity", OK, EQUAL_HOSTED, DIFFERS, U, "promised against native on CUDA"),
    ("identity", OK, EQUAL_CPU, IDENTICAL, U, "native on cpu"),
    ("identity", OK, NO_CASE, IDENTICAL, U, "no case"),
    ("identity", NOT_RUN, {}, IDENTICAL, U, "no GPU here"),
    ("stress", OK, stress(zero_initial="pass"), {}, P, "equal_nan=True"),
    ("stress", OK, stress(zero_initial="pass", normal_initial="fail"), {}, F, "normal/initial"),
    ("stress", OK, stress(normal_initial="nearer_than_reference"), {}, F, "nearer_than_reference"),
    ("stress", OK, stress(normal_initial="nearer_than_reference"), ACCURATE, P, ""),
    ("stress", OK, stress(zero_initial="pass", **{"+1000_initial": "fail"}), DECLARED_CONTROL, P, ""),
    ("stress", OK, stress(zero_initial="fail", **{"+1000_initial": "fail"}), DECLARED_CONTROL, F, "zero/initial"),
    (
        "stress",
        OK,
        stress(zero_initial="pass", **{"+1000_initial": "pass"}),
        DECLARED_CONTROL,
        F,
        "declared fail, but it is",
    ),
    ("stress", OK, stress(zero_initial="pass", **{"+1000_initial": "skipped"}), DECLARED_CONTROL, U, "+1000/*"),
    ("stress", OK, stress(zero_initial="pass"), DECLARED_CONTROL, F, "no case of that name"),  # a misspelt promise
    ("stress", OK, stress(zero_initial="pass"), CONTROL, F, "declared a control, but fails no case"),
    ("stress", OK, stress(normal_initial="fail"), CONTROL, P, "as a control does"),
    ("stress", OK, stress(zero_initial="skipped"), {}, U, "no case could be run"),
    ("stress", OK, reference_refuses("normal/random/eps0"), {}, P, "1 cases skipped because the reference refuses it"),
    ("stress", OK, reference_refuses("official/initial/eps1e-05"), {}, U, "the reference refuses it: no"),
    ("oracle", OK, oracle(), {}, P, "1/1"),
    ("oracle", OK, oracle(candidate_allclose=False, nearer="reference"), {}, F, "normal/initial"),
    ("oracle", OK, oracle(candidate_allclose=False, reference_allclose=False), {}, P, ""),  # native is no better
    ("oracle", OK, oracle(candidate_bound_ratio=1.5), ACCURATE, F, "1.5 of the bound"),
    ("oracle", OK, oracle(candidate_bound_ratio="Infinity"), ACCURATE, F, "inf of the bound"),
    ("oracle", OK, oracle(candidate_bound_ratio=1.5, rstd_overflows_fp32=True), ACCURATE, P, ""),
    ("oracle", OK, oracle(candidate_allclose=False), CONTROL, P, "a control"),
    ("oracle", OK, {"oracle": {}}, {}, U, "no case"),
    ("guards", OK, CLEAN, {}, P, "1 guards clean"),
    ("guards", OK, CAUGHT, CONTROL, F, "zeros: all zero"),  # no contract allows a cheat
    ("guards", OK, UNASKED, {}, U, "no guard"),
    ("guards", CRASHED, {}, {}, F, "SIGSEGV"),
]


@pytest.mark.parametrize(("check", "stage", "found", "declaration", "answer", "words"), CASES)
def test_an_answer(check: str, stage: dict, found: dict, declaration: dict, answer: Answer, words: str) -> None:
    given = {c.name: c for c in answers({**found, "stages": {check: stage}}, declaration, [check])}
    assert given[check].answer is answer, given[check].words
    assert words in given[check].words
    assert all(c.answer is Answer.NOT_REQUIRED for name, c in given.items() if name != check)


@pytest.mark.parametrize(
    ("check", "found", "declaration", "answer"),
    [
        ("stress", stress(normal_initial="fail"), {"contract": "tolerance"}, U),
        ("stress", stress(normal_initial="pass"), {"contract": "tolerance"}, P),
        ("stress", stress(normal_initial="fail"), {}, F),  # nothing was declared: the row is all there is
        ("oracle", oracle(candidate_allclose=False), {"contract": "tolerance"}, U),
        ("guards", CAUGHT, {"contract": "tolerance"}, F),  # a cheat is one on every device
    ],
)
def test_a_library_file_on_a_cpu_ran_other_kernels_than_it_declares(
    check: str, found: dict, declaration: dict, answer: Answer
) -> None:
    given = answers({**found, "stages": {check: OK}}, declaration, [check], library_on_cpu=True)
    assert {c.name: c.answer for c in given}[check] is answer


CLAIMS = [  # check, a record that only a GPU could have made, what is said of it in a run without one
    ("official", GOOD, "upstream's evaluator"),
    ("identity", EQUAL, "made on cuda"),
    ("identity", NO_DEVICE, "made on native on cuda"),
    ("stress", {"stress": {**stress(zero_initial="pass")["stress"], "device": "cuda"}}, "made on cuda"),
]


@pytest.mark.parametrize(("check", "found", "words"), CLAIMS)
def test_a_record_that_claims_a_gpu_where_there_was_none_fails(check: str, found: dict, words: str) -> None:
    given = {c.name: c for c in answers({**found, "stages": {check: OK}}, {}, [check], on_gpu=False)}[check]
    assert given.answer is Answer.FAIL and words in given.words, given


def test_a_required_check_that_did_not_run_is_not_certified() -> None:
    assert {c.answer for c in answers({"stages": {}}, {}, KINDS)} == {Answer.UNCERTIFIED}


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ([P, P], 0),
        ([P, Answer.NOT_REQUIRED], 0),
        ([P, U], 3),
        ([U, F], 1),  # a failure is a failure, whatever else could not be asked
    ],
)
def test_the_exit_code(given: list[Answer], code: int) -> None:
    assert exit_code([Check("official", answer, "") for answer in given]) == code


REPORTED = {"good": [Check("official", P, "fine"), Check("stress", Answer.NOT_REQUIRED, "not required of this run")],
            "bad\x00name": [Check("official", F, "prints \x1b[31mred"), Check("stress", U, "no GPU")]}  # fmt: skip


def test_the_json_names_what_was_not_required() -> None:
    content = as_json(REPORTED, ["official"], {"task": "level1_40"})
    assert content["required"] == ["official"]
    assert content["not_required"] == [name for name in KINDS if name != "official"]
    assert content["exit_code"] == 1
    assert content["candidates"]["good"]["stress"]["answer"] == "not required"


def test_the_junit_file_is_read_back_with_its_outcomes(tmp_path: Path) -> None:
    """junitparser, an independent reader: failures and errors where a CI system looks for them, and no other noise."""
    reported = {"good": REPORTED["good"], "bad": REPORTED["bad\x00name"]}
    as_junit(reported, {"task": "level1_40"}).write(str(tmp_path / "gate.xml"), pretty=True)
    read = junitparser.JUnitXml.fromfile(str(tmp_path / "gate.xml"))
    assert (read.tests, read.failures, read.errors, read.skipped) == (3, 1, 1, 0)
    results = {(s.name, c.name): [type(r).__name__ for r in c.result] for s in read for c in s}
    assert results == {
        ("good", "official"): [],
        ("bad", "official"): ["Failure"],
        ("bad", "stress"): ["Error"],
    }


# ---- the command, through real children on the small task ----

SMALL = ["--task", str(TESTS / "support" / "small_layer_norm_task" / "reference.py"), "--device", "cpu"]


def gate(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["gate", *arguments])


@pytest.fixture
def native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An honest candidate, in a folder to run in."""
    monkeypatch.chdir(tmp_path)
    source = (TESTS / "twins" / "beta_mutated.py").read_text("utf-8")
    honest = "\n".join(line for line in source.splitlines() if ".bias.data" not in line)
    (tmp_path / "native.py").write_text(honest)
    return "native.py"


def test_zero_when_every_required_check_passes(native: str, tmp_path: Path) -> None:
    result = gate(native, *SMALL, "--require", "guards", "--json", "gate.json", "--junit", "deep/gate.xml")
    assert result.exit_code == 0, result.output
    assert "not required, so not certified: official, identity, stress, oracle, referee" in result.output
    content = json.loads((tmp_path / "gate.json").read_text())
    assert content["candidates"]["native"]["guards"]["answer"] == "pass"
    assert content["provenance"] == "local"
    (suite,) = junitparser.JUnitXml.fromfile(str(tmp_path / "deep" / "gate.xml"))
    assert (suite.tests, suite.skipped) == (1, 0)
    assert {p.name: p.value for p in suite.properties()}["not required"] == ", ".join(
        name for name in KINDS if name != "guards"
    )


def test_one_when_a_required_check_fails(native: str) -> None:
    result = gate(native, str(TESTS / "twins" / "eps_dropped.py"), *SMALL, "--require", "guards")
    assert result.exit_code == 1, result.output
    assert "native: guards: pass" in result.output
    assert "eps_dropped: guards: FAIL: eps_dropped:" in result.output


def test_three_when_a_required_check_cannot_be_certified_here(native: str, tmp_path: Path) -> None:
    result = gate(native, *SMALL, "--require", "official", "--json", "gate.json")
    assert result.exit_code == 3, result.output
    assert json.loads((tmp_path / "gate.json").read_text())["exit_code"] == 3


def test_three_without_the_gpu_that_was_asked_for(native: str) -> None:
    result = gate(native, *SMALL[:2], "--device", "cuda:77")
    assert result.exit_code == 3, result.output
    assert "cuda:77: the NVIDIA driver offers no such GPU" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--require", "official,typo"], "no such check as typo"),
        (["--require", ","], "--require is empty"),
        (["--device", "tpu"], "write cuda, cuda:<index> or cpu"),
        (["--device", "cpu:1"], "write cuda, cuda:<index> or cpu"),
        (["--device", "cuda:x"], "write cuda, cuda:<index> or cpu"),
        (["--precision", "fp8"], "fp8"),
        (["--task", "level9"], "level9"),
    ],
)
def test_two_when_the_call_is_wrong(native: str, arguments: list[str], words: str) -> None:
    result = gate(native, *arguments)
    assert result.exit_code == 2, result.output
    assert words in result.output


def test_two_when_the_candidate_does_not_exist(native: str) -> None:
    result = gate("nowhere.py", *SMALL)
    assert result.exit_code == 2 and "nowhere.py: no such candidate file" in result.output


def test_the_default_requires_official_and_referee(native: str) -> None:
    result = gate(native, *SMALL[:2], "--device", "cuda:77", "--json", "gate.json")
    assert json.loads(Path("gate.json").read_text())["required"] == ["official", "referee"], result.output


def test_the_example_workflow_calls_what_exists() -> None:
    """Every `kbsub gate` line of docs/ci/kernels.yml parses: options and checks that were renamed would be found."""
    import shlex

    import typer

    group = typer.main.get_command(app)
    lines = gate_lines(ROOT / "docs" / "ci" / "kernels.yml")
    assert len(lines) >= 3, lines
    for line in lines:
        command = group.commands["gate"]  # type: ignore[attr-defined]
        context = command.make_context("gate", shlex.split(line)[2:])
        assert set(context.params["require"].split(",")) <= set(KINDS), line
        named = [name for name in context.params["candidates"] if "*" not in name]
        missing = [name for name in named if not (LADDER / f"{name}.py").exists()]
        assert not missing, f"{line}: no such candidate in {LADDER.name}: {missing}"


def gate_lines(file: Path) -> list[str]:
    """The `kbsub gate ...` commands of a workflow, continuation lines joined, ending at the line's end."""
    text = file.read_text("utf-8").replace("\\\n", " ")
    found = [line[line.index("kbsub gate") :] for line in text.splitlines() if "bin/kbsub gate" in line]
    return found
