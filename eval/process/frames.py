"""Checked words between two processes that need not trust each other: length, JSON, and descriptors beside them.

A frame is four bytes of length and a JSON object, over a Unix stream socket; descriptors travel as SCM_RIGHTS. What
arrives is bounded in size, depth and time, has finite numbers and printable Unicode only, and has the declared form.
Never pickle: reading a frame executes nothing. Whatever is wrong is one exception. Must not know what frames mean.
"""

from __future__ import annotations

import array
import contextlib
import json
import math
import os
import select
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kbsub.eval.process.isolated import JudgeFailure, Status

FRAME_LIMIT = 1 << 20  # bytes of JSON
DEPTH_LIMIT = 40  # nested objects and arrays
TEXT_LIMIT = 4000  # characters of one message for a person
DESCRIPTOR_LIMIT = 4  # a frame
BUSY_S = 0.5  # the most that a busy channel waits without sleeping
INTEGER_LIMIT = 1 << 63
_HEAD = struct.Struct(">I")

# What a value must be: a type, a tuple of types (None for null), [schema] for a list, {"key": schema} for an object
# with exactly these keys ("key?" may be missing), or Any.
Schema = Any


class FrameError(JudgeFailure):
    """The other side sent something that is no frame, nothing in time, or is gone. The channel is of no more use."""


class Channel:
    """One end of a socket pair. `limit`: the most bytes of JSON that are accepted from the other side."""

    def __init__(self, end: socket.socket, limit: int = FRAME_LIMIT) -> None:
        self.socket, self.limit = end, limit
        self.buffer = bytearray()
        self.descriptors: list[int] = []
        self.busy = False  # wait without giving up the core: whoever sleeps wakes up the later, the longer he slept
        end.setblocking(False)

    def fileno(self) -> int:
        return self.socket.fileno()

    def close(self) -> None:
        self._drop_descriptors()
        self.socket.close()

    def send(self, message: Mapping[str, Any], timeout_s: float, descriptors: Sequence[int] = ()) -> None:
        """Send one frame. FrameError: TIMEOUT when the other side does not read, CRASHED when it is gone."""
        body = json.dumps(message, allow_nan=False).encode()
        rest = memoryview(_HEAD.pack(len(body)) + body)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        deadline = time.monotonic() + timeout_s
        while rest:
            try:
                sent = self.socket.sendmsg([rest], rights, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, timeout_s, "did not read what it was sent")
                continue
            except OSError as error:
                raise FrameError(Status.CRASHED, f"the other process is gone ({error.strerror})") from error
            rights, rest = [], rest[sent:]

    def receive(self, schema: Schema, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
        """The next frame, of the form `schema`, and the descriptors that came with it, which the caller closes.

        FrameError: TIMEOUT after `timeout_s` seconds, CRASHED for an end of the stream or a frame that is none.
        """
        deadline = time.monotonic() + timeout_s
        (length,) = _HEAD.unpack(self._take(_HEAD.size, deadline, timeout_s))
        if length > self.limit:
            raise self._broken(f"a frame of {length} bytes, of which at most {self.limit} are read")
        body = self._take(length, deadline, timeout_s)
        descriptors, self.descriptors = self.descriptors, []
        try:
            message = decode(body)
            check(message, schema)
        except ValueError as error:
            close_all(descriptors)
            raise self._broken(str(error)) from error
        return message, descriptors

    def _take(self, count: int, deadline: float, timeout_s: float) -> bytes:
        while len(self.buffer) < count:
            self._wait(select.POLLIN, deadline, timeout_s, "said nothing")
            try:
                chunk, rights, flags, _ = self.socket.recvmsg(
                    1 << 18, socket.CMSG_SPACE(4 * 2 * DESCRIPTOR_LIMIT), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                continue
            except OSError as error:
                raise FrameError(Status.CRASHED, f"the other process is gone ({error.strerror})") from error
            self._keep(rights)
            if flags & socket.MSG_CTRUNC or len(self.descriptors) > DESCRIPTOR_LIMIT:
                self._drop_descriptors()
                raise self._broken(f"more than {DESCRIPTOR_LIMIT} descriptors in a frame")
            if not chunk:
                where = "in the middle of a frame" if self.buffer else "without a word"
                raise FrameError(Status.CRASHED, f"the other process ended {where}")
            self.buffer += chunk
        taken = bytes(self.buffer[:count])
        del self.buffer[:count]
        return taken

    def _keep(self, rights: Sequence[tuple[int, int, bytes]]) -> None:
        for level, kind, data in rights:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
                self.descriptors += list(numbers)

    def _drop_descriptors(self) -> None:
        close_all(self.descriptors)
        self.descriptors = []

    def _wait(self, event: int, deadline: float, timeout_s: float, what: str) -> None:
        poll = select.poll()
        poll.register(self.socket, event)
        ends = time.monotonic() + BUSY_S if self.busy else 0.0
        while time.monotonic() < ends:
            if poll.poll(0):
                return
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(math.ceil(left * 1000)):
            raise FrameError(Status.TIMEOUT, f"TIMEOUT after {timeout_s:g} s: the other process {what}")

    def _broken(self, what: str) -> FrameError:
        return FrameError(Status.CRASHED, f"the other process sent a malformed frame: {what}")


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def decode(body: bytes) -> dict[str, Any]:
    """The object in a frame's bytes. ValueError, in words: no JSON, not an object, too deep, an infinite or NaN
    number, an integer beyond 64 bits, a lone surrogate, a key twice."""
    try:
        text = body.decode("utf-8")
        message = json.loads(
            text, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer, object_pairs_hook=_unique
        )
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"no JSON ({type(error).__name__})") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")
    _check_texts_and_depth(message)
    return message


def _no_constant(word: str) -> float:
    raise ValueError(f"{word} is no JSON number")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError("a number that is not finite")
    return value


def _integer(word: str) -> int:
    if len(word) > 20 or not -INTEGER_LIMIT <= int(word) < INTEGER_LIMIT:
        raise ValueError("an integer beyond 64 bits")
    return int(word)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice in one object")
    return found


def _check_texts_and_depth(message: Any) -> None:
    level, depth = [message], 0
    while level:
        depth += 1
        if depth > DEPTH_LIMIT:
            raise ValueError(f"nested more than {DEPTH_LIMIT} deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += [*value, *value.values()]
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                _check_text(value)
        level = below


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text with a lone surrogate") from error


def check(value: Any, schema: Schema, where: str = "the frame") -> None:
    """ValueError, with the place, when `value` has not the declared form. A bool is no int, an int is a float."""
    if schema is Any:
        return
    if isinstance(schema, dict):
        _check_object(value, schema, where)
    elif isinstance(schema, list):
        if not isinstance(value, list):
            raise ValueError(f"{where} is no list")
        for index, each in enumerate(value):
            check(each, schema[0], f"{where}[{index}]")
    else:
        allowed = schema if isinstance(schema, tuple) else (schema,)
        if not any(_is(value, kind) for kind in allowed):
            names = " or ".join("null" if kind is None else kind.__name__ for kind in allowed)
            raise ValueError(f"{where} is {type(value).__name__}, not {names}")


def _check_object(value: Any, schema: dict[str, Schema], where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    known = {key.rstrip("?"): key for key in schema}
    missing = [name for name, key in known.items() if key == name and name not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    for name, each in value.items():
        if name not in known:
            raise ValueError(f"{where} has a key too many: {printable(name, 60)}")
        check(each, schema[known[name]], f"{where}.{name}")


def _is(value: Any, kind: type | None) -> bool:
    if kind is None:
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def printable(text: str, limit: int = TEXT_LIMIT) -> str:
    """`text` for a terminal or a report: one line, at most `limit` characters, nothing that is not printable."""
    line = " | ".join(part.strip() for part in text[: 4 * limit].splitlines() if part.strip())
    shown = "".join(letter if letter.isprintable() else f"\\u{ord(letter):04x}" for letter in line[:limit])
    return shown[:limit]
