"""Runs one judge function in a fresh child process, and turns whatever happens there into a Status.

This file knows processes, pipes and signals. It must not know KernelBench, torch or what a candidate is: the parent
imports nothing heavy, and the child imports only what its target function asks for.

How a result comes back. The child writes frames (process/result_frames.py) to a pipe of its own, never to stdout.
Whatever else lands in the pipe (a candidate that writes to every file descriptor it can find) matches no token and is
dropped. That does not stop a candidate that sets out to forge a frame: it shares the child's memory. A forged frame of
the wrong form costs the run its result, and the parent nothing.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kbsub.eval.process.printable import one_line, printable
from kbsub.eval.process.result_frames import Frames, digest_of
from kbsub.eval.process.tree import kill_everything, start_ticks

if TYPE_CHECKING:
    from kbsub.eval.process.cell import Cell, CellProcess

# Bounds the child's heap in bytes; for the CPU path only, because CUDA reserves far more address space than it uses.
MEMORY_LIMIT_VARIABLE = "KBSUB_MEMORY_LIMIT_BYTES"
_RUN_VARIABLE = "KBSUB_RUN"  # marks every descendant, so that one which left the process group is found again
_LOG_HEAD, _LOG_TAIL = 16 << 10, 48 << 10  # bytes of the child's output that are kept; the middle of a flood is not
_EXIT_GRACE_S = 10.0  # from the result frame to the end of the process
_NO_RESULT_CODE = 97  # the child could not write its result
_OUT_OF_MEMORY_TEXTS = ("out of memory", "can't allocate memory", "not enough memory", "memoryallocation", "bad_alloc")

Progress = Callable[[dict[str, Any]], None]


class Status(str, Enum):
    """What became of one run; the words of a result file."""

    OK = "OK"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    INCORRECT_SHAPE = "INCORRECT_SHAPE"
    INCORRECT_NUMERICAL = "INCORRECT_NUMERICAL"
    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    NOT_RUN = "NOT_RUN"
    NOT_CHECKED = "NOT_CHECKED"  # it ran, and could ask nothing, or next to nothing

    def __str__(self) -> str:
        return self.value


class JudgeFailure(Exception):
    """Raised by a judge to choose the status of its run; `value` is what it found out until then."""

    def __init__(self, status: Status, message: str, value: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.value = status, message, value


@dataclass(frozen=True)
class Outcome:
    """One finished run: `value` is the judge's dict, `log` the child's output (bounded), `seconds` its wall time.

    `confined`: of a run in a cell, what the child was confined by before its code began: {"level", "lacks", "why"}.
    All text of a child comes out printable (kbsub.eval.process.printable), whatever a candidate wrote.
    """

    status: Status
    value: dict[str, Any] | None
    message: str
    log: str
    seconds: float
    confined: dict[str, Any] | None = None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception, host or device, says that memory ran out (torch is not imported for it)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)


def describe_event(event: Mapping[str, Any]) -> str:
    """A progress event in words: {"stage": "trial", "index": 2, "seed": 7} -> "trial 2 (seed 7)"."""
    words = _few(event.get("stage", ""))
    for key in ("index", "case"):
        if key in event:
            words += f" {_few(event[key])}"
    return words + (f" (seed {_few(event['seed'])})" if "seed" in event else "")


def _few(value: object) -> str:
    """What an event says of one thing, on one line and not endless, whatever a candidate put there."""
    return one_line(str(value)[:200])


# ---- parent ----


class _BoundedLog:
    """The first and the last bytes of a stream; memory stays bounded however much a candidate prints."""

    def __init__(self) -> None:
        self.head, self.tail, self.total = bytearray(), bytearray(), 0

    def feed(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = _LOG_HEAD - len(self.head)
        self.head += chunk[:room] if room > 0 else b""
        self.tail += chunk[max(room, 0) :]
        if len(self.tail) > 4 * _LOG_TAIL:
            del self.tail[:-_LOG_TAIL]

    def text(self) -> str:
        tail = self.tail[-_LOG_TAIL:]
        dropped = self.total - len(self.head) - len(tail)
        gap = f"\n... {dropped} bytes dropped ...\n".encode() if dropped else b""
        return (bytes(self.head) + gap + bytes(tail)).decode("utf-8", "replace")


def run_isolated(
    target: str,
    payload: Mapping[str, Any],
    *,
    timeout_s: float,
    on_progress: Progress | None = None,
    env: Mapping[str, str] | None = None,
    cell: Cell | None = None,
    on_entered: Callable[[dict[str, Any]], None] | None = None,
) -> Outcome:
    """Run `target` ("package.module:function") on `payload` in a fresh `python -m kbsub.eval.process.isolated` child.

    The function is called as `function(payload, progress)`; payload and result must be JSON-able, and
    `progress(event)` calls `on_progress(event)` here. `env` adds to the environment. When `timeout_s` seconds are
    over, the whole process group is killed. Nothing that happens in the child raises here. With a `cell` the child runs
    confined, in an environment that has nothing of this process's but what the cell keeps, and `env`; a cell that
    cannot be entered is NOT_RUN. `on_entered` hears what Outcome.confined will say, when the child begins.
    """
    token = secrets.token_hex(16)
    started = time.monotonic()
    log, frames = _BoundedLog(), Frames(token, {status.value for status in Status}, on_progress)
    confined: dict[str, Any] | None = None
    inside: CellProcess | None = None
    receive, send = os.pipe()
    with tempfile.TemporaryFile() as order, selectors.DefaultSelector() as selector:
        # A file rather than a pipe: a child that dies before it reads can then not block the parent.
        order.write(json.dumps({"token": token, "target": target, "payload": dict(payload)}).encode())
        order.seek(0)
        # Safe path: the working directory is not importable in the child, as it is not in the `kbsub` command itself.
        variables = {**(env or {}), "PYTHONSAFEPATH": "1"}
        # What a candidate prints goes into a log of UTF-8: whatever the terminal's encoding, a print must not fail.
        variables["PYTHONIOENCODING"] = "utf-8:backslashreplace"
        interpreter = [sys.executable, "-u", "-X", "faulthandler"]
        # Inside a cell this process has no number; the cell's launcher watches it.
        watched = str(os.getpid()) if cell is None else "0"
        command = [*interpreter, "-m", "kbsub.eval.process.isolated", str(send), watched]
        pipes: dict[str, Any] = {"stdin": order, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            child: subprocess.Popen[bytes]
            if cell is not None:
                child = inside = cell.popen(command, env=variables, pass_fds=(send,), **pipes)
            else:
                variables = {**os.environ, **variables, _RUN_VARIABLE: token}
                child = subprocess.Popen(command, env=variables, pass_fds=(send,), start_new_session=True, **pipes)
        finally:
            os.close(send)
        started_ticks = start_ticks(child.pid)
        output = child.stdout
        assert output is not None  # stdout=PIPE above
        try:
            for descriptor, feed in ((receive, frames.feed), (output.fileno(), log.feed)):
                os.set_blocking(descriptor, False)
                selector.register(descriptor, selectors.EVENT_READ, feed)
            if inside is not None and (entered := inside.entered(timeout_s)) is not None:
                confined = entered.record()
                if on_entered is not None:
                    on_entered(confined)
            timed_out = _pump(child, selector, frames, started + timeout_s)
        finally:
            if cell is not None:
                cell.end(child)
            kill_everything(child, f"{_RUN_VARIABLE}={token}", started_ticks)
            _drain(selector)
            output.close()
            os.close(receive)
    seconds = time.monotonic() - started
    words = printable(log.text())
    if inside is not None and confined is None:
        message = f"the cell cannot be entered, so nothing was run: {inside.refusal}; see kbsub doctor"
        return Outcome(Status.NOT_RUN, None, printable(message), words, seconds)
    status, message = _verdict(child.returncode, frames, words, timed_out, timeout_s)
    value = frames.result["value"] if frames.result is not None and frames.broken is None else None
    return Outcome(status, value, message, words, seconds, confined)


def _pump(child: subprocess.Popen[bytes], selector: selectors.BaseSelector, frames: Frames, deadline: float) -> bool:
    """Read until the child has ended; True when the time was up first."""
    while child.poll() is None:
        now = time.monotonic()
        if now >= deadline:
            if frames.result is None:
                child.send_signal(signal.SIGUSR1)  # its faulthandler writes down where it hangs
                time.sleep(0.3)
            return frames.result is None
        # Short waits: a forked grandchild may hold the pipes open, so their end does not announce the child's.
        if selector.get_map():
            _read_ready(selector, min(deadline - now, 0.1))
        else:
            time.sleep(0.01)
        if frames.broken is not None:
            return False  # what it says from here on is worth nothing; the caller ends it
        if frames.result is not None:
            deadline = min(deadline, time.monotonic() + _EXIT_GRACE_S)
    return False


def _read_ready(selector: selectors.BaseSelector, wait_s: float) -> bool:
    """Hand on what is readable now; True when there was something."""
    progressed = False
    for key, _ in selector.select(wait_s):
        try:
            chunk = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            continue
        if chunk:
            key.data(chunk)
            progressed = True
        else:
            selector.unregister(key.fd)
    return progressed


def _drain(selector: selectors.BaseSelector) -> None:
    """What the dead child left in the pipes; bounded, should somebody unkillable still be writing."""
    end = time.monotonic() + 2.0
    while selector.get_map() and time.monotonic() < end and _read_ready(selector, 0):
        continue


def _verdict(code: int, frames: Frames, log: str, timed_out: bool, timeout_s: float) -> tuple[Status, str]:
    """Status and message from the exit code, the frames and the log of an ended child."""
    where = f" in {describe_event(frames.last_event)}" if frames.last_event else ""
    if frames.broken is not None:
        return Status.CRASHED, f"the child sent a frame that is none{where}: {frames.broken}"
    if frames.result is not None:
        return Status(frames.result["status"]), frames.result["message"]
    if timed_out:
        return Status.TIMEOUT, f"TIMEOUT after {timeout_s:g} s{where}"
    if code == -signal.SIGKILL:
        return Status.OUT_OF_MEMORY, f"killed by SIGKILL{where}: the system's out-of-memory killer, most likely"
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if code == -signal.SIGABRT and "bad_alloc" in log:
            return Status.OUT_OF_MEMORY, f"std::bad_alloc{where}"
        return Status.CRASHED, f"died of {name}{where}"
    if code == _NO_RESULT_CODE:
        return Status.CRASHED, f"the result pipe was closed{where}: a candidate closes only what it opened"
    return Status.CRASHED, f"the process ended with exit code {code}{where}, before there was a result"


# ---- child ----


def _short(error: BaseException) -> str:
    """An exception on one line, without the C++ stack that torch may append."""
    text = str(error).split("\nCUDA kernel errors might")[0].split("\nException raised from")[0].strip()
    text = re.sub(r"\s*\n\s*", " | ", text)
    return f"{type(error).__name__}: {text}"[:2000]


def _judge(target: str, payload: dict[str, Any], progress: Progress) -> tuple[Status, dict[str, Any] | None, str]:
    """Call the target; every way it can end, short of the process ending, as (status, value, message)."""
    try:
        module, _, function = target.partition(":")
        value = getattr(importlib.import_module(module), function)(payload, progress)
        json.dumps(value)
        return Status.OK, value, ""
    except JudgeFailure as failure:
        traceback.print_exc()
        return failure.status, failure.value, failure.message
    except SystemExit as exit_:
        traceback.print_exc()
        return Status.CRASHED, None, f"the candidate called sys.exit({exit_.code!r})"
    except BaseException as error:  # KeyboardInterrupt and GeneratorExit can be raised by a candidate, too
        traceback.print_exc()
        return (Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR), None, _short(error)


def _settle(leave: Callable[[int], Any]) -> tuple[int, IO[bytes]]:
    """Make this process a well-behaved child: no importable working directory, dies with its parent, first to be
    taken by the out-of-memory killer, stdin read once and then empty. Returns the result pipe and the order."""
    import faulthandler

    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # Python 3.10 does not know PYTHONSAFEPATH
    order = os.fdopen(os.dup(0), "rb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)  # compilers that a candidate starts must not hold it open
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if int(sys.argv[2]) not in (0, os.getppid()):
            leave(_NO_RESULT_CODE)  # the parent was gone before the line above
        try:
            Path("/proc/self/oom_score_adj").write_text("1000")
        except OSError:
            pass  # a container may forbid it; the parent then takes its chances
    limit = os.environ.get(MEMORY_LIMIT_VARIABLE)
    if limit:
        import resource

        # Private writable memory, not address space: mapped libraries and reservations do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
    return pipe, order


def main() -> None:
    """The child: read the order from stdin, call the target, write one result frame, end."""
    leave, write = os._exit, os.write  # taken before a candidate can replace them
    pipe, order = _settle(leave)
    for stream in (sys.stdout, sys.stderr):  # a print of any text must not raise, whatever the locale of this machine
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    with order:
        request = json.load(order)
    prefix = b"\n" + request["token"].encode() + b" "

    def send(message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        frame = memoryview(prefix + digest_of(body) + b" " + body + b"\n")
        try:
            while frame:
                frame = frame[write(pipe, frame) :]
        except OSError:
            traceback.print_exc()
            leave(_NO_RESULT_CODE)

    def progress(event: dict[str, Any]) -> None:
        send({"kind": "progress", "event": event})

    status, value, message = _judge(request["target"], request["payload"], progress)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # a candidate closed or replaced them; its verdict does not depend on its prints
    send({"kind": "result", "status": status.value, "value": value, "message": message})
    leave(0)  # not sys.exit: threads, exit handlers or a broken CUDA context of the candidate cannot hold us up


if __name__ == "__main__":
    # Under -m this file is `__main__`; judges raise the JudgeFailure of the imported module, so run that one.
    from kbsub.eval.process.isolated import main as imported_main

    imported_main()
