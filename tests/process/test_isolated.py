"""Every way a child can end has its own status, a message a person can use, and costs the parent nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.process.isolated import (
    MEMORY_LIMIT_VARIABLE,
    Outcome,
    Status,
    describe_event,
    is_out_of_memory,
    run_isolated,
)
from support.paths import child_path

HERE = child_path()

# target, expected status, words the message must hold
ENDINGS = [
    ("answer", Status.OK, ""),
    ("hang", Status.TIMEOUT, "TIMEOUT after 2 s in trial 2 (seed 2746317213)"),
    ("hang_deaf", Status.TIMEOUT, "TIMEOUT after 2 s"),
    ("leave_quietly", Status.CRASHED, "exit code 0"),
    ("sys_exit", Status.CRASHED, "sys.exit(0)"),
    ("segfault", Status.CRASHED, "SIGSEGV"),
    ("abort_bad_alloc", Status.OUT_OF_MEMORY, "bad_alloc"),
    ("killed", Status.OUT_OF_MEMORY, "SIGKILL"),
    ("memory_error", Status.OUT_OF_MEMORY, "MemoryError"),
    ("device_out_of_memory", Status.OUT_OF_MEMORY, "256.00 MiB"),
    ("sticky_cuda_error", Status.RUNTIME_ERROR, "illegal memory access"),
    ("compile_error", Status.COMPILE_ERROR, "line 3"),
    ("not_json", Status.RUNTIME_ERROR, "not JSON serializable"),
    ("rubbish_everywhere", Status.OK, ""),
    ("close_everything", Status.CRASHED, "result pipe was closed"),
    ("replace_streams", Status.OK, ""),
    ("lingering_thread", Status.OK, ""),
    ("leave_a_daemon", Status.OK, ""),
    ("fork_and_leave", Status.CRASHED, "exit code 3"),
    ("no_such_function", Status.RUNTIME_ERROR, "no_such_function"),
]


def run(name: str, timeout_s: float = 20.0, **more: Any) -> Outcome:
    environment = {**HERE, **more.pop("env", {})}
    return run_isolated(
        f"support.isolation_targets:{name}", {"number": 7}, timeout_s=timeout_s, env=environment, **more
    )


@pytest.mark.parametrize(("name", "status", "words"), ENDINGS, ids=[row[0] for row in ENDINGS])
def test_status_and_message(name: str, status: Status, words: str) -> None:
    outcome = run(name, timeout_s=2.0 if status is Status.TIMEOUT else 20.0)
    assert outcome.status is status, f"{name}: {outcome}"
    assert words in outcome.message, f"{name}: {outcome.message!r}\n{outcome.log}"
    assert "kernel errors might" not in outcome.message


def test_value_progress_and_empty_stdin() -> None:
    events: list[dict[str, Any]] = []
    outcome = run("answer", on_progress=events.append)
    assert outcome.value == {"echo": {"number": 7}, "stdin": "", "cwd_on_path": False}
    assert events == [{"stage": "trial", "index": 0, "seed": 42}]


def test_timeout_kills_within_a_second_and_says_where_it_hung() -> None:
    outcome = run("hang_deaf", timeout_s=1.5)
    assert 1.5 <= outcome.seconds < 4.0, outcome
    assert "in hang" in outcome.log, outcome.log


def test_log_is_bounded_and_keeps_both_ends() -> None:
    outcome = run("rubbish_everywhere")
    assert outcome.value == {"true": True}
    assert 32_000 < len(outcome.log) < 100_000
    assert "bytes dropped" in outcome.log


def test_growth_beyond_the_memory_limit_is_out_of_memory() -> None:
    outcome = run("grow", env={MEMORY_LIMIT_VARIABLE: str(1 << 30)})
    assert outcome.status is Status.OUT_OF_MEMORY, outcome


def test_failure_keeps_what_the_judge_found() -> None:
    assert run("compile_error").value == {"line": 3}


def test_no_descendant_survives() -> None:
    pid = run("leave_a_daemon").value["pid"]  # type: ignore[index]
    for _ in range(50):  # the kernel reaps it a moment after the kill
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"process {pid} is still in state {state}")


def test_no_descriptor_leaks() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for name in ("answer", "leave_quietly", "fork_and_leave"):
        run(name)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (RuntimeError("CUDA out of memory. Tried to allocate"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("x: out of memory banks"), False),  # a candidate's own words about its input
    ],
)
def test_is_out_of_memory(error: BaseException, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_describe_event() -> None:
    assert describe_event({"stage": "trial", "index": 2, "seed": 5}) == "trial 2 (seed 5)"
    assert describe_event({"stage": "case", "case": "x100"}) == "case x100"
