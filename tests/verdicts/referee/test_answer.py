"""What the gate makes of a referee's record, and what a table says of two times."""

from __future__ import annotations

from typing import Any

import pytest

from kbsub.eval.report.leaderboard import REFEREE, UPSTREAM, ranking_table
from kbsub.eval.results.model import Result
from kbsub.eval.verdicts.kind import Answer, Asked
from kbsub.eval.verdicts.referee.registration import KIND, Referee
from support.stored_result import content

FLOOR = {
    "bytes": 570_425_344,
    "copy_gb_s": 4000.0,
    "copy_ms": 0.1426,
    "peak_gb_s": 4900.0,
    "peak_ms": 0.1159,
    "one_call_peak_ms": 0.1042,
}
GOOD: dict[str, Any] = {
    "outputs": 300,
    "wrong": 0,
    "problems": [],
    "device": "cuda",
    "confined": {"level": "namespaces", "lacks": []},
    "precision": "fp32",
    "tolerance": 1e-4,
    "ms": 0.28,
    "low": 0.279,
    "high": 0.282,
    "by": "slope",
    "tells_apart": True,
    "floor": FLOOR,
}
WRONG = {"wrong": 3, "problems": ["differs from the reference by up to 1.8"]}
P, F, U = Answer.PASS, Answer.FAIL, Answer.UNCERTIFIED

# changes of the record, upstream's ms, what is expected of the official verdict: the answer, words in it
ANSWERS: dict[str, tuple[dict[str, Any], float | None, str, Answer, str]] = {
    "honest": ({}, 0.289, "pass", P, "300/300 outputs right, 0.2800 ms"),
    "nothing official to compare with": ({}, None, "pass", P, "300/300"),
    "its times differ": ({}, 0.31, "pass", P, "upstream's time is 1.11 of it"),
    "wrong outputs": (WRONG, 0.289, "pass", F, "differs from the reference by up to 1.8"),
    "wrong, as declared": (WRONG, None, "fail", P, "differs from the reference"),
    "changed its state": ({"problems": ["changed its state 'ln.weight'"]}, 0.289, "pass", F, "changed its state"),
    "below the floor": (
        {"ms": 0.1, "low": 0.1, "high": 0.101},
        0.289,
        "pass",
        F,
        "below the floor: 0.1000",
    ),
    "upstream's is": ({}, 0.0012, "pass", F, "below the floor: upstream's 0.0012 ms"),
    "under the copy floor only": ({"ms": 0.13, "low": 0.13, "high": 0.131}, 0.131, "pass", P, "under the copy floor"),
    "upstream's clock was deceived": ({"ms": 8.1, "low": 8.1, "high": 8.1}, 0.15, "pass", F, "clock was deceived"),
    "a batch's share": ({"by": "batch"}, 0.289, "pass", P, "a share of whole batches: they do not cost"),
    "not held": ({"held": False}, 0.289, "pass", U, "did not stand still"),
    "below the floor, in an interval as wide as one likes": (
        {"ms": 0.1, "low": 0.1, "high": 0.5},
        0.289,
        "pass",
        F,
        "below the floor: 0.1000",
    ),
    "on a CPU": ({"device": "cpu", "floor": None}, None, "pass", U, "on a cpu: 300/300"),
    "wrong on a CPU": ({"device": "cpu", "floor": None, **WRONG}, None, "pass", F, "differs from the reference"),
    "a predicate that tells nothing": ({"tells_apart": False}, 0.289, "pass", U, "the answer to one input for that to"),
    "parameters that cannot be set": ({"parameters_changed": False}, 0.289, "pass", U, "its parameters cannot be set"),
    "parameters that were": ({"parameters_changed": True}, 0.289, "pass", P, "300/300"),
    "no time": ({"ms": None, "low": None, "high": None}, 0.289, "pass", U, "no time"),
    "nothing compared": ({"outputs": 0}, 0.289, "pass", U, "no output was compared"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_gates_answer(name):
    changes, upstream, expected, answer, words = ANSWERS[name]
    record = Referee.model_validate({**GOOD, **changes})
    official = {"official": {"correctness": True, "runtime": upstream}} if upstream else {}
    asked = Asked(official, {"status": "OK"}, {"expect": {"official": expected}})
    found = KIND.answer(record, asked)
    assert found[0] is answer and words in found[1], found


def stored(**referee: Any) -> Result:
    found = content()
    names = sorted(name for name in found["candidates"] if "@" not in name)[:2]
    for name, ms, theirs in zip(names, (0.2, 0.4), (0.5, 0.4), strict=True):
        row = found["candidates"][name]
        row["referee"] = {**GOOD, "ms": ms, "low": ms, "high": ms, **referee}
        row["official"] = {
            "compiled": True,
            "correctness": True,
            "trials": "(5 / 5)",
            "metadata": {},
            "runtime": theirs,
        }
    found["candidates"] = {name: found["candidates"][name] for name in names}
    return Result.model_validate(found)


def test_candidates_are_ranked_by_upstreams_time_unless_the_referees_is_asked_for():
    by_upstream, by_referee = (ranking_table(stored(), rank=rank) for rank in (UPSTREAM, REFEREE))
    assert by_upstream.rows == by_referee.rows[::-1]
    fast = by_referee.rows[0]
    assert fast[2:6] == ["0.500", "0.200", "0.200 - 0.200", "2.50"] and "2.50 of it" in fast[6]
    assert by_referee.rows[1][5:] == ["1.00", "agrees"]


def test_a_row_whose_outputs_are_wrong_has_no_time_by_the_referee():
    rows = ranking_table(stored(**WRONG)).rows
    assert all(row[3] == "-" and row[6] == "3 of 300 outputs wrong" for row in rows)
