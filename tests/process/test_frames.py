"""What a child sends is checked before anything in the parent reads it, whatever a candidate wrote into the pipe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.bench.parent import _checked
from kbsub.eval.process.isolated import Outcome, Status, describe_event, run_isolated
from kbsub.eval.process.result_frames import FRAME_LIMIT, FrameError, Frames, digest_of, read_frame
from kbsub.eval.run.runner import Row, record_outcome
from kbsub.eval.run.stage_values import is_environment
from kbsub.eval.suite.batch import run_batch
from kbsub.eval.verdicts.register import KINDS
from support.paths import TESTS

# Also what stands there already: the child must import the same kbsub as this process.
HERE = {"PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))}
STATUSES = {status.value for status in Status}
RESULT = {"kind": "result", "status": "OK", "message": "", "value": {"a": 1}}

# name: body of a frame, words of what is wrong with it
BROKEN = {
    "nothing": ("{}", "neither result nor progress"),
    "no object": ("[]", "neither result nor progress"),
    "a number": ("1", "neither result nor progress"),
    "not JSON": ("{", "no JSON"),
    "not UTF-8": ('"\udcff"', "no JSON"),
    "deep lists": ("[" * 200_000 + "]" * 200_000, "no JSON"),
    "deep, but Python reads it": (
        json.dumps({"kind": "progress", "event": {"a": None}}).replace("null", "[" * 40 + "]" * 40),
        "levels deep",
    ),
    "many digits": ('{"kind": "progress", "event": {"seed": ' + "9" * 5000 + "}}", "no JSON"),
    "more than 64 bits": ('{"kind": "progress", "event": {"seed": ' + "9" * 400 + "}}", "64 bits"),
    "kind is a list": ('{"kind": [], "event": {}}', "neither result nor progress"),
    "event is a list": ('{"kind": "progress", "event": []}', "without an event"),
    "no event": ('{"kind": "progress"}', "without an event"),
    "no value": ('{"kind": "result", "status": "OK", "message": ""}', "other keys"),
    "unknown status": (json.dumps({**RESULT, "status": "FINE"}), "unknown status"),
    "status is a dict": (json.dumps({**RESULT, "status": {}}), "unknown status"),
    "message is a number": (json.dumps({**RESULT, "message": 7}), "wrong type"),
    "value is a list": (json.dumps({**RESULT, "value": []}), "wrong type"),
}


@pytest.mark.parametrize(("body", "words"), BROKEN.values(), ids=BROKEN)
def test_a_body_that_is_no_frame(body: str, words: str) -> None:
    with pytest.raises(FrameError, match=words):
        read_frame(body.encode("utf-8", "surrogateescape"), STATUSES)


def test_floats_are_read_as_pythons_json_writes_them() -> None:
    body = json.dumps({**RESULT, "value": {"a": float("nan"), "b": float("inf")}}).encode()
    assert str(read_frame(body, STATUSES)["value"]) == "{'a': nan, 'b': inf}"


def test_text_and_keys_come_out_printable() -> None:
    body = json.dumps({**RESULT, "message": "\ud800", "value": {"\x1b": ["\ufffe\n"]}}).encode()
    found = read_frame(body, STATUSES)
    assert (found["message"], found["value"]) == (r"\ud800", {r"\x1b": ["\\ufffe\n"]})


@pytest.mark.parametrize("name", ["nothing", "deep lists", "status is a dict"])
def test_a_broken_frame_costs_the_run_its_result(name: str) -> None:
    """The child answers well afterwards; nothing that it says after a forged frame is believed."""
    payload = {"bodies": [BROKEN[name][0]]}
    outcome = run_isolated("support.isolation_targets:send_frames", payload, timeout_s=20, env=HERE)
    assert (outcome.status, outcome.value) == (Status.CRASHED, None)
    assert outcome.message.startswith("the child sent a frame that is none: ") and BROKEN[name][1] in outcome.message


def test_an_event_that_its_reader_trips_on_costs_the_run_its_result() -> None:
    def read(event: dict[str, Any]) -> None:
        raise KeyError("case")

    payload = {"bodies": ['{"kind": "progress", "event": {"stage": "case"}}']}
    outcome = run_isolated("support.isolation_targets:send_frames", payload, timeout_s=20, env=HERE, on_progress=read)
    assert outcome.status is Status.CRASHED and "KeyError" in outcome.message, outcome


def test_a_failure_of_the_parent_while_it_reads_an_event_is_raised() -> None:
    def read(event: dict[str, Any]) -> None:
        raise OSError("disk full")

    payload = {"bodies": ['{"kind": "progress", "event": {}}']}
    with pytest.raises(OSError, match="disk full"):
        run_isolated("support.isolation_targets:send_frames", payload, timeout_s=20, env=HERE, on_progress=read)


def test_surrogates_everywhere() -> None:
    events: list[dict[str, Any]] = []
    outcome = run_isolated(
        "support.isolation_targets:surrogates", {}, timeout_s=20, env=HERE, on_progress=events.append
    )
    words = r"caf\udce9 \x1b[31m"
    assert (outcome.message, outcome.value, events) == (words, {words: [words]}, [{"stage": words, "case": words}])
    assert outcome.log.startswith(words)


def test_a_line_without_an_end_is_dropped_at_the_limit() -> None:
    frames = Frames("t", STATUSES, None)
    for _ in range(0, 2 * FRAME_LIMIT, 1 << 20):
        frames.feed(b"x" * (1 << 20))
    assert len(frames.buffer) <= FRAME_LIMIT + (1 << 20) and frames.broken is None
    body = json.dumps(RESULT).encode()
    frames.feed(b"\nt " + digest_of(body) + b" " + body + b"\n")
    assert frames.result == RESULT


ODD = [None, [], {}, {"a": []}, "x" * 10_000, "\x1b\n::error::", float("nan"), True, 1 << 63]


@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:20])
def test_any_event_can_be_described_on_one_short_line(value: Any) -> None:
    words = describe_event({"stage": value, "index": value, "case": value, "seed": value})
    assert words.isprintable() and len(words) < 1000 and not words.lstrip().startswith("::")


# events of the stress child that it never sends
STRESS_EVENTS = [
    {"stage": "case"},
    {"stage": "case", "case": "x", "seed": []},
    {"stage": "row"},
    {"stage": "row", "row": "no row"},
    {"stage": "row", "row": {"name": "x"}},
    {"stage": "row", "row": {"name": "x", "class": []}},
    {"stage": "row", "row": {"name": "x", "class": "pass", "oracle": 3}},
]


@pytest.mark.parametrize("event", STRESS_EVENTS, ids=repr)
def test_a_malformed_event_of_the_stress_child_costs_its_sender(event: dict[str, Any]) -> None:
    def runner(target: str, payload: Any, *, on_progress: Any, **_: Any) -> Outcome:
        if payload["candidates"][0]["stem"] == "good":
            return Outcome(Status.OK, {"facts": {}, "failed": {}}, "", "", 0.0)
        frames = Frames("t", STATUSES, on_progress)
        for sent in ({"stage": "case", "case": "a", "candidate": "bad"}, {**event, "candidate": "bad"}):
            body = json.dumps({"kind": "progress", "event": sent}).encode()
            frames.feed(b"t " + digest_of(body) + b" " + body + b"\n")
        assert frames.broken is not None
        return Outcome(Status.CRASHED, None, frames.broken, "", 0.0)

    found = run_batch([{"stem": "bad"}, {"stem": "good"}], {}, timeout_s=1, runner=runner)
    assert (found["bad"].status, found["good"].status) == (Status.CRASHED, Status.OK)
    assert found["bad"].stress["failed"] == 1


@pytest.mark.parametrize("value", [{"facts": 3}, {"failed": []}, {"failed": {"bad": 3}}], ids=repr)
def test_a_malformed_result_of_the_stress_child_is_a_crash(value: dict[str, Any]) -> None:
    def runner(target: str, payload: Any, **_: Any) -> Outcome:
        return Outcome(Status.OK, value, "", "", 0.0)

    assert run_batch([{"stem": "bad"}], {}, timeout_s=1, runner=runner)["bad"].status is Status.CRASHED


# stage and the dict that its child sent
VALUES = [
    ("official", {"verdict": 5}),
    ("official", {"verdict": {"status": "FINE", "reason": None}}),
    ("official", {"verdict": {"status": "OK"}}),
    ("official", {"sha256": "f" * 64}),  # a key of the row that is not the stage's to write
    ("official", {"stages": 5}),
    ("official", {"official": {"compiled": True}}),
    ("official", {"official": {"compiled": True, "correctness": True, "trials": None, "metadata": {}, "runtime": "x"}}),
    ("official", {"timing": {"cuda_event": {"mean_ms": "1"}}}),
    ("official", {"reference": {"cuda_event": 3}}),
    ("official", {"floors": {"memory_ms": []}}),
    ("official", {"cpu_check": {"correctness": True, "trials": 5}}),
    ("official", {"environment": "x"}),
    ("identity", {"identical": "many"}),
    ("identity", {"identical": 1, "total": 1, "cases": [], "contradictions": 5}),
    ("stress", {"passed": 1}),
    ("official", {"official": {"compiled": True, "correctness": True, "trials": None, "metadata": 5}}),
    ("guards", {"clean": True, "findings": 5}),
]


@pytest.mark.parametrize(("stage", "value"), VALUES, ids=[f"{stage} {value}"[:60] for stage, value in VALUES])
def test_a_malformed_value_costs_its_stage_alone(stage: str, value: dict[str, Any]) -> None:
    fields = {"sha256": "0", "contract": None, "precision": "fp32", "status": "OK", "stages": {}}
    row = Row(Path("x.py"), "x", fields)
    record_outcome(row, KINDS[stage], Outcome(Status.OK, value, "", "", 1.0))
    assert row.fields["stages"][stage]["status"] == "RUNTIME_ERROR", row.fields
    assert "malformed" in row.fields["stages"][stage]["message"] and row.fields["sha256"] == "0"


@pytest.mark.parametrize("block", [None, 5, [], {}, {"torch": 5}, {"gpu": None, "torch": "2"}], ids=repr)
def test_facts_of_the_machine_that_are_none_are_not_kept(block: Any) -> None:
    assert not is_environment(block)


BENCH_EVENTS = [
    {},
    {"kind": "scene"},
    {"kind": "scene", "scene": "s", "finished": True, "rows": []},
    {"kind": "scene", "scene": "s", "finished": True, "rows": {"a": {"status": "FINE"}}},
    {"kind": "scene", "scene": [], "finished": True, "rows": {}},
    {"kind": "dropped", "scene": "s", "name": [], "status": "OK", "reason": ""},
    {"kind": "note", "text": 5},
    {"kind": "floors", "floors": {"copy_gb_s": "fast"}},
    {"kind": "environment", "environment": {}},
]


@pytest.mark.parametrize("event", BENCH_EVENTS, ids=repr)
def test_a_malformed_event_of_the_bench_child_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError)):
        _checked(event)
