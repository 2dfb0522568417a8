"""How a worker's process ended, in words. Must not know what it was asked."""

from __future__ import annotations

import contextlib
import signal
import subprocess

from kbsub.eval.process.isolated import Status

_END_S = 5.0


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
