"""The measurement of wall time without a GPU: order, what is compared, and the processes it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.measure import wall_time as wall


def run_of(seconds: float, correct: bool = True) -> dict[str, Any]:
    return {"seconds": seconds, "exit": 0, "correct": correct}


# ours, theirs, every verdict correct, whether the claim holds
CLAIMS = [
    ([9.0, 9.5, 30.0], [12.0, 12.1, 12.2], True, True),  # the median: one disturbed run decides nothing
    ([12.0], [12.0], True, True),
    ([12.5, 12.6], [12.0, 12.1], True, False),
    ([1.0], [12.0], False, False),  # a fast wrong verdict is no verdict
]


@pytest.mark.parametrize(("ours", "theirs", "correct", "holds"), CLAIMS)
def test_the_claim(ours: list[float], theirs: list[float], correct: bool, holds: bool) -> None:
    runs = {"ours": [run_of(s, correct) for s in ours], "theirs": [run_of(s) for s in theirs]}
    found = wall.summary(runs)
    assert found["holds"] is holds, found
    assert found["seconds"] == {"ours": ours, "theirs": theirs}


@pytest.mark.parametrize("warm", [False, True])
def test_programs_run_in_turn_after_one_uncounted_run_each(warm: bool) -> None:
    order: list[str] = []

    def program(name: str) -> wall.Run:
        def run() -> dict[str, Any]:
            order.append(name)
            return run_of(float(len(order)))

        return run

    kept: list[dict[str, Any]] = []
    record = wall.in_turn({"a": program("a"), "b": program("b")}, 2, lambda found: kept.append(dict(found)), warm=warm)
    assert order == ["a", "b", "a", "b"] + ([] if warm else ["a", "b"])
    first = 1.0 if warm else 3.0
    assert record["seconds"] == {"a": [first, first + 2], "b": [first + 1, first + 3]}
    assert len(kept) == 2, "kept after every round: a run that is stopped loses one round"


def test_a_process_is_timed_to_its_end_and_its_words_are_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os, time; print(os.environ['WORD']); time.sleep(0.2); raise SystemExit(3)"]
    found, text = wall.timed(command, tmp_path, {"WORD": "heard"}, tmp_path / "log")
    assert found["exit"] == 3 and found["seconds"] >= 0.2
    assert text.strip() == (tmp_path / "log").read_text().strip() == "heard"
