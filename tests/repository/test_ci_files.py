"""The composite action and the templates: they parse, call what exists, and the action's gate step works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.commands import ci
from kbsub.eval.run.here import NAME as HERE
from kbsub.eval.verdicts.register import KINDS
from support.relu_task import TASK

BROKEN = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x)\n        return x\n"


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load(ci.packaged(name).read_text("utf-8"))


def gate_options(text: str) -> list[str]:
    """The options of the `kbsub gate` command in a shell text."""
    (line,) = [line for line in text.replace("\\\n", " ").splitlines() if "kbsub gate" in line or 'kbsub" gate' in line]
    return re.findall(r"(?<!\S)--[a-z]+", line)


def test_the_options_that_are_called_exist() -> None:
    group: Any = typer.main.get_command(app)
    known = {option for parameter in group.commands["gate"].params for option in parameter.opts}
    action = next(step["run"] for step in read("action.yml")["runs"]["steps"] if step.get("id") == "gate")
    gitlab = "\n".join(read("gitlab.yml")[".kbsub-gate"]["script"])
    for text in (action, gitlab):
        assert gate_options(text) and set(gate_options(text)) <= known


def test_what_is_required_and_given_exists() -> None:
    """`require` of every job names kinds; every input that a job or a step uses is one of the action's."""
    action, github, gitlab = read("action.yml"), read("github.yml"), read("gitlab.yml")
    (folder_of_the_action,) = [
        str(Path(name).parent) for name, what in ci.FILES["github"].items() if what == "action.yml"
    ]
    steps = [
        step for job in github["jobs"].values() for step in job["steps"] if step["uses"] == f"./{folder_of_the_action}"
    ]
    assert len(steps) == 2, "the workflow uses the action that is written beside it"
    required = [step["with"]["require"] for step in steps]
    required += [gitlab[job]["variables"]["REQUIRE"] for job in (".kbsub-gate", "kernels-gpu")]
    required.append(action["inputs"]["require"]["default"])
    for each in required:
        assert each == HERE or set(each.split(",")) <= set(KINDS), each
    for step in steps:
        assert {"package"} <= set(step["with"]) <= set(action["inputs"]), "there its own folder holds no package"
    for text in (github["env"], gitlab[".kbsub-gate"]["variables"]):
        assert {"CANDIDATES", "TASK", "PACKAGE"} <= text.keys(), "as `kbsub ci` says"
    used = set(re.findall(r"inputs\.([a-z-]+)", ci.packaged("action.yml").read_text()))
    assert used == set(action["inputs"])


def test_a_fork_gets_no_secret_and_no_gpu() -> None:
    """As SECURITY.md says: a read-only token, never pull_request_target, no GPU job for a pull request from a fork."""
    for name in ("github.yml",):
        text, github = ci.packaged(name).read_text(), read(name)
        assert "pull_request_target:" not in text and "secrets." not in text
        assert github["permissions"] == {"contents": "read"}
        assert "head.repo.full_name == github.repository" in github["jobs"]["gpu"]["if"]
        checkouts = [s for job in github["jobs"].values() for s in job["steps"] if "actions/checkout" in s["uses"]]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts)
    # No input is pasted into a script: a name of a file or a branch cannot become a command.
    for step in read("action.yml")["runs"]["steps"]:
        assert "${{" not in step.get("run", ""), step.get("name")


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="bash: the action's steps are for it")
def test_the_gate_step_of_the_action_fails_on_the_line_of_a_planted_fault(tmp_path: Path) -> None:
    """Its own shell text with the environment GitHub gives: two files by one pattern, one with spaces in its name."""
    step = next(step for step in read("action.yml")["runs"]["steps"] if step.get("id") == "gate")
    shim = tmp_path / "venv" / "bin" / "kbsub"
    shim.parent.mkdir(parents=True)
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m kbsub.eval.cli "$@"\n')
    shim.chmod(0o755)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "kernels").mkdir()
    for name in ("broken.py", "broken too.py"):
        (tmp_path / "kernels" / name).write_text(BROKEN)
    given = {
        "CANDIDATES": "kernels/*.py",
        "TASK": "task.py",
        "REQUIRE": "official",
        "PRECISION": "fp32",
        "TIMEOUT": "120",
    }
    given |= {"REPORTS": "reports", "VENV": str(tmp_path / "venv"), "GITHUB_OUTPUT": "output", "GITHUB_ACTIONS": "true"}
    given |= {"GITHUB_STEP_SUMMARY": "summary.md"}
    assert set(step["env"]) <= set(given)
    done = subprocess.run(
        ["/bin/bash", "-e", "-o", "pipefail", "-c", step["run"]],
        cwd=tmp_path,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "::error file=kernels/broken.py,line=3," in done.stdout
    assert "::error file=kernels/broken too.py,line=3," in done.stdout
    assert (tmp_path / "output").read_text() == "exit-code=1\n"
    assert "| broken | official | **FAIL** |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "reports" / "gate.xml").exists() and (tmp_path / "reports" / "gate.json").exists()


@pytest.mark.parametrize("system", ci.FILES)
def test_the_command_writes_them_once(tmp_path: Path, system: str) -> None:
    first = CliRunner().invoke(app, ["ci", system, "--to", str(tmp_path)])
    assert first.exit_code == 0, first.output
    for name, source in ci.FILES[system].items():
        assert (tmp_path / name).read_bytes() == ci.packaged(source).read_bytes()
    again = CliRunner().invoke(app, ["ci", system, "--to", str(tmp_path)])
    assert again.exit_code == 2 and "exists" in again.output


def test_an_unknown_system_is_exit_2() -> None:
    assert CliRunner().invoke(app, ["ci", "jenkins"]).exit_code == 2
