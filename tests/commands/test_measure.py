"""`kbsub measure`: a file of eval/measure is a program, its exit code is the command's, what is not there is said."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.commands import measure
from kbsub.eval.run import project

NAMES = ("error_table", "golden", "resources", "sanitizer", "tokens", "twins", "wall_time")


def kbsub_measure(*arguments: str):
    return CliRunner().invoke(app, ["measure", *arguments])


def test_the_list_says_what_each_program_does():
    listed = dict(line.split(None, 1) for line in kbsub_measure().output.splitlines())
    assert set(NAMES) <= set(listed), f"not listed: {set(NAMES) - set(listed)}"
    assert listed == measure.programs() and all(len(words) > 20 for words in listed.values()), listed
    assert not {"project", "sanitizer_cases"} & set(listed), "modules without a command line are no programs"


@pytest.mark.parametrize("name", sorted(measure.programs()))
def test_each_program_has_its_own_help_with_its_name(name):
    outcome = kbsub_measure(name, "--help")
    assert outcome.exit_code == 0 and f"kbsub measure {name}" in outcome.output, outcome.output


def test_the_list_is_made_without_torch():
    import subprocess

    code = "import sys; from kbsub.eval.commands.measure import programs; programs(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stdout + done.stderr


PROGRAM = '"""Counts sheep until one asks why."""\ndef main(arguments):\n    print("sheep", *arguments)\n    return 7\n'
WITH_TYPER = '''"""Counts goats and leaves through typer."""
import typer
def command(count: int, why: bool = False) -> None:
    typer.echo(f"goats {count} {why}")
    raise typer.Exit(5)
'''


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder that the package of programs looks into too."""
    monkeypatch.setattr("kbsub.eval.measure.__path__", [*measure.programs_package.__path__, str(tmp_path)])
    yield tmp_path
    for name in ("sheep", "goats"):
        sys.modules.pop(f"kbsub.eval.measure.{name}", None)


def test_one_file_adds_a_program(folder):
    (folder / "sheep.py").write_text(PROGRAM)
    outcome = kbsub_measure("sheep", "--legs", "4", "one")
    assert (outcome.exit_code, outcome.output) == (7, "sheep --legs 4 one\n")
    assert "Counts sheep until one asks why." in kbsub_measure().output


def test_a_program_may_be_a_function_of_typers(folder):
    (folder / "goats.py").write_text(WITH_TYPER)
    outcome = kbsub_measure("goats", "3", "--why")
    assert (outcome.exit_code, outcome.output) == (5, "goats 3 True\n")
    wrong = kbsub_measure("goats", "many")
    assert wrong.exit_code == 2 and "count" in wrong.output, wrong.output


def test_a_name_that_is_none_is_refused_with_those_there_are():
    outcome = kbsub_measure("twin")
    assert outcome.exit_code == 2 and all(name in outcome.output for name in ("twin:", *NAMES)), outcome.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["twins", "--out", "x.json"], ("tests/twins", "checkout", "--twins")),
    ],
)
def test_outside_a_checkout_the_missing_file_and_the_option_are_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.setattr(project, "SUBMISSIONS", tmp_path / "site-packages" / "submissions")
    monkeypatch.chdir(tmp_path)
    outcome = kbsub_measure(*arguments)
    assert outcome.exit_code == 2 and all(word in outcome.output for word in words), outcome.output


def test_in_a_checkout_the_twins_are_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert (project.project_path("tests/twins", "--twins") / "twins.toml").is_file()
