"""The cache of compiled kernels under several processes: a build that ends elsewhere fails no build here."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.host_executor import build
from support import warm

module: Any = importlib.import_module("kbsub.eval.host_executor.build")
SOURCE = 'extern "C" __global__ void k(int* y) { y[0] = 43; }'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KBSUB_HOST_CACHE", str(tmp_path))
    return tmp_path


def test_a_draft_that_is_renamed_while_the_folder_is_read_is_no_entry(cache, monkeypatch):
    """The fault: 1 of 240 builds failed, because another's draft was gone between its name and its age."""
    for name in ("kernels-draft-gone", "kernels-here"):
        (cache / name).mkdir()
    listed = list(cache.iterdir())
    (cache / "kernels-draft-gone").rename(cache / "kernels-finished")
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(listed))
    module._prune(cache)
    assert (cache / "kernels-here").is_dir()


def test_pruning_still_takes_the_longest_unused(cache, monkeypatch):
    monkeypatch.setattr(module, "MAX_CACHED", 1)
    for age, name in enumerate(("oldest", "older", "newest")):
        (cache / name).mkdir()
        os.utime(cache / name, (10.0 * age, 10.0 * age))
    module._prune(cache)
    assert [entry.name for entry in cache.iterdir()] == ["newest"]


def test_half_an_entry_is_replaced_and_not_stumbled_over(cache):
    """What a pruning leaves that was interrupted, or that another process is just doing."""
    first = build.__wrapped__(SOURCE, ()).source_path.parent
    (first / "kernels.so").unlink()
    assert build.__wrapped__(SOURCE, ()).source_path.parent == first
    assert (first / "kernels.so").is_file()


def test_the_one_that_comes_second_uses_the_build_of_the_first(cache, monkeypatch):
    first = build.__wrapped__(SOURCE, ()).source_path.parent
    inode = (first / "kernels.so").stat().st_ino
    monkeypatch.setattr(module, "_taken", lambda final, stem: False)  # it looked before the first had finished
    assert build.__wrapped__(SOURCE, ()).source_path.parent == first
    assert (first / "kernels.so").stat().st_ino == inode
    assert not list(cache.glob("*-draft-*")), "its own draft is cleaned away"


def test_an_entry_that_is_taken_counts_as_used_before_anybody_prunes(cache, monkeypatch):
    """Found, then pruned by another process before it is loaded: the library would be gone."""
    first = build.__wrapped__(SOURCE, ()).source_path.parent
    os.utime(first, (0.0, 0.0))
    monkeypatch.setattr(module, "MAX_CACHED", 0)
    assert module._taken(first, "kernels")
    module._prune(cache)
    assert (first / "kernels.so").is_file()


def churn(folder: str, stop: Any) -> None:
    """What the end of a build does in a shared cache, as fast as it can: a draft appears and is renamed."""
    number = 0
    while not stop.is_set():
        final = Path(folder) / f"kernels-{os.getpid()}-{number}"
        Path(tempfile.mkdtemp(prefix="kernels-draft-", dir=folder)).rename(final)
        shutil.rmtree(final)
        number += 1


def test_pruning_beside_builds_that_end_raises_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    beside = [context.Process(target=churn, args=(str(tmp_path), stop), daemon=True) for _ in range(2)]
    for process in beside:
        process.start()
    try:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            module._prune(tmp_path)
    finally:
        stop.set()
        for process in beside:
            process.join(10)


def build_some(folder: str, number: int, failures: Any) -> None:
    os.environ["KBSUB_HOST_CACHE"] = folder
    for each in range(2):
        try:
            build(f'extern "C" __global__ void k{number}_{each}(int* y) {{ y[0] = {each}; }}', ())
            build(SOURCE, ())  # the same in every process
        except Exception as error:
            failures.put(f"{type(error).__name__}: {error}"[:300])


def test_processes_that_build_into_one_cold_cache_all_succeed(tmp_path):
    context = warm.server()  # the children have torch already
    failures = context.Queue()
    each = [context.Process(target=build_some, args=(str(tmp_path), n, failures)) for n in range(2)]
    for process in each:
        process.start()
    for process in each:
        process.join(120)
    assert [process.exitcode for process in each] == [0, 0]
    assert failures.empty(), failures.get()
