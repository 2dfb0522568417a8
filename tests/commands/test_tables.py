"""Every command that prints a table: its --format json is one JSON value on stdout, its --quiet says nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.results.manifest import write_manifest
from kbsub.eval.run.doctor import Ability, Finding
from support.judged_rows import official, put
from support.relu_task import GOOD, TASK
from support.stored_result import content

pytestmark = pytest.mark.usefixtures("warm_children")
GROUP: Any = typer.main.get_command(app)
SENTENCES = {"ci", "fetch", "new", "report"}  # these say what they wrote
NEEDS_A_GPU = {"bench"}  # its answers are tested in tests/bench, here only that it knows the options
COMPARED = {"native": {"allclose": True, "allclose_swapped": False, "class": "pass"}}
# Command -> its call, its exit code, and keys that its JSON must hold, each below the one before.
CALLS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "audit": (("audited.json",), 1, "comparisons"),
    "baseline": (("--modes", "eager", "--out", "timing"), 0, "baselines"),
    "blindspots": (("level1_36", "--device", "cpu", "--out", "spots"), 0, "tasks level1_36 schema"),
    "compare": (("results/stored.json",), 0, "rows"),
    "diff": (("before", "after"), 1, "changed"),
    "doctor": ((), 0, "abilities"),
    "eval": (("good.py", "--task", "task.py", "--only", "official"), 0, "rows"),
    "export": (("good.py", "--task", "task.py", "--run-name", "mine"), 0, "samples"),
    "gate": (("good.py", "--task", "task.py", "--require", "source"), 0, "candidates"),
    "leaderboard": (("before", "after", "--out", "board"), 0, "problems"),
    "measure": ((), 0, "twins"),
    "starters": (("--style", "torch", "--device", "cpu", "--first", "1", "--out", "starters.json"), 0, "rows"),
    "verify": (("results",), 0, "problems"),
}


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `kbsub` in a folder with what CALLS name; what would take a GPU or minutes answers at once."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "good.py").write_text(GOOD)
    for run, ms in (("before", 1.0), ("after", 2.0)):
        put(tmp_path / run, 1, 1, 0, official(True, ms, 10.0))
    (tmp_path / "audited.json").write_text(json.dumps(COMPARED))
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "stored.json").write_text(json.dumps(content()))
    write_manifest(tmp_path / "results")
    (tmp_path / "spots").mkdir()
    (tmp_path / "spots" / "level1_36.json").write_text('{"schema": 1}')
    row = SimpleNamespace(status="OK", reason="", sha256="")
    for name, answer in {
        "eval.run.export.refusals": lambda *_: [],
        "eval.commands.common.gpu_of": lambda verb, _: "NVIDIA H200" if verb == "baseline" else None,
        "eval.bench.baseline_files.measure_all": lambda plan, say: bool(say("timed")),
        "eval.blindspots.schedule.is_current": lambda *_: True,
        "eval.run.doctor.examine": lambda _: [Finding("torch", True, "2.11", "")],
        "eval.run.doctor.abilities": lambda found: [Ability("stress", ())],
        "eval.interface.judge": lambda *_, **__: SimpleNamespace(rows={"row": row}, certified=False),
    }.items():
        monkeypatch.setattr(f"kbsub.{name}", answer)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_every_command_is_here() -> None:
    assert GROUP.commands.keys() == CALLS.keys() | SENTENCES | NEEDS_A_GPU


@pytest.mark.parametrize("verb", sorted(GROUP.commands.keys() - SENTENCES))
def test_a_command_that_prints_a_table_has_both_options(verb: str, call: Callable[..., Any]) -> None:
    options = {name for each in GROUP.commands[verb].params for name in each.opts}
    assert {"--format", "--quiet", "-q"} <= options
    said = call(verb, *CALLS.get(verb, ((), 0, ""))[0], "--format", "yaml")
    assert said.exit_code == 2 and "--format yaml: table or json" in said.output, said.output


@pytest.mark.kernelbench
@pytest.mark.parametrize("verb", CALLS)
def test_json_is_one_value_and_quiet_says_nothing(verb: str, call: Callable[..., Any]) -> None:
    arguments, code, part = CALLS[verb]
    table, as_json, quiet = (call(verb, *arguments, *more) for more in ((), ("--format", "json"), ("--quiet",)))
    assert [said.exit_code for said in (table, as_json, quiet)] == [code] * 3, table.output + as_json.output
    value = json.loads(as_json.stdout)
    for key in part.split():
        value = (value[0] if isinstance(value, list) else value)[key]
    assert table.stdout and quiet.stdout == ""
