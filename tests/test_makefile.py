"""What `make` would do on each kind of machine, read off `make --dry-run`: nothing is installed by these tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed here")


def dry_run(target: str, *settings: str, fake_driver: str | None = None, tmp_path: Path | None = None):
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "PYTHON", "DRIVER", "TORCH")}
    if fake_driver is not None and tmp_path is not None:
        tool = tmp_path / "bin" / "nvidia-smi"
        tool.parent.mkdir()
        tool.write_text(f"#!/bin/sh\necho '| Driver Version: 999.1   CUDA Version: {fake_driver} |'\n")
        tool.chmod(0o755)
        env["PATH"] = f"{tool.parent}:{env['PATH']}"
    command = ["make", "--dry-run", "--no-print-directory", target, *settings]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def installs(output: str) -> list[str]:
    return [line.split(" -m pip install -qq ")[1] for line in output.splitlines() if " -m pip install " in line]


CU128 = "--index-url 'https://download.pytorch.org/whl/cu128' 'torch>=2.9'"


def kept(venv: Path, extra: str) -> str:
    """The second install after one from TORCH_INDEX: constrained to that torch, or pip might swap the build."""
    return f"--constraint {venv}/torch.txt -e '.[test,{extra}]'"


@pytest.mark.parametrize(
    "driver, expected",
    [
        ("none", ["'torch==2.13.0' -e '.[test,cuda13]'"]),
        ("13", ["'torch>=2.9' -e '.[test,cuda13]'"]),
        ("12", [CU128, "KEPT"]),
    ],
)
def test_what_each_driver_installs(tmp_path, driver, expected):
    done = dry_run("setup", f"DRIVER={driver}", f"VENV={tmp_path / 'venv'}")
    want = [kept(tmp_path / "venv", "cuda12") if line == "KEPT" else line for line in expected]
    assert installs(done.stdout) == want, done.stdout + done.stderr


@pytest.mark.parametrize("printed, extra", [("13.0", "cuda13"), ("12.8", "cuda12")])
def test_the_driver_is_read_off_nvidia_smi(tmp_path, printed, extra):
    done = dry_run("setup", f"VENV={tmp_path / 'venv'}", fake_driver=printed, tmp_path=tmp_path)
    assert installs(done.stdout)[-1].endswith(f"'.[test,{extra}]'"), done.stdout + done.stderr


def test_a_driver_too_old_is_refused_with_the_way_out(tmp_path):
    done = dry_run("setup", f"VENV={tmp_path / 'venv'}", fake_driver="11.4", tmp_path=tmp_path)
    assert done.returncode != 0 and "DRIVER=none" in done.stderr


def test_torch_and_its_index_can_be_chosen(tmp_path):
    settings = ("DRIVER=none", f"VENV={tmp_path / 'venv'}", "TORCH=torch==2.11.0", "TORCH_INDEX=file:///wheels")
    done = dry_run("setup", *settings)
    first = "--index-url 'file:///wheels' 'torch==2.11.0'"
    assert installs(done.stdout) == [first, kept(tmp_path / "venv", "cuda13")], done.stdout + done.stderr


@pytest.mark.parametrize("target", ["eval", "test", "report", "lint"])
def test_each_target_does_the_set_up_once(tmp_path, target):
    venv = tmp_path / "venv"
    first = dry_run(target, "DRIVER=none", f"VENV={venv}")
    assert len(installs(first.stdout)) == 1, first.stdout + first.stderr
    (stamp,) = set(re.findall(rf"{re.escape(str(venv))}/\.ready-\d+", first.stdout))
    venv.mkdir()
    Path(stamp).touch()
    second = dry_run(target, "DRIVER=none", f"VENV={venv}")
    assert installs(second.stdout) == [], "a second run reinstalls nothing"
    third = dry_run(target, "DRIVER=none", f"VENV={venv}", "TORCH=torch==2.12.0")
    assert len(installs(third.stdout)) == 1, "another torch is installed"


@pytest.mark.parametrize("target", ["eval", "test", "report", "lint"])
def test_a_given_interpreter_is_used_and_nothing_installed(target):
    done = dry_run(target, "PYTHON=some-python")
    assert "pip install" not in done.stdout and "venv" not in done.stdout
    assert "some-python -m" in done.stdout, done.stdout + done.stderr


def test_a_given_interpreter_without_this_project_installed_finds_it(tmp_path):
    """The links that PYTHON= relies on spell out the import packages."""
    subprocess.run(["make", "--silent", "links"], cwd=ROOT, check=True)
    code = "import kbsub.adapters.pin, kbsub.eval; print(kbsub.eval.__path__[0])"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "build" / "types")}
    found = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert Path(found.stdout.strip()).resolve() == ROOT / "eval", found.stderr


def test_ci_runs_make_test():
    text = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK) and re.search(r"^exec make test\b", text, re.MULTILINE)
