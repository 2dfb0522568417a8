"""What every command has: examples in --help; and where they are --version, --quiet, --format, --clear, --watch."""

from __future__ import annotations

import json
import re
import shlex
import threading
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kbsub.adapters.pin import PIN
from kbsub.adapters.version import VERSION
from kbsub.eval.cli import app
from kbsub.eval.commands.saves import SaveWatch
from support.paths import ROOT
from support.relu_task import GOOD, TASK

pytestmark = pytest.mark.usefixtures("warm_children")

GROUP: Any = typer.main.get_command(app)
STORED = str(ROOT / "results" / "h200" / "level1_40.json")


def kbsub(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", sorted(GROUP.commands))
def test_every_help_ends_with_examples_that_parse(name: str) -> None:
    """At least two calls of the command, each with options that exist."""
    command = GROUP.commands[name]
    lines = [line.strip() for line in (command.help or "").splitlines() if line.strip().startswith("kbsub ")]
    assert len(lines) >= 2, f"kbsub {name} --help has {len(lines)} examples"
    for line in lines:
        words = shlex.split(line)
        assert words[:2] == ["kbsub", name], line
        if "--help" not in words:
            command.make_context(name, words[2:])


def test_the_version_is_one_line_from_one_place() -> None:
    said = kbsub("--version")
    assert (said.exit_code, said.output) == (0, f"kbsub {VERSION}, KernelBench {PIN[:12]}\n")
    assert not re.search(r'^version = "', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def test_json_is_one_value_on_stdout(folder: Path) -> None:
    official = ("good.py", "--task", "task.py")
    judged = kbsub("eval", *official, "--only", "official", "--format", "json")
    assert judged.exit_code == 0
    assert json.loads(judged.stdout)["rows"]["good"]["status"] == "OK"
    assert "official OK" in judged.stderr
    gated = kbsub("gate", *official, "--require", "official", "--format", "json")
    assert (gated.exit_code, json.loads(gated.stdout)["exit_code"]) == (3, 3)
    (table, *_) = json.loads(kbsub("compare", STORED, "--format", "json").stdout)
    assert table["rows"] and table["title"]


def test_doctor_as_json_names_the_versions() -> None:
    said = json.loads(kbsub("doctor", "--format", "json").stdout)
    assert (said["version"], said["kernelbench_commit"]) == (VERSION, PIN)


def test_quiet_prints_nothing_and_keeps_the_exit_code(folder: Path) -> None:
    (folder / "bad.py").write_text("class ModelNew(:\n")
    judged = kbsub("eval", "bad.py", "--task", "task.py", "--only", "official", "--quiet")
    assert (judged.exit_code, judged.stdout) == (1, "")
    assert (kbsub("compare", STORED, "-q").exit_code, kbsub("compare", STORED, "-q").stdout) == (0, "")


@pytest.mark.parametrize("call", [("eval", "good.py"), ("gate", "good.py"), ("compare",), ("doctor",), ("bench",)])
def test_another_format_is_exit_2(call: tuple[str, ...]) -> None:
    assert kbsub(*call, "--format", "yaml").exit_code == 2


def test_doctor_clears_a_part_of_the_cache_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    for part in ("cells", "extensions"):
        (tmp_path / "kbsub" / part).mkdir(parents=True)
        (tmp_path / "kbsub" / part / "file").write_bytes(b"x" * 1000)
    (tmp_path / "kbsub" / "linked").symlink_to(outside)
    wrong = kbsub("doctor", "--clear", "cells", "--clear", "../outside")
    assert wrong.exit_code == 2 and "there are cells, extensions, linked" in " ".join(wrong.output.split())
    assert (tmp_path / "kbsub" / "cells" / "file").exists(), "a wrong call deletes nothing"
    assert kbsub("doctor", "--clear", "cells").exit_code == 0
    assert sorted(part.name for part in (tmp_path / "kbsub").iterdir()) == ["extensions", "linked"]
    assert kbsub("doctor", "--clear", "all").exit_code == 0
    assert not list((tmp_path / "kbsub").iterdir()) and (outside / "kept").exists()


def test_a_watch_sees_saves_and_not_a_file_that_is_away(tmp_path: Path) -> None:
    """Each pause does one thing to the file; a state is yielded when the file is there and another than before."""
    file = tmp_path / "mine.py"
    file.write_text("1")
    acts = [lambda: None, file.unlink, lambda: None, lambda: file.write_text("22"), lambda: file.write_text("333")]
    states = []

    def pause(seconds: float) -> None:
        acts.pop(0)()

    for count in SaveWatch([file], pause).saves():
        states.append((count, file.read_text()))
        if len(states) == 3:
            break
    assert states == [(1, "1"), (2, "22"), (3, "333")]
    assert not acts


def test_eval_watch_judges_again_after_a_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong first, then saved right: two judgements in one call, the second verdict only for the file that is right."""
    (folder / "good.py").write_text(GOOD.replace("min=0", "min=1"))
    saved = threading.Event()

    def pause(seconds: float) -> None:
        if saved.is_set():
            raise KeyboardInterrupt
        saved.set()
        (folder / "good.py").write_text(GOOD)

    monkeypatch.setattr(SaveWatch.__init__, "__defaults__", (pause,))
    judged = kbsub("eval", "good.py", "--task", "task.py", "--only", "official,oracle", "--watch")
    assert judged.exit_code == 0, judged.output
    ends = re.findall(r"good: (\w+) (\w+)", judged.output)
    assert ends == [("official", "INCORRECT_NUMERICAL"), ("official", "OK"), ("oracle", "OK")]
