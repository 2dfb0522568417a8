"""A candidate that reaches for its judge, and what identity alone says of it: on a CPU, through `kbsub eval`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from support.paths import TESTS

pytestmark = pytest.mark.slow  # a worker for each cheat

TASK = TESTS / "support" / "small_layer_norm_task" / "reference.py"
TWINS = TESTS / "support" / "remote_candidates"
HONEST = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)
    def forward(self, x):
        return self.ln(x)
"""
CHEATS = {  # file: the status of its stage
    "forge_json_dumps": "OK",
    "forge_env_token": "CRASHED",  # what it writes to its judge is a malformed frame
    "native_replaced_everywhere": "OK",
    "layernorm_class_replaced": "OK",
    "c2_instance_override": "OK",
    "c4_reference_patched": "OK",
    "c6_function_mode": "OK",
    "lazy_everywhere": "OK",
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Every twin and the honest one in one run, each a row."""
    folder = tmp_path_factory.mktemp("cheats")
    (folder / "honest_twin.py").write_text(HONEST)
    files = [folder / "honest_twin.py", *(TWINS / f"{name}.py" for name in CHEATS)]
    out = folder / "result.json"
    done = run("eval", *files, "--only", "identity", "--timeout", "120", "--out", out)
    assert out.is_file(), done
    return json.loads(out.read_text())["candidates"]


def run(command: str, *words: Any) -> str:
    arguments = [command, "--task", TASK, "--device", "cpu", *words]
    return CliRunner().invoke(app, [str(word) for word in arguments]).output


def test_an_honest_twin_is_identical_in_every_case(rows):
    found = rows["honest_twin"]["bit_identity"]
    assert rows["honest_twin"]["stages"]["identity"]["status"] == "OK"
    assert found["identical"] == found["total"] == len(found["cases"]) > 3
    assert found["full_size"]["total"] > 0 and found["device"] == "cpu"
    assert found["confined"]["level"] in ("namespaces", "landlock", "unconfined")


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_fails_identity_by_itself(name, rows):
    row = rows[name]
    assert row["stages"]["identity"]["status"] == CHEATS[name], row["stages"]
    if CHEATS[name] == "OK":
        found = row["bit_identity"]
        assert found["full_size"] == {"identical": 0, "total": 24}, found["full_size"]
        assert found["total"] > 50, "it was asked everything"
    else:
        assert not (row.get("bit_identity") or {}).get("identical")


@pytest.mark.parametrize("name", ["honest_twin", "forge_json_dumps"])
def test_without_a_gpu_the_gate_never_says_pass(name, tmp_path):
    file = TWINS / f"{name}.py"
    if name == "honest_twin":
        file = tmp_path / "honest_twin.py"
        file.write_text(HONEST)
    answers = tmp_path / "answers.json"
    words = run("gate", file, "--require", "identity", "--timeout", "120", "--json", answers)
    (checks,) = json.loads(answers.read_text())["candidates"].values()
    assert checks["identity"]["answer"] != "pass", words
