"""Runs a judge in a forked copy of a server process that has torch imported already: a fresh process in milliseconds.

For tests that need many processes. `run_isolated` and a cell are what the product uses; what differs here is the import
time, and that the processes which the judge starts are forked likewise, from the judge: they are in no cell.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from kbsub.eval.process.cell import Cell, Confinement

PRELOAD = [
    "torch",
    "torch._dynamo",
    "kbsub.eval.verdicts.guards.run",
    "kbsub.eval.verdicts.guards.inside",
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


UNCONFINED = Confinement("unconfined", ("a test's child, forked from a server",))


class Forked:
    """A forked process with the parts of CellProcess that are used."""

    refusal = ""

    def __init__(self, module: str, words: Sequence[str], env: Mapping[str, str], stdin: Any, stdout: Any) -> None:
        self.returncode: int | None = None
        read, write = os.pipe() if stdout == subprocess.PIPE else (None, None)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                if hasattr(stdin, "fileno"):
                    os.dup2(stdin.fileno(), 0)
                if write is not None:
                    os.dup2(write, 1)
                    os.dup2(write, 2)
                sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
                os.environ.update(env)
                sys.argv = [module, *words]
                sys.path.insert(0, os.devnull)  # a child takes the first entry away
                importlib.import_module(module).main()
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(1)
        if write is not None:
            os.close(write)
        self.stdout = None if read is None else os.fdopen(read, "rb")

    def entered(self, timeout_s: float = 60.0) -> Confinement:
        return UNCONFINED

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (60 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("forked", timeout or 60)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _popen(
    cell: Any, command: Sequence[str], *, env: Any = None, stdin: Any = None, stdout: Any = None, **_: Any
) -> Any:
    """Stands for Cell.popen: `python ... -m MODULE WORDS`, forked."""
    at = list(command).index("-m")
    return Forked(command[at + 1], command[at + 2 :], env or {}, stdin, stdout)


def _one(target: str, payload: dict[str, Any], folder: str, queue: Any) -> None:
    """The forked process: a result pipe named on the command line, as run_isolated's child has; its own folder."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    _, send = os.pipe()
    sys.argv = ["-m", str(send), str(os.getppid())]
    Cell.popen = _popen  # type: ignore[method-assign, assignment]
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
