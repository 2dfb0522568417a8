"""Upstream's evaluator on a real GPU, through `kbsub eval`: a good row, and the ways only a GPU can go wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app

pytestmark = [pytest.mark.gpu, pytest.mark.kernelbench]

REFERENCE = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2


def get_inputs():
    return [torch.rand(1024, 1024)]


def get_init_inputs():
    return []
"""

FORWARD = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        {}\n"
# An index out of range is a device-side assert: the context is lost for the rest of the process.
STICKY = "return x[torch.full((1,), 1 << 20, device=x.device)]"

# stem, body of forward, status of the row, whether upstream gave a verdict of correctness (None: no verdict)
ROWS = [
    ("good_first", "return x + x", "OK", True),
    ("sticky_error", STICKY, "RUNTIME_ERROR", None),
    ("out_of_memory", "return torch.empty(1 << 50, device=x.device)", "OUT_OF_MEMORY", False),
    ("spins", "\n        while True: x = x + 0", "TIMEOUT", None),
    ("wrong_value", "return x * 2.01", "INCORRECT_NUMERICAL", False),
    ("good_last", "return 2 * x", "OK", True),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "task.py").write_text(REFERENCE)
    for stem, body, *_ in ROWS:
        (folder / f"{stem}.py").write_text(FORWARD.format(body))
    files = [str(folder / f"{stem}.py") for stem, *_ in ROWS]
    options = ["--task", str(folder / "task.py"), "--only", "official", "--timeout", "45"]
    outcome = CliRunner().invoke(app, ["eval", *files, *options, "--out", str(folder / "out.json")])
    assert outcome.exit_code == 1, outcome.output
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize(("stem", "body", "status", "correct"), ROWS, ids=[row[0] for row in ROWS])
def test_row(rows: dict[str, Any], stem: str, body: str, status: str, correct: bool | None) -> None:
    row = rows["candidates"][stem]
    assert row["status"] == status, row
    assert (row["official"] or {}).get("correctness") is correct, row


def test_good_row_has_upstreams_numbers_and_a_floor(rows: dict[str, Any]) -> None:
    row = rows["candidates"]["good_last"]
    assert row["official"]["trials"] == "(5 / 5)"
    assert row["timing"]["cuda_event"]["trials"] == 100
    assert row["official"]["ref_runtime"] > 0
    assert row["floors"]["bytes"] == 2 * 4 << 20  # x and y, no parameters
    assert 0 < row["floors"]["memory_ms"] < row["timing"]["cuda_event"]["mean_ms"]


def test_environment_names_the_gpu(rows: dict[str, Any]) -> None:
    facts = rows["environment"]
    assert facts["gpu"] and facts["driver"] and facts["cuda"], facts
