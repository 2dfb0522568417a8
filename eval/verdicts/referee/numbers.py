"""From the seconds of batches to the time of a call. Knows numbers only: no torch, no process, no candidate.

A batch of n calls takes `cost + n * call`; the slope between a batch of few and one of many leaves the cost out. One
that is slow in small batches makes the slope too small and the intercept too large. So the intercept is held against
that of a null candidate in its own cell, and where it is another, the call takes its share of a batch of many, less
what the null candidate's batches cost by themselves: (T(n) - null)/n, which small batches have no part in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, SEED, CONFIDENCE = 2000, 913, 0.95
# How far the intercept may be from the null candidate's, as a share of what a batch of many takes: the most that a
# candidate can gain by it, since slope >= (T(many) - its intercept) / many.
SHARE = 0.03
SLOPE, BATCH = "slope", "batch"
NOISE_MS = 0.1  # of what a batch costs by itself


@dataclass(frozen=True)
class Estimate:
    """Milliseconds. `ms` with its interval [low, high]; `by`: "slope", or "batch" for a share of T(many)."""

    ms: float
    low: float
    high: float
    by: str
    slope_ms: float
    few_ms: float  # medians of whole batches
    many_ms: float
    intercept_ms: float
    null_intercept_ms: float


def null_of(during: tuple[Sequence[float], Sequence[float]], before_ms: float, calls: tuple[int, int]) -> float:
    """The null candidate's intercept, ms, from its batches of few and of many in the rounds; hardly more than before
    the candidate was there, which no candidate can have delayed."""
    return min(intercept_of(*during, calls), before_ms + NOISE_MS)


def slope_of(few: Sequence[float], many: Sequence[float], calls: tuple[int, int]) -> float:
    """ms a call, of the medians of batches of calls[0] and of calls[1] calls (ms)."""
    return float(np.median(many) - np.median(few)) / (calls[1] - calls[0])


def intercept_of(few: Sequence[float], many: Sequence[float], calls: tuple[int, int]) -> float:
    """ms that a batch costs by itself."""
    return float(np.median(few)) - calls[0] * slope_of(few, many, calls)


def estimate(
    few: Sequence[float],
    many: Sequence[float],
    calls: tuple[int, int],
    null_intercept_ms: float,
    late: tuple[float, float] = (0.0, 0.0),
) -> Estimate:
    """The time of a call from the batches (ms) of paired rounds: few[i] and many[i] are of one round.

    late: how much longer than at the null candidate's it took to look at the answers of a batch of few and of many
    (medians, ms). On a GPU a look waits for what the candidate left running there, up to a time slice: who says "done"
    a slice early pays for it here.
    """
    late_few, late_many = (max(0.0, each) for each in late)
    many = [each + max(0.0, late_many - late_few) for each in many]
    slope, intercept = slope_of(few, many, calls), intercept_of(few, many, calls)
    rest = min(late_few, late_many) - null_intercept_ms
    whole = (float(np.median(many)) + rest) / calls[1]
    agrees = slope > 0 and abs(intercept - null_intercept_ms) <= SHARE * calls[1] * slope
    picks = np.random.default_rng(SEED).integers(0, len(few), size=(RESAMPLES, len(few)))
    medians = [np.median(np.asarray(series)[picks], axis=1) for series in (few, many)]
    drawn = (medians[1] - medians[0]) / (calls[1] - calls[0])
    # The same is asked of every resample: who sleeps in some of the small batches leaves their median, and with it the
    # slope, as it is, and would have an interval that begins at nothing.
    apart = np.abs(medians[0] - calls[0] * drawn - null_intercept_ms) > SHARE * calls[1] * drawn
    drawn = np.where(apart | (not agrees), np.maximum(drawn, (medians[1] + rest) / calls[1]), drawn)
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(value) for value in np.quantile(drawn, (tail, 1 - tail)))
    return Estimate(
        ms=slope if agrees else max(slope, whole),
        low=low,
        high=high,
        by=SLOPE if agrees else BATCH,
        slope_ms=slope,
        few_ms=float(np.median(few)),
        many_ms=float(np.median(many)),
        intercept_ms=intercept,
        null_intercept_ms=null_intercept_ms,
    )
