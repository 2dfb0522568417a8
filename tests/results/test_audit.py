"""`kbsub audit`: stored comparisons, asked the other way round."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.operators.compare.predicate import compare
from kbsub.eval.results.audit import audit

WITNESS = compare(torch.tensor([0.0]), torch.tensor([1.00005e-4])).to_json()  # close in the official order only
TURNED = compare(torch.tensor([1.00005e-4]), torch.tensor([0.0])).to_json()  # close in the other order only
SAME = compare(torch.tensor([1.0]), torch.tensor([1.00001])).to_json()


def result(*comparisons: dict) -> dict:
    cases = [{"name": f"case{i}", "class": "pass", "native": each} for i, each in enumerate(comparisons)]
    return {"schema": 1, "candidates": {"mine": {"stress": {"passed": 1, "cases": cases}}}}


@pytest.mark.parametrize(
    ("comparisons", "changed"),
    [((SAME, SAME), []), ((SAME, WITNESS), ["case1"]), ((TURNED, SAME, WITNESS), ["case0", "case2"])],
)
def test_the_cases_that_would_change_are_named(comparisons, changed):
    found = audit(result(*comparisons))
    assert found.comparisons == len(comparisons)
    assert [change.where for change in found.changes] == [
        f"candidates / mine / stress / cases / {name} / native" for name in changed
    ]


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (result(SAME), 0, "1 stored comparisons, 0 would change class"),
        (result(SAME, WITNESS), 1, "case1 / native: close (stored as pass), the other way not close"),
        ({"schema": 1}, 3, "no stored comparison"),
    ],
)
def test_the_exit_code_tells(tmp_path, content, code, words):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(content))
    outcome = CliRunner().invoke(app, ["audit", str(path)])
    assert (outcome.exit_code, words in outcome.output) == (code, True), outcome.output


@pytest.mark.parametrize("text", [None, "{", "\x80"])
def test_an_unreadable_file_is_a_usage_error(tmp_path, text):
    path = tmp_path / "result.json"
    if text is not None:
        path.write_bytes(text.encode("latin-1"))
    outcome = CliRunner().invoke(app, ["audit", str(path)])
    assert outcome.exit_code == 2 and str(path) in outcome.output


def test_the_closest_to_the_edge_is_told():
    assert audit(result(SAME, WITNESS)).closest.startswith("candidates / mine / stress / cases / case1")
