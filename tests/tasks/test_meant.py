"""Which task a call means without --task: the files' header, name or folder, else level1_40, and that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kbsub.adapters.task import TaskError
from kbsub.eval import judge
from kbsub.eval.cli import app
from kbsub.eval.tasks.meant import meant_task, said_by
from support.paths import ROOT

FILE = "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(min=0)\n"
# The file's name and what stands above its text -> the task it says.
SAID: dict[tuple[str, str], str | None] = {
    ("mine.py", ""): None,
    ("mine.py", "# kbsub: task=level1_19\n"): "level1_19",
    ("mine.py", "#!/usr/bin/env python3\n\n# licence: MIT\n# kbsub: task = level2_7  \n"): "level2_7",
    ("mine.py", "\ufeff# kbsub: task=level1_19\r\n"): "level1_19",
    ("mine.py", '"""Docstring."""\n# kbsub: task=level1_19\n'): None,  # no header: it stands below something
    ("mine.py", "# kbsub: task=\n"): None,
    ("level_1_problem_36_mine.py", ""): "level1_36",
    ("level_1_problem_36_sample_0_kernel.py", "# kbsub: task=level1_36\n"): "level1_36",
    ("level_01_problem_036.py", ""): "level1_36",
}


@pytest.mark.parametrize(("name", "head"), SAID)
def test_a_file_says_its_task(tmp_path: Path, name: str, head: str) -> None:
    (tmp_path / name).write_text(head + FILE, "utf-8")
    assert said_by(tmp_path / name) == SAID[name, head]


def test_a_file_in_a_tasks_own_folder_is_of_that_task() -> None:
    files = [str(ROOT / "submissions" / "level1_39" / name) for name in ("normalize.py", "l2_order.py")]
    assert (meant_task("", files).task, meant_task("", files).note) == ("level1_39", "")
    assert meant_task("", [str(ROOT / "submissions" / "level1_40")]).note == "", "a folder of declared candidates"
    assert meant_task("", []).note == "" and meant_task("", ["reference_order"]).note == "", "names of the default task"


def test_a_named_task_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("# kbsub: task=level1_19\n" + FILE)
    found = meant_task("my_task.py", [str(tmp_path / "mine.py")])
    assert (found.task, found.note) == ("my_task.py", "")


WRONG = {
    "# kbsub: task=reference.py\n": "name a reference program of your own with --task",
    "# kbsub: task=level1_40\n": "level1_36 by its name, level1_40 by its header",
}


@pytest.mark.parametrize("head", WRONG)
def test_a_file_names_neither_a_program_nor_two_tasks(tmp_path: Path, head: str) -> None:
    """A candidate that names the program it is compared with would be right by its own word."""
    (tmp_path / "level_1_problem_36_mine.py").write_text(head + FILE)
    with pytest.raises(TaskError, match=WRONG[head]):
        meant_task("", [str(tmp_path / "level_1_problem_36_mine.py")])


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return "mine.py"


NOTE = "no --task: judged as level1_40; mine.py names no task"


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize("verb", [("eval", "--only", "official"), ("gate", "--require", "official")])
def test_a_file_that_says_nothing_is_judged_as_level1_40_and_that_is_said_twice(
    silent: str, verb: tuple[str, ...]
) -> None:
    """Before anything runs, and below the constructor's error that it explains."""
    said = CliRunner().invoke(app, [verb[0], silent, *verb[1:], "--size", "small"])
    assert said.exit_code == 1, said.output
    parts = said.output.split(NOTE)
    assert len(parts) == 3, said.output
    assert "takes 1 positional argument but 2 were given" in parts[1] and "given" not in parts[0]


@pytest.mark.usefixtures("warm_children")
def test_the_python_interface_asks_the_files_too(silent: str) -> None:
    found: Any = judge(silent, only=("source",))
    assert (found.result.task.problem_id, found.note[: len(NOTE)]) == (40, NOTE)
    assert str(found).startswith(NOTE)


@pytest.mark.parametrize("verb", [("bench", "--device", "cpu"), ("export", "--run-name", "mine"), ("gate",), ("eval",)])
def test_every_command_that_takes_files_asks_them(silent: str, verb: tuple[str, ...]) -> None:
    Path("two.py").write_text("# kbsub: task=level1_19\n" + FILE)
    said = CliRunner().invoke(app, [verb[0], silent, "two.py", *verb[1:]])
    assert said.exit_code == 2 and "the files are of several tasks (level1_19, level1_40)" in said.output, said.output
