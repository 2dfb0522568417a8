"""Eight files that change their own process: `kbsub eval --only STAGE` on a CPU, and what each stage by itself says.

A cheat must fail by its values, or for what it did and the row names. One that merely does not load shows nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.run.gate import answers
from kbsub.eval.tasks.cases import FAIL, SKIPPED
from kbsub.eval.verdicts.kind import Answer
from support.harm_run import HONEST
from support.kept import kept
from support.paths import TESTS

TASK = TESTS / "support" / "small_layer_norm_task" / "reference.py"
FOLDER = TESTS / "support" / "remote_candidates"
BY_VALUE = (
    "forge_json_dumps native_replaced_everywhere layernorm_class_replaced c2_instance_override c4_reference_patched "
    "c6_function_mode lazy_everywhere"
).split()
BY_ACT = {"forge_env_token": "sent a malformed frame"}  # it writes to its judge: what the row says of that
CHEATS = (*BY_VALUE, *BY_ACT)
CONTROL = "honest_control"
STAGES = ("identity", "stress", "oracle")
# "--only" of a run, and its cheats.
RUNS = {
    "stress, one cheat": ("stress", ("native_replaced_everywhere",)),
    **{stage: (stage, CHEATS) for stage in STAGES},
}

pytestmark = pytest.mark.timeout(900)  # the first test of a run waits for all its files


def kbsub(command: str, names: tuple[str, ...], folder: Path, *options: str) -> tuple[int, str]:
    """Exit code and output of `kbsub COMMAND` over the control and the cheats."""
    (folder / f"{CONTROL}.py").write_text(HONEST.format(name=CONTROL))
    files = [f"{CONTROL}.py", *(str(FOLDER / f"{name}.py") for name in names)]
    words = [sys.executable, "-m", "kbsub.eval.cli", command, *files, "--task", str(TASK), "--device", "cpu"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*words, *options, "--timeout", "120"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if "," in name else pytest.mark.slow) for name in RUNS],
)
def judged(tmp_path_factory, request) -> tuple[str, dict[str, Any]]:
    """(stage, rows) of one run in which no other stage was asked for."""
    stage, names = RUNS[request.param]

    def make(folder: Path) -> dict[str, Any]:
        _, words = kbsub("eval", names, folder, "--only", stage, "--out", "result.json")
        assert (folder / "result.json").is_file(), words
        return {"rows": json.loads((folder / "result.json").read_text())["candidates"]}

    rows = kept(tmp_path_factory.getbasetemp(), f"cheats-{request.param}", make).rows
    assert set(rows) == {CONTROL, *names}
    assert all(set(row["stages"]) == {stage} for row in rows.values())
    return stage, rows


def test_the_honest_control_passes(judged):
    stage, rows = judged
    row = rows[CONTROL]
    assert row["stages"][stage]["status"] == "OK", row["stages"]
    if stage == "identity":
        assert row["bit_identity"]["identical"] == row["bit_identity"]["total"] > 40
    elif stage == "stress":
        assert row["stress"]["failed"] == 0 and row["stress"]["passed"] > 150
    else:
        assert len(row["oracle"]) > 20 and all(case["nearer"] == "equal" for case in row["oracle"].values())


def test_a_cheat_fails_by_its_values(judged):
    stage, rows = judged
    for name in set(BY_VALUE) & set(rows):
        row = rows[name]
        assert row["stages"][stage]["status"] == "OK", (name, row["stages"])  # it was loaded and asked to the end
        if stage == "identity":
            found = row["bit_identity"]
            assert found["full_size"] == {"identical": 0, "total": 24}, (name, found["full_size"])
            far = [case for case in found["cases"] if case.get("max_abs") and not case["allclose"]]
            assert found["total"] > 40 and len(far) > 30, (name, found["cases"][0])
        elif stage == "stress":
            cases = [case for case in row["stress"]["cases"] if case["class"] != SKIPPED]
            values = [case for case in cases if case["class"] == FAIL and case.get("native", {}).get("max_abs")]
            assert len(cases) > 150 and not [case for case in cases if lost(case)], (name, cases[0])
            assert len(values) > 100, (name, cases[0])
        else:
            wrong = [case for case in row["oracle"].values() if not case["candidate_allclose"]]
            assert len(row["oracle"]) > 20 and 2 * len(wrong) > len(row["oracle"]), (name, len(wrong))
            assert all(case["reference_allclose"] for case in wrong[:1]), name


def lost(case: dict[str, Any]) -> bool:
    """Whether a case of the suite was not answered, or the answer not compared."""
    ends = ("raised", "lost", "crashed", "timeout", "out of memory")
    return case["class"] == FAIL and case.get("reason", "").startswith(ends)


def test_a_cheat_that_writes_to_its_judge_fails_for_that(judged):
    stage, rows = judged
    for name in set(BY_ACT) & set(rows):
        ended = rows[name]["stages"][stage]
        assert (ended["status"], BY_ACT[name] in ended["message"]) == ("CRASHED", True), ended
        assert not rows[name].get({"identity": "bit_identity"}.get(stage, stage)), "no verdict is left"


def test_gate_fails_every_cheat_on_that_stage_alone(judged):
    stage, rows = judged
    for name in set(rows) - {CONTROL}:
        (check,) = [each for each in answers(rows[name], {}, [stage], on_gpu=False) if each.name == stage]
        assert check.answer is Answer.FAIL, (name, check)


# ---- gate, without a GPU ----


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("honest", "cheats")])
def gated(tmp_path_factory, request) -> tuple[int, dict[str, Any], tuple[str, ...]]:
    names = CHEATS if request.param == "cheats" else ()
    folder = tmp_path_factory.mktemp("gate")
    needs_a_gpu = ("--require", "official,identity") if not names else ("--require", "official,identity,stress,oracle")
    code, words = kbsub("gate", names, folder, *needs_a_gpu, "--json", "gate.json")
    assert (folder / "gate.json").is_file(), words
    return code, json.loads((folder / "gate.json").read_text())["candidates"], names


def test_gate_says_pass_to_nothing_that_needs_a_gpu(gated):
    code, found, names = gated
    assert set(found) == {CONTROL, *names}
    for name, checks in found.items():
        said = {check: checks[check]["answer"] for check in ("official", "identity")}
        assert "pass" not in said.values(), (name, checks)
        if name == CONTROL:
            assert set(said.values()) == {"cannot be certified here"}, checks
        else:
            assert not [check for check in STAGES if checks[check]["answer"] == "pass"], (name, checks)
    assert code == (1 if names else 3)
