"""The time of a call from the times of batches: slow in small ones or early in others, a file gains next to nothing."""

from __future__ import annotations

import random

import pytest

from kbsub.eval.verdicts.referee.numbers import BATCH, NOISE_MS, SHARE, SLOPE, estimate, null_of

CALLS = (8, 24)
COST, CALL = 0.8, 0.28  # ms of a batch by itself, ms of a call
ROUNDS = 12
GROWS = CALLS[1] / (CALLS[1] - CALLS[0])  # the intercept, by so many times what every small batch is delayed


def series(per_batch: float, call: float = CALL, noise: float = 0.0) -> tuple[list[float], list[float]]:
    chance = random.Random(5)

    def batch(calls: int) -> float:
        return per_batch + calls * call + chance.uniform(-noise, noise)

    few, many = zip(*[(batch(CALLS[0]), batch(CALLS[1])) for _ in range(ROUNDS)], strict=True)
    return list(few), list(many)


def test_what_a_batch_costs_by_itself_is_left_out():
    found = estimate(*series(COST), CALLS, COST)
    assert found.ms == pytest.approx(CALL) and found.by == SLOPE
    assert found.intercept_ms == pytest.approx(COST)


def test_the_interval_holds_the_time_and_is_narrow_where_the_noise_is():
    found = estimate(*series(COST, noise=0.02), CALLS, COST)
    assert found.low <= found.ms <= found.high
    assert found.low <= CALL <= found.high and found.high - found.low < 0.02 * CALL


# What somebody adds to every small batch, to every large one, in ms; what the time may then fall to.
ATTEMPTS = {
    "sleeps long in small batches": (2.0, 0.0),
    "sleeps as long as is not noticed": (SHARE * CALLS[1] * CALL / GROWS * 0.999, 0.0),
    "sleeps a little more than that": (SHARE * CALLS[1] * CALL / GROWS * 1.2, 0.0),
    "begins large batches early": (0.0, -0.2),  # twice what lies between the last change of contents and the clock
    "begins all batches early": (-0.5, -0.5),
    "sleeps in large batches": (0.0, 1.0),
    "so long that the slope is negative": (20.0, 0.0),
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_nobody_gains_more_than_five_percent_by_moving_the_batches(name):
    few, many = series(COST)
    found = estimate([t + ATTEMPTS[name][0] for t in few], [t + ATTEMPTS[name][1] for t in many], CALLS, COST)
    assert found.ms >= 0.95 * CALL, f"{name}: {found.ms} ms for a call of {CALL} ms, by the {found.by}"


def test_where_the_intercept_is_not_the_nulls_a_call_takes_its_share_of_the_batch():
    few, many = series(COST)
    found = estimate([t + 2.0 for t in few], many, CALLS, COST)
    assert found.by == BATCH and found.ms == pytest.approx((many[0] - COST) / CALLS[1])
    assert found.low == pytest.approx(found.ms)


@pytest.mark.parametrize("slept", [2.0, 20.0])
def test_who_sleeps_in_some_of_the_small_batches_has_no_interval_that_begins_below(slept):
    few, many = series(COST, noise=0.02)
    found = estimate([t + slept * (index % 5 in (1, 3)) for index, t in enumerate(few)], many, CALLS, COST)
    assert found.low >= 0.95 * CALL, f"{found.low} to {found.high} ms for a call of {CALL} ms"


def test_what_the_null_candidate_costs_is_no_more_than_it_cost_before_there_was_a_candidate():
    delayed = ([COST + 2.0] * 5, [COST + 2.0] * 5)  # a kernel left running would delay it, and with it be paid back
    assert null_of(delayed, COST, CALLS) == pytest.approx(COST + NOISE_MS)
    assert null_of(([COST] * 5, [COST] * 5), COST + 0.3, CALLS) == pytest.approx(COST)


def test_who_says_done_a_time_slice_early_in_large_batches_gains_nothing():
    """On a GPU two processes take turns of about 2 ms: answers can be looked at only when the turn is over."""
    few, many = series(COST)
    early = [t - 2.0 for t in many]
    assert estimate(few, early, CALLS, COST).ms < 0.9 * CALL, "uncharged, it gains"
    assert estimate(few, early, CALLS, COST, late=(0.0, 2.0)).ms == pytest.approx(CALL)


def test_who_says_done_early_in_every_batch_gains_nothing_either():
    few, many = series(COST)
    found = estimate([t - 1.5 for t in few], [t - 1.5 for t in many], CALLS, COST, late=(1.5, 1.5))
    assert found.ms >= 0.99 * CALL


def test_looks_that_are_no_later_than_at_the_nulls_answers_cost_nothing():
    assert estimate(*series(COST), CALLS, COST, late=(-0.2, -0.1)).ms == pytest.approx(CALL)
    assert estimate(*series(COST), CALLS, COST, late=(0.2, 0.2)).ms == pytest.approx(CALL)
