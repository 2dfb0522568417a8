"""Children that start in milliseconds: forked from a server that has torch imported, outside any cell.

For tests of what a judge says of a candidate: the fixture `warm_children`, or `run_forked` for a judge in a process of
its own. Everything but the start is the product's: the protocol, the pipes, the shared memory, how an end is
understood. What confines a child is tested with the real thing, in tests/process, tests/remote and tests/run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

import pytest

from kbsub.eval.process import isolated
from kbsub.eval.process.cell import CACHE_VARIABLES, Cell, Confinement
from support.paths import child_path

PRELOAD = [
    "torch",
    "torch._dynamo",  # torch.manual_seed imports it, a second each time
    "kbsub.eval.verdicts.guards.run",
    "kbsub.eval.verdicts.guards.inside",
    "kbsub.eval.verdicts.identity.judge",
    "kbsub.eval.verdicts.official.judge",
    "kbsub.eval.suite.judge",
    "kbsub.eval.suite.batch",
    "kbsub.eval.remote.worker",
    "kbsub.eval.host_executor",
    "kbsub.eval.operators.layer_norm.operator",
    "kbsub.eval.bench.child",
    "kbsub.eval.measure.children.sweep_child",
    "kbsub.eval.run.task_size",
    "kbsub.adapters.environment",
    "support.warm",  # this module, for the first words of each child
]
UNCONFINED = Confinement("unconfined", ("a test's child, forked from a server",))
COLD = {
    (place, name): getattr(place, name)
    for place, name in ((isolated, "subprocess"), (Cell, "popen"), (Cell, "end"), (Cell, "confinement"))
}
F_SETSIG = 10  # Linux; fcntl has no name for it before Python 3.13


class WarmChild:
    """What callers use of CellProcess, of a process that the server forked."""

    refusal = ""

    def __init__(self, process: Any, stdout: Any, leash: Any) -> None:
        self.process, self.pid, self.stdout = process, process.pid, stdout
        self.leash = leash  # an end of a pipe: the child is killed when it closes, as it is with this process

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.process.name, timeout or 0.0)
        return self.process.exitcode

    def entered(self, timeout_s: float = 60.0) -> Confinement:
        return UNCONFINED

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class _Descriptor:
    """A descriptor that the child gets with its orders, under a number of its own: there, the number is `detach()`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _as_it_is, (DupFd(self.number),)


def _as_it_is(value: Any) -> Any:
    return value


def _run(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    streams: list[Any],
    passed: dict[int, Any],
    up: Any,
    leash: Any,
) -> None:
    """The forked process: descriptors, environment and command line as an exec would have given them; then main()."""
    gc.freeze()  # a collection looks at what is the child's own only, and copies no page of the server's for it
    os.setsid()
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # as the launcher has it where a cell is not namespaces
    os.chdir(folder)
    fcntl.fcntl(leash.fileno(), fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(leash.fileno(), F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(leash.fileno(), fcntl.F_SETFL, os.O_ASYNC)
    for number, stream in enumerate(streams):
        os.dup2(os.open(os.devnull, os.O_RDWR) if stream is None else stream.detach(), number)
    given = {str(old): str(new.detach()) for old, new in passed.items()}
    os.environ.clear()
    os.environ.update(environment)
    at = command.index("-m") + 1
    sys.argv = [command[at], *(given.get(word, word) for word in command[at + 1 : at + 2]), *command[at + 2 :]]
    sys.path.insert(0, "")  # where `python -m` has the working directory; the child takes it away
    sys.stdin = sys.__stdin__ = open(0, closefd=False)
    encoding, _, errors = environment.get("PYTHONIOENCODING", "utf-8").partition(":")
    for name, number, mode in (("stdout", 1, errors or "strict"), ("stderr", 2, "backslashreplace")):
        stream = open(number, "w", encoding=encoding, errors=mode, buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    faulthandler.enable(file=sys.stderr)
    multiprocessing.process.current_process()._config["daemon"] = False  # a judge starts children of its own: these
    forkserver._forkserver.ensure_running = lambda: None  # come from the same server
    install(pytest.MonkeyPatch())
    up.send_bytes(b"1")
    up.close()
    importlib.import_module(command[at]).main()


def server() -> Any:
    """The multiprocessing context whose server has PRELOAD imported, one thread and this folder on its path."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**child_path(), "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        forkserver._forkserver.ensure_running()
    return context


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    pass_fds: Sequence[int] = (),
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = True,
) -> WarmChild:
    """`python ... -m MODULE words` in a forked process; the first word may be a descriptor of `pass_fds`."""
    context = server()
    output, written = os.pipe() if stdout == subprocess.PIPE else (None, stdout)
    wanted = (stdin, written, written if stderr == subprocess.STDOUT else stderr)
    numbers = [each.fileno() if hasattr(each, "fileno") else each for each in wanted]
    streams = [None if each in (None, subprocess.DEVNULL) else _Descriptor(each) for each in numbers]
    passed = {each: _Descriptor(each) for each in pass_fds}
    here, there = context.Pipe(duplex=False)
    held, leash = context.Pipe(duplex=False)
    orders = (list(command), dict(env), os.getcwd(), streams, passed, there, held)
    child = context.Process(target=_run, args=orders, daemon=True)
    child.start()
    there.close()
    held.close()
    if output is not None:
        os.close(written)
    with contextlib.suppress(EOFError), here:
        here.recv_bytes()  # from here on it has a session of its own, by which it is ended
    return WarmChild(child, None if output is None else open(output, "rb", buffering=0), leash)


def popen(cell: Cell, command: Sequence[str], *, env: Mapping[str, str] | None = None, **more: Any) -> WarmChild:
    """In the place of Cell.popen: the environment of a cell, and no cell."""
    for name in CACHE_VARIABLES.values():
        (cell.cache / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    return start(command, env=cell.environment(env or {}), **more)


def end(_: Cell, child: WarmChild, grace_s: float = 6.0) -> None:
    """In the place of Cell.end."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def without_cell(command: Sequence[str], *, env: Mapping[str, str], **more: Any) -> WarmChild:
    """In the place of run_isolated's Popen: the last word, the parent to watch, is the server here, so none."""
    return start([*command[:-1], "0"], env=env, **more)


def install(patch: pytest.MonkeyPatch) -> None:
    """From here on, judges' and candidates' processes are forked."""
    processes = SimpleNamespace(**{name: getattr(subprocess, name) for name in ("PIPE", "STDOUT", "TimeoutExpired")})
    patch.setattr(isolated, "subprocess", SimpleNamespace(**vars(processes), Popen=without_cell))
    patch.setattr(Cell, "popen", popen)
    patch.setattr(Cell, "end", end)
    patch.setattr(Cell, "confinement", lambda cell: UNCONFINED)


def uninstall(patch: pytest.MonkeyPatch) -> None:
    """As if `install` had not been called."""
    for (place, name), value in COLD.items():
        patch.setattr(place, name, value)


def run_forked(target: str, payload: Mapping[str, Any], folder: str, timeout_s: float = 60.0) -> dict[str, Any]:
    """What a judge returns that runs in a forked process, in `folder`; its own children are forked likewise.

    RuntimeError with the status and the judge's words when it returned nothing.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        install(patch)
        outcome = isolated.run_isolated(target, payload, timeout_s=timeout_s)
    if outcome.value is None:
        raise RuntimeError(f"{outcome.status}: {outcome.message}")
    return outcome.value
