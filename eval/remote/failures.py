"""What can go wrong on the candidate's side, as exceptions of the judge's."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping

from kbsub.eval.process.frames import printable
from kbsub.eval.process.isolated import JudgeFailure, Status

_END_S = 5.0


class RemoteError(JudgeFailure):
    """Something that went wrong on the candidate's side; `status` is the row's."""


class WorkerFailure(RemoteError):
    """The process hung, died or sent what is no reply. It has been ended."""


class CandidateRaised(RemoteError):
    """An exception of the candidate's, told by its process: `type_name` and `text` are printable and bounded."""

    def __init__(self, status: Status, type_name: str, text: str) -> None:
        super().__init__(status, f"{type_name}: {text}" if type_name else text)
        self.type_name, self.text = type_name, text


class CandidateRefused(CandidateRaised, ValueError):
    """The candidate raised ValueError: it refuses this input."""


def raised(error: Mapping[str, str], op: str) -> CandidateRaised:
    """The exception that a worker told of, asked for `op`: {kind, type, text}, its word."""
    name, text, kind = printable(error["type"], 80), printable(error["text"]), error["kind"]
    if kind == "value":
        return CandidateRefused(Status.RUNTIME_ERROR, name, text)
    if kind == "load" and op == "start":
        return CandidateRaised(Status.COMPILE_ERROR, "", text)
    if kind == "exit":
        return CandidateRaised(Status.CRASHED, name, f"the candidate called sys.exit({text})")
    return CandidateRaised(Status.OUT_OF_MEMORY if kind == "memory" else Status.RUNTIME_ERROR, name, text)


def how_it_ended(child: subprocess.Popen[bytes], message: str) -> tuple[Status, str]:
    """Status and words for a process that is about to end or has ended; `message` where it does neither."""
    try:
        code = child.wait(_END_S)
    except subprocess.TimeoutExpired:
        return Status.CRASHED, message
    if code == -signal.SIGKILL:
        return Status.OUT_OF_MEMORY, "killed by SIGKILL: the system's out-of-memory killer, most likely"
    if code < 0:
        with contextlib.suppress(ValueError):
            return Status.CRASHED, f"died of {signal.Signals(-code).name}"
        return Status.CRASHED, f"died of signal {-code}"
    return Status.CRASHED, f"the process ended with exit code {code}, before it had answered"
