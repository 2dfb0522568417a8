"""What a command prints: paths as they are, in any encoding; and pictures under any MPLBACKEND."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
from rich.console import Console
from rich.table import Table as RichTable

from kbsub.adapters import checkout
from kbsub.adapters.task import load_local_task
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.report import plots
from kbsub.eval.report.console import PlainConsole
from kbsub.eval.report.tables import Table
from kbsub.eval.report.terminal import explanations
from kbsub.eval.run.runner import Plan, Row
from support import warm
from support.paths import TESTS

REFERENCE = TESTS / "support" / "small_layer_norm_task" / "reference.py"
# Raises words that no byte stands for, and some that latin-1 has. Its own docstring: "Wörter."
NOT_ASCII = '''"""Wörter."""
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()

    def forward(self, x):
        print("größer \u884c")
        raise ValueError("Größe passt nicht \u2013 \u884c \u03bb")
'''
NAMES = ("out[red]", "a[/]b", "[bold]x", "tag:smile:", "glob*?[0-9]", "x" * 200, "back\\slash[x]")


def printed(*objects, width=80, **options) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=width, emoji=False).print(*objects, **options)
    return file.getvalue()


@pytest.mark.parametrize("name", NAMES)
def test_a_path_is_printed_as_it_is(name):
    assert (
        printed(f"written to /tmp/{name}/level1_40.json", style="yellow") == f"written to /tmp/{name}/level1_40.json\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_name_in_a_table_is_printed_as_it_is(name):
    """A result file's path heads a column of `kbsub compare`; a title holds a task's name."""
    table = Table(f"title {name}", ["program", f"/tmp/{name}"], [[name, "1"]], [f"note {name}"])
    flat = "".join(character for character in printed(table.rich(), width=1000) if character not in "\n ")
    assert flat.count(name) == 4


def test_renderables_keep_their_colours():
    table = RichTable("status")
    table.add_row("[red]CRASHED[/red]")
    assert "[red]" not in printed(table) and "CRASHED" in printed(table)


def test_a_plain_rich_console_does_eat_brackets():
    """Without this the tests above would prove nothing."""
    file = io.StringIO()
    Console(file=file).print("written to some/out[red]/x")
    assert "[red]" not in file.getvalue()


def test_a_command_to_copy_is_quoted_for_the_shell(tmp_path):
    file = tmp_path / "glob *[0-9].py"
    row = Row(file, "x", {}, {"official": Outcome(Status.TIMEOUT, None, "TIMEOUT after 3 s", "", 3.0)})
    assert f"kbsub eval '{file}' --only official" in explanations([row])[0]


# ---- whole commands ----


def kbsub(*arguments: str, encoding: str = "utf-8", **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding, **variables}
    command = [sys.executable, "-m", "kbsub.eval.cli", *arguments]
    if arguments[0] not in ("eval", "gate"):
        return subprocess.run(command, env=environment, capture_output=True, timeout=120)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as words:  # these two start children with torch
        code = warm.start(command, env=environment, stdout=out, stderr=words).wait(120)
        said = [file.seek(0) or file.read() for file in (out, words)]
    return subprocess.CompletedProcess(command, code, *said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder whose name is markup and a glob pattern, with a task and a candidate that says things beyond ASCII."""
    folder = tmp_path_factory.mktemp("work") / "a [red]b[0-9]*"
    folder.mkdir()
    shutil.copy(REFERENCE, folder / "small.py")
    (folder / "wörter.py").write_text(NOT_ASCII, "utf-8")
    return folder


# command line (FOLDER is the folder), exit code
COMMANDS = {
    "eval": (
        ["eval", "FOLDER/wörter.py", "--task", "FOLDER/small.py", "--only", "official", "--out", "FOLDER/o.json"],
        1,
    ),
    "gate": (["gate", "FOLDER/wörter.py", "--task", "FOLDER/small.py", "--require", "official"], 1),
    "verify": (["verify", "FOLDER/wörter"], 2),
    "compare": (["compare", "FOLDER/wörter.json"], 2),
    "report": (["report", "--root", "FOLDER"], 2),
    "doctor": (["doctor"], 0),
    "help": (["--help"], 0),
    "help of eval": (["eval", "--help"], 0),
}


@pytest.mark.parametrize(
    ("command", "encoding"), [*((command, "ascii") for command in COMMANDS), ("eval", "latin-1"), ("gate", "latin-1")]
)
def test_no_command_fails_over_its_own_words(folder, command, encoding):
    arguments, code = COMMANDS[command]
    done = kbsub(*(each.replace("FOLDER", str(folder)) for each in arguments), encoding=encoding)
    assert b"UnicodeEncodeError" not in done.stderr and done.returncode == code, done.stderr[-2000:]


def test_a_print_of_a_candidate_does_not_depend_on_the_terminal(folder, tmp_path):
    """It goes into a log; under PYTHONIOENCODING=ascii the print failed, and with it the candidate."""
    out = tmp_path / "out.json"
    arguments = [str(folder / "wörter.py"), "--task", str(folder / "small.py"), "--only", "official", "--out", str(out)]
    done = kbsub("eval", *arguments, encoding="ascii")
    text = out.read_text("utf-8")
    assert "Größe passt nicht" in text and "UnicodeEncodeError" not in text, done.stderr


def test_a_whole_command_names_its_paths_as_they_are(folder):
    out = folder / "o[x].json"
    arguments = [str(folder / "wörter.py"), "--task", str(folder / "small.py"), "--only", "official", "--out", str(out)]
    done = kbsub("eval", *arguments)
    assert f"written to {out}" in done.stdout.decode(), done.stdout.decode()


@pytest.mark.parametrize("name", ["run[0-9]", "[x]", "*"])
def test_a_run_folder_may_be_called_anything(tmp_path, name):
    runs = tmp_path / name
    runs.mkdir()
    (runs / "level_1_problem_40_sample_0_kernel.py").write_text('CUDA_SOURCE = ""\nclass ModelNew: ...\n')
    done = kbsub("eval", str(runs), "--device", "cuda")
    assert done.returncode in (0, 3), done.stderr
    done = kbsub("eval", str(runs))
    assert b"1 rows, 0 failed" in done.stdout, done.stdout + done.stderr


def test_what_a_killed_fetch_left_is_found_beside_any_name(tmp_path, monkeypatch):
    target = tmp_path / "kb[1]"
    left = tmp_path / ".kb[1].fetch-old"
    left.mkdir()
    monkeypatch.setattr(checkout, "_clone_commit", lambda *given: (_ for _ in ()).throw(OSError("no network")))
    with pytest.raises(checkout.CheckoutError):
        checkout._fetch_locked("nowhere", target, "0" * 40, 1.0, lambda words: None)
    assert not left.exists()


# ---- pictures ----

DRAW = """
import sys
from pathlib import Path
from kbsub.eval.report import plots
plots.draw({"title": "t"}, lambda figure, data: plots._axes(figure, data), Path(sys.argv[1]), (3, 2))
"""


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.backend_inline", "nonsense", "TkAgg", "agg"])
def test_pictures_are_drawn_whatever_mplbackend_says(tmp_path, backend):
    """A notebook leaves its own to every process it starts."""
    pytest.importorskip("matplotlib", reason="matplotlib: pip install 'kb-submissions[plots]'")
    target = tmp_path / "picture.png"
    variables = {**os.environ, "MPLBACKEND": backend}
    done = subprocess.run([sys.executable, "-c", DRAW, str(target)], env=variables, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert plots.stored_digest(target) == plots.data_digest({"title": "t"})


def test_the_variable_is_left_to_the_caller(monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib: pip install 'kb-submissions[plots]'")
    monkeypatch.setenv("MPLBACKEND", "TkAgg")
    plots._matplotlib()
    assert os.environ["MPLBACKEND"] == "TkAgg"


def test_the_command_to_copy_repeats_the_task_and_the_device(tmp_path):
    row = Row(tmp_path / "a b.py", "x", {}, {"stress": Outcome(Status.CRASHED, None, "died", "", 3.0)})
    task = load_local_task(TESTS / "support" / "small_layer_norm_task" / "reference.py")
    plan = Plan(task, "my task.py", (), ("stress",), "fp32", "cuda:1", None, 1.0)
    assert "--task 'my task.py' --device cuda:1 --only stress" in explanations([row], plan)[0]
