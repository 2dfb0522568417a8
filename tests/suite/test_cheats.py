"""Candidates that change their own process fail stress and oracle: the judge is in another."""

from __future__ import annotations

import pytest

from kbsub.eval.suite.judge import judge_many
from support.paths import TESTS
from support.sizes import SMALL_LEVEL1_40

pytestmark = pytest.mark.slow  # a worker for each cheat

FOLDER = TESTS / "support" / "remote_candidates"
COMMON = {"task": "level1_40", "precision": "fp32", "kernelbench": None, "device": "cpu", "size": SMALL_LEVEL1_40}
CHEATS = (
    "forge_json_dumps forge_env_token native_replaced_everywhere layernorm_class_replaced c2_instance_override "
    "c4_reference_patched c6_function_mode lazy_everywhere"
).split()


@pytest.fixture(scope="module", params=["stress", "oracle"])
def rows(request):
    names = [*CHEATS, "honest"]
    candidates = [{"stem": name, "candidate_source": (FOLDER / f"{name}.py").read_text()} for name in names]
    more = {"only": ["normal/random/eps1e-05"], "oracle_only": request.param == "oracle"}
    found = judge_many({**COMMON, **more, "candidates": candidates}, lambda event: None)
    return {name: found["stress"].get(name, {"cases": []})["cases"] for name in names}, found


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_gets_no_pass(rows, name):
    cases, found = rows
    assert name in found["failed"] or [row["class"] for row in cases[name]] == ["fail"], cases[name]


def test_the_honest_twin_passes_in_a_worker(rows):
    cases, found = rows
    assert [row["class"] for row in cases["honest"]] == ["pass"]
    assert found["stress"]["honest"]["process"] == "worker"
