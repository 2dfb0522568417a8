"""`kbsub fetch` as typed: exit codes, and what it tells a person. Every source here is a folder that is not there."""

from __future__ import annotations

import shutil

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KERNELBENCH_DIR", raising=False)
    return tmp_path


def fetch(*arguments: str):
    return CliRunner().invoke(app, ["fetch", *arguments])


def test_a_failure_is_exit_1_with_the_reason_and_the_way_out(empty_cache):
    done = fetch("--from", str(empty_cache / "absent"))
    assert done.exit_code == 1
    assert "could not get commit" in done.output and "kbsub fetch --from PATH_OR_URL" in done.output


def test_best_effort_says_what_is_lost_and_goes_on(empty_cache):
    done = fetch("--best-effort", "--from", str(empty_cache / "absent"))
    assert done.exit_code == 0
    assert "could not get commit" in done.output and "nothing official can be certified" in done.output


@pytest.mark.kernelbench
def test_from_a_copy_on_disk_then_again(empty_cache, kernelbench):
    first = fetch("--from", str(kernelbench.path))
    second = fetch("--from", str(kernelbench.path))
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert "fetched and verified" in first.output and "already there" in second.output


@pytest.mark.kernelbench
def test_best_effort_is_content_with_the_checkout_that_is_named(empty_cache, kernelbench, monkeypatch):
    monkeypatch.setenv("KERNELBENCH_DIR", str(kernelbench.path))
    done = fetch("--best-effort", "--from", str(empty_cache / "absent"))
    assert done.exit_code == 0 and "(verified)" in done.output
    assert not (empty_cache / "cache").exists(), "nothing was fetched"


@pytest.mark.kernelbench
def test_a_damaged_cache_is_mended_and_said_so(empty_cache, kernelbench):
    fetch("--from", str(kernelbench.path))
    (cached,) = (empty_cache / "cache" / "kbsub").glob("KernelBench-*")
    shutil.rmtree(cached / "scripts")
    done = fetch("--from", str(kernelbench.path))
    assert done.exit_code == 0 and "replaced: " in done.output and "scripts/" in done.output
