"""A run of the tests ends with what was skipped and why: a machine that certifies less must not look as good."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import util

from support.paths import TESTS

INI = "[pytest]\nmarkers =\n    gpu: x\n    kernelbench: x\n    slow: x\n"
SUITE = """
import pytest

@pytest.mark.gpu
@pytest.mark.parametrize("i", range(3))
def test_on_a_gpu(i): raise AssertionError("must not run")

@pytest.mark.kernelbench
def test_with_upstream(): raise AssertionError("must not run")

def test_with_the_fixture(kernelbench): raise AssertionError("must not run")

@pytest.mark.slow
def test_that_takes_long(): raise AssertionError("ran")

@pytest.mark.skip(reason="because of the weather")
def test_skipped(): raise AssertionError("must not run")

def test_that_runs(): assert True
"""
MODULE_SKIP = "import pytest\npytest.skip('no such library', allow_module_level=True)\n"
EXPECTED = (
    "   3 skipped  gpu: torch sees no NVIDIA GPU",
    "   2 skipped  kernelbench: no KernelBench checkout",
    "   1 skipped  because of the weather",
    "   1 skipped  no such library",
    "   1 skipped  slow: make test-all",
)


def run_of_suite(tmp_path, *options):
    """With a worker where there is pytest-xdist, as `make test` runs: the harder way, the reports travel."""
    workers = ["-n", "1"] if util.find_spec("xdist") else []
    shutil.copy(TESTS / "conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text(INI)
    (tmp_path / "test_some.py").write_text(SUITE)
    (tmp_path / "test_module.py").write_text(MODULE_SKIP)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "KERNELBENCH_"))}
    env |= {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "empty")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, *options]
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)


def test_every_skip_is_counted_under_its_reason(tmp_path):
    done = run_of_suite(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    tail = done.stdout.split("not certified by this run")[1]
    missing = [line for line in EXPECTED if line not in tail]
    assert not missing and "1 passed, 8 skipped" in tail, f"missing {missing} in:\n{tail}"


def test_slow_tests_run_when_asked_for(tmp_path):
    done = run_of_suite(tmp_path, "--slow")
    assert "test_that_takes_long - AssertionError: ran" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "slow: make test-all" not in done.stdout
