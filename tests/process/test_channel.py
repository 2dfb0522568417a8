"""Frames between processes that do not trust each other: what is refused, with which status, and how soon."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from typing import Any

import pytest

from kbsub.eval.process.frames import DESCRIPTOR_LIMIT, Channel, FrameError, check, decode, printable
from kbsub.eval.process.isolated import Status

NOW_S = 0.2


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@pytest.fixture
def pair():
    one, other = socket.socketpair()
    channel = Channel(one, limit=1000)
    yield channel, other
    channel.close()
    other.close()


# What is written, and a word of the message that must come of it.
MALFORMED = {
    "no JSON": (framed(b"hello"), "no JSON"),
    "not UTF-8": (framed(b'{"a": "\xff"}'), "no JSON"),
    "a list": (framed(b"[1]"), "not a JSON object"),
    "NaN": (framed(b'{"a": NaN}'), "no JSON number"),
    "infinite": (framed(b'{"a": 1e999}'), "not finite"),
    "65 bits": (framed(b'{"a": 9223372036854775808}'), "beyond 64 bits"),
    "thousands of digits": (framed(b'{"a": %s}' % (b"9" * 900)), "beyond 64 bits"),
    "lone surrogate": (framed(b'{"a": "\\ud800"}'), "surrogate"),
    "lone surrogate in a key": (framed(b'{"\\udfff": 1}'), "surrogate"),
    "a key twice": (framed(b'{"a": 1, "a": 2}'), "twice"),
    "41 deep": (framed(b'{"a": ' + b"[" * 41 + b"]" * 41 + b"}"), "deep"),
    "longer than the limit": (framed(b'{"a": "%s"}' % (b"x" * 1000)), "at most 1000"),
    "four gigabytes are announced": (b"\xff\xff\xff\xff", "at most 1000"),
    "pickle": (framed(b"\x80\x04\x95\x00."), "no JSON"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_frame_is_a_crash_in_words(pair, name):
    channel, other = pair
    data, word = MALFORMED[name]
    other.sendall(data)
    with pytest.raises(FrameError, match=word) as caught:
        channel.receive(Any, NOW_S)
    assert caught.value.status is Status.CRASHED


def test_nesting_beyond_the_interpreters_own_stack_is_refused_too():
    with pytest.raises(ValueError, match="deep"):
        decode(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}")


def test_silence_ends_in_time(pair):
    started = time.monotonic()
    with pytest.raises(FrameError) as caught:
        pair[0].receive(Any, NOW_S)
    assert caught.value.status is Status.TIMEOUT
    assert time.monotonic() - started < NOW_S + 2


def test_a_frame_that_comes_byte_by_byte_does_not_prolong_the_time(pair):
    channel, other = pair

    def trickle():
        for byte in framed(b'{"a": "' + b"x" * 500 + b'"}'):
            try:
                other.send(bytes([byte]))
            except OSError:
                return
            time.sleep(0.02)

    thread = threading.Thread(target=trickle)
    started = time.monotonic()
    thread.start()
    with pytest.raises(FrameError) as caught:
        channel.receive(Any, 0.5)
    assert caught.value.status is Status.TIMEOUT
    assert time.monotonic() - started < 3
    channel.close()
    thread.join()


@pytest.mark.parametrize(("written", "word"), [(b"", "without a word"), (framed(b'{"a": 1}')[:-1], "in the middle")])
def test_the_end_of_the_other_side_says_where(pair, written, word):
    channel, other = pair
    other.sendall(written)
    other.close()
    with pytest.raises(FrameError, match=word) as caught:
        channel.receive(Any, NOW_S)
    assert caught.value.status is Status.CRASHED


def test_somebody_who_does_not_read_ends_in_time(pair):
    with pytest.raises(FrameError) as caught:
        pair[0].send({"a": "x" * (64 << 20)}, NOW_S)
    assert caught.value.status is Status.TIMEOUT


def test_words_and_a_descriptor_arrive_as_they_were_sent(pair):
    channel, other = pair
    sender = Channel(other)
    read, write = os.pipe()
    sender.send({"a": ["ü", 1, None, 0.5, True]}, NOW_S, [write])
    os.close(write)
    message, (received,) = channel.receive({"a": [Any]}, NOW_S)
    assert message == {"a": ["ü", 1, None, 0.5, True]}
    os.write(received, b"there")
    assert os.read(read, 10) == b"there"
    for descriptor in (read, received):
        os.close(descriptor)


def test_descriptors_beyond_the_limit_are_refused_and_closed(pair):
    channel, other = pair
    before = len(os.listdir("/proc/self/fd"))
    with open(os.devnull) as nothing:
        socket.send_fds(other, [framed(b"{}")], [nothing.fileno()] * (DESCRIPTOR_LIMIT + 9))
    with pytest.raises(FrameError, match="descriptors"):
        channel.receive(Any, NOW_S)
    assert len(os.listdir("/proc/self/fd")) == before


# value, schema, and a word of the complaint or None where it fits.
FORMS = [
    ({"a": 1}, {"a": int}, None),
    ({"a": True}, {"a": int}, "bool, not int"),
    ({"a": 1}, {"a": float}, None),
    ({"a": "1"}, {"a": (int, None)}, "str, not int or null"),
    ({"a": None}, {"a": (int, None)}, None),
    ({}, {"a": int}, "lacks a"),
    ({}, {"a?": int}, None),
    ({"a?": 1}, {"a?": int}, "too many"),
    ({"a": 1, "b": 2}, {"a": int}, "too many: b"),
    ({"a": [1, "x"]}, {"a": [int]}, r"a\[1\] is str"),
    ({"a": {"b": []}}, {"a": {"b": {}}}, "no object"),
]


@pytest.mark.parametrize(
    ("value", "schema", "word"), FORMS, ids=[json.dumps(form[0]) + str(i) for i, form in enumerate(FORMS)]
)
def test_the_declared_form_holds_to_the_letter(value, schema, word):
    if word is None:
        check(value, schema)
        return
    with pytest.raises(ValueError, match=word):
        check(value, schema)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\r\n::stop-commands::x", "two | lines | ::stop-commands::x"),
        ("\x1b[31mred", "\\u001b[31mred"),
        ("\ufffe", "\\ufffe"),
        ("x" * 9000, "x" * 4000),
        ("Wörter", "Wörter"),
    ],
)
def test_text_for_a_person_is_one_bounded_line_of_printable_letters(text, shown):
    assert printable(text) == shown
