"""The Python interface, and the three scripts of examples/ as a user runs them: judge one, gate a branch, compare."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kbsub.adapters.task import TaskError
from kbsub.eval import gate, judge
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(16, 16)]
def get_init_inputs():
    return []
"""
GOOD = (
    "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.clamp(x, min=0)\n"
)
WRONG = GOOD.replace("min=0)", "min=0) + 0.01")
SAMPLES = {
    "good_1.py": (GOOD, "OK"),
    "good_2.py": (GOOD.replace("torch.clamp(x, min=0)", "torch.relu(x)"), "OK"),
    "good_3.py": (GOOD.replace("torch.clamp(x, min=0)", "(x + x.abs()) / 2"), "OK"),
    "wrong_1.py": (WRONG, "INCORRECT_NUMERICAL"),
    "wrong_2.py": (GOOD.replace("torch.clamp(x, min=0)", "x"), "INCORRECT_NUMERICAL"),
    "shape.py": (GOOD.replace("min=0)", "min=0)[:1]"), "INCORRECT_SHAPE"),
    "syntax.py": (GOOD.replace("self, x):", "self, x)"), "COMPILE_ERROR"),
    "no_model.py": ("x = 1\n", "COMPILE_ERROR"),
    "raises.py": (GOOD.replace("torch.clamp(x, min=0)", "x.nothing()"), "RUNTIME_ERROR"),
    "exits.py": ("import os\n" + GOOD.replace("return", "os._exit(3)\n        return"), "CRASHED"),
    "needs_gpu.py": ("import cupy\n" + GOOD, "NOT_RUN"),
    "not_text.py": ("\xff", "COMPILE_ERROR"),
}  # fmt: skip


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def test_importing_it_is_light() -> None:
    """`import kbsub.eval` costs no torch, no pydantic; asking for judge costs no torch."""
    code = "import sys, kbsub.eval; early = 'pydantic' in sys.modules; kbsub.eval.judge; "
    code += "print(early, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_a_verdict_in_five_lines(folder: Path) -> None:
    verdict = judge("good.py", "task.py", only=("official",), out=folder / "r.json")
    assert verdict.ok and not verdict.certified
    assert list(verdict.rows) == ["good"] and str(verdict.rows["good"].status) == "OK"
    assert str(verdict).startswith("good: OK (a local check on the CPU")
    assert (folder / "r.json").exists()


def test_wrong_arguments_are_exceptions_and_a_bad_file_is_a_row(folder: Path) -> None:
    with pytest.raises(ValueError, match="no such verdict"):
        judge("good.py", "task.py", only=("speed",))
    with pytest.raises(TaskError, match="no such candidate file"):
        judge("none.py", "task.py")
    with pytest.raises(ValueError, match="no such GPU"):
        judge("good.py", "task.py", device="cuda:77")
    (folder / "bad.py").write_text("class ModelNew(:\n")
    assert not judge([folder / "bad.py"], folder / "task.py", only=("official",)).ok
    assert gate("bad.py", "task.py", require=("official",)).exit_code == 1


def test_judge_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert example("judge_one_file").main("good.py", "task.py") == 0
    said = capsys.readouterr().out
    assert "stress: OK" in said and "no official verdict on this machine" in said


@pytest.mark.skipif(not Path("/usr/bin/git").exists(), reason="git: the example asks it what changed")
def test_gate_a_pull_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a branch that adds one file and leaves another alone, the added one is judged, and annotated on its line."""

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *arguments], check=True, capture_output=True)

    (folder / "kernels").mkdir()
    (folder / "kernels" / "old.py").write_text("class ModelNew(:\n")
    git("init", "-q", "-b", "main")
    git("add", ".")
    git("commit", "-qm", "base")
    git("checkout", "-qb", "branch")
    assert example("gate_pull_request").main("main", "kernels", "task.py") == 0
    (folder / "kernels" / "new.py").write_text(GOOD.replace("self, x):", "self, x)"))
    git("add", ".")
    git("commit", "-qm", "a kernel")
    assert example("gate_pull_request").main("main", "kernels", "task.py") == 1
    said = capsys.readouterr().out
    assert "::error file=kernels/new.py,line=3," in said and "old.py" not in said


@pytest.mark.slow
def test_compare_a_folder_of_12_mixed_samples(folder: Path) -> None:
    pytest.importorskip("pandas")
    (folder / "samples").mkdir()
    for name, (text, _) in SAMPLES.items():
        (folder / "samples" / name).write_bytes(text.encode("latin-1"))
    assert example("compare_folder").main("samples", "task.py", "report") == 0
    with (folder / "report" / "rows.csv").open() as file:
        rows = {row["candidate"]: row["status"] for row in csv.DictReader(file)}
    assert rows == {Path(name).stem: status for name, (_, status) in SAMPLES.items()}
    page = (folder / "report" / "leaderboard.md").read_text()
    assert "12 candidates" in page and "nothing official" in page
    assert page.count("\n| ") == 13


def test_a_frame_has_a_row_a_candidate(folder: Path) -> None:
    pandas = pytest.importorskip("pandas")
    (folder / "bad.py").write_text("class ModelNew(:\n")
    frame = judge(["good.py", "bad.py"], "task.py", only=("official",)).frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.index) == ["good", "bad"]
    assert list(frame["status"]) == ["OK", "COMPILE_ERROR"]
