"""The baselines' error table joins a result file and loses nothing of it: eval/measure/error_table.py."""

from __future__ import annotations

import json

import typer
from typer.testing import CliRunner

from kbsub.eval.measure.error_table import command
from kbsub.eval.results.model import SCHEMA

RESULT = {
    "schema": SCHEMA,
    "environment": {
        **dict.fromkeys(("gpu", "driver", "cuda", "cupy", "nvrtc", "project_commit")),
        **{"torch": "2", "python": "3", "kernelbench_commit": "4" * 40, "date": "2026-11-30T12:00:00+00:00"},
    },
    "task": {"level": 1, "problem_id": 40, "sha256": "a" * 64, "provenance": "embedded"},
    "baselines": {"eager": {"timing": {"cuda_event": {"mean_ms": 8.0, "std_ms": 0.1, "trials": 100}}}},
    "candidates": {},
}


def run(path, *arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(path), "--device", "cpu", "--baseline", "eager", *arguments])


def test_the_table_is_added_beside_the_times(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps(RESULT))
    outcome = run(path)
    assert outcome.exit_code == 0, outcome.output
    eager = json.loads(path.read_text())["baselines"]["eager"]
    assert eager["timing"]["cuda_event"]["mean_ms"] == 8.0
    assert len(eager["oracle"]) == 32
    assert eager["oracle"]["+1e5/random/eps1e-05"]["candidate_max_abs"] > 1e-3, "native is far off there"


def test_a_result_of_another_machine_is_refused(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**RESULT, "environment": {**RESULT["environment"], "gpu": "NVIDIA H200"}}))
    outcome = run(path)
    assert outcome.exit_code == 2 and "NVIDIA H200" in outcome.output


def test_a_result_of_a_local_task_is_refused_in_words(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({**RESULT, "task": {**RESULT["task"], "level": 0, "problem_id": 0}}))
    outcome = run(path)
    assert outcome.exit_code == 2 and "is of a local task" in outcome.output
