"""A candidate's worker as a thread of the test's own process: the same requests and replies, no process to start.

Only for files that a test wrote itself: nothing confines them here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

import pytest

from kbsub.eval.process.cell import Confinement
from kbsub.eval.process.frames import Channel, FrameError
from kbsub.eval.remote.worker import FOREVER_S, REQUEST_LIMIT, Session, serve

_CONFINEMENT = Confinement("unconfined", ("a thread of the test's own process",))


class _Child:
    """What Worker asks of a process."""

    returncode = 0
    refusal = ""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread

    def entered(self, timeout_s: float = 0.0) -> Confinement:
        return _CONFINEMENT

    def poll(self) -> int | None:
        return None if self.thread.is_alive() else 0

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        return 0

    def send_signal(self, number: int) -> None:
        """A thread gets none."""


class ThreadedCell:
    """Stands for kbsub.eval.process.cell.Cell."""

    def __init__(self, folder: object = None, **more: object) -> None:
        pass

    def popen(self, command: list[str], *, pass_fds: tuple[int, ...], **more: Any) -> _Child:
        thread = threading.Thread(target=_serve, args=(os.dup(pass_fds[0]),), daemon=True)
        thread.start()
        return _Child(thread)

    def end(self, child: _Child) -> None:
        """The thread ends when the other side closes its channel."""

    def confinement(self) -> Confinement:
        return _CONFINEMENT


def _serve(descriptor: int) -> None:
    channel = Channel(socket.socket(fileno=descriptor), REQUEST_LIMIT)
    with contextlib.suppress(FrameError, OSError):
        channel.send({"ready": True}, FOREVER_S)
        serve(Session(channel), channel)


@pytest.fixture
def threaded_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate of the suite and of the identity judge lives in a thread."""
    monkeypatch.setattr("kbsub.eval.suite.confined.Cell", ThreadedCell)
    monkeypatch.setattr("kbsub.eval.verdicts.identity.judge.Cell", ThreadedCell)
