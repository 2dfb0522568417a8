"""Reads the frames that a child process sends its parent, and refuses what is no frame.

A frame is one line: a token that is new for each run, a digest, and JSON. A candidate shares its child's memory, so
even a line with the right token and digest may hold anything: everything that follows may rely on what is checked here.
Knows bytes and JSON. Must not know processes, nor what a result means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from typing import Any

from kbsub.adapters.printable import printable

FRAME_LIMIT = 16 << 20  # bytes of one line: some four times the largest result file so far, which holds all rows
TOTAL_LIMIT = 256 << 20  # bytes of one run's frames
DEPTH_LIMIT = 32  # of lists and dicts in each other; results have about ten
_INTEGER_LIMIT = 1 << 64  # seeds and hashes fit; a larger integer cannot be turned into a float

# What reading an event or a value of the wrong shape raises. Real failures (a full disk) are none of these.
SHAPE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class FrameError(ValueError):
    """A line has this run's token and digest, but is no frame; the text says what is wrong."""


def digest_of(body: bytes) -> bytes:
    """16 hex digits that a frame carries before its JSON."""
    return hashlib.sha256(body).hexdigest()[:16].encode()


class Frames:
    """Picks one run's frames out of the result pipe and keeps the last result and the last progress event.

    `broken`: why the child cannot be believed any more, or None; nothing that comes after it is read. `statuses`: the
    words that a result may give. `on_progress` may raise SHAPE_ERRORS for an event that it cannot use: that, too, is
    the child's fault. Text comes out printable (kbsub.adapters.printable).
    """

    def __init__(
        self, token: str, statuses: Collection[str], on_progress: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self.prefix = token.encode() + b" "
        self.statuses = statuses
        self.on_progress = on_progress
        self.buffer = bytearray()
        self.total = 0
        self.result: dict[str, Any] | None = None
        self.last_event: dict[str, Any] | None = None
        self.broken: str | None = None

    def feed(self, chunk: bytes) -> None:
        """More bytes of the pipe."""
        if self.broken is not None:
            return
        self.buffer += chunk
        if b"\n" not in chunk:
            if len(self.buffer) > FRAME_LIMIT:
                self._too_long()
            return
        *lines, rest = bytes(self.buffer).split(b"\n")
        self.buffer = bytearray(rest)
        for line in lines:
            if self.broken is None and line.startswith(self.prefix):
                self._line(line)

    def _too_long(self) -> None:
        if self.buffer.startswith(self.prefix):
            self.broken = f"longer than {FRAME_LIMIT} bytes"
        self.buffer.clear()

    def _line(self, line: bytes) -> None:
        digest, _, body = line[len(self.prefix) :].partition(b" ")
        if digest != digest_of(body):
            return
        self.total += len(line)
        try:
            if len(line) > FRAME_LIMIT or self.total > TOTAL_LIMIT:
                raise FrameError(f"longer than {FRAME_LIMIT} bytes, or all of them longer than {TOTAL_LIMIT}")
            message = read_frame(body, self.statuses)
            if message["kind"] == "result":
                self.result = message
                return
            self.last_event = message["event"]
            if self.on_progress is not None:
                self.on_progress(message["event"])
        except SHAPE_ERRORS as error:
            words = str(error) if isinstance(error, FrameError) else f"{type(error).__name__}: {str(error)[:200]}"
            self.broken = printable(words)


def read_frame(body: bytes, statuses: Collection[str]) -> dict[str, Any]:
    """{"kind": "result", status, message, value} or {"kind": "progress", event}, checked. Raises FrameError.

    NaN and the infinities are floats, as Python's json writes them.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FrameError(f"no JSON: {type(error).__name__}") from error
    message = checked(message)
    kind = message.get("kind") if isinstance(message, dict) else None
    if kind == "progress":
        if set(message) != {"kind", "event"} or not isinstance(message["event"], dict):
            raise FrameError("a progress frame without an event")
    elif kind == "result":
        if set(message) != {"kind", "status", "message", "value"}:
            raise FrameError("a result frame with other keys than status, message and value")
        if not isinstance(message["status"], str) or message["status"] not in statuses:
            raise FrameError("a result frame with an unknown status")
        if not isinstance(message["message"], str) or not isinstance(message["value"], (dict, type(None))):
            raise FrameError("a result frame whose message or value has the wrong type")
    else:
        raise FrameError("its kind is neither result nor progress")
    return message  # type: ignore[no-any-return]


def checked(value: Any, depth: int = 0) -> Any:
    """A value that came out of JSON, with printable text and keys; FrameError when it is too deep or too large."""
    if depth > DEPTH_LIMIT:
        raise FrameError(f"more than {DEPTH_LIMIT} levels deep")
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(key): checked(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [checked(item, depth + 1) for item in value]
    if isinstance(value, int) and abs(value) > _INTEGER_LIMIT:
        raise FrameError("an integer of more than 64 bits")
    return value
