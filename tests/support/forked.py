"""Runs a judge in a forked copy of a server process that has torch imported already: a fresh process in milliseconds.

For tests that need many processes. `run_isolated` is what the product uses; what differs here is only the import time.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from typing import Any

PRELOAD = [
    "torch",
    "torch._dynamo",
    "kbsub.eval.verdicts.guards.run",
    "kbsub.eval.verdicts.identity.judge",
    "kbsub.eval.verdicts.official.judge",
    "kbsub.eval.suite.judge",
    "kbsub.eval.suite.batch",
    "kbsub.eval.remote.worker",
    "kbsub.eval.bench.child",
    "kbsub.eval.measure.sweep_child",
    "kbsub.eval.run.task_size",
    "kbsub.adapters.environment",
]  # torch.manual_seed imports _dynamo, a second each time


def _one(target: str, payload: dict[str, Any], folder: str, queue: Any) -> None:
    """The forked process: a result pipe named on the command line, as run_isolated's child has; its own folder."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    _, send = os.pipe()
    sys.argv = ["-m", str(send), str(os.getppid())]
    module, _, function = target.partition(":")
    try:
        queue.put((True, getattr(importlib.import_module(module), function)(payload, lambda event: None)))
    except BaseException as error:
        queue.put((False, f"{type(error).__name__}: {error}"))


def run_forked(target: str, payload: dict[str, Any], folder: str, timeout_s: float = 60) -> dict[str, Any]:
    """The judge's dict; RuntimeError with its words when it raised, TimeoutError when it did not end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    queue = context.SimpleQueue()
    process = context.Process(target=_one, args=(target, payload, folder, queue), daemon=True)
    process.start()
    receiver = queue._reader  # SimpleQueue has no timeout of its own
    try:
        if not receiver.poll(timeout_s):
            raise TimeoutError(f"{target}: no result after {timeout_s:g} s")
        good, value = queue.get()
    finally:
        process.kill()
        process.join()
    if not good:
        raise RuntimeError(value)
    return value
