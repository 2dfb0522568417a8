"""From the seconds of batches to the time of a call. Knows numbers only: no torch, no process, no candidate.

A batch of n calls takes `cost + n * call`; the slope between a batch of few and one of many leaves the cost out. One
that is slow in small batches makes the slope too small and the intercept too large. So the intercept is held against
that of a null candidate in its own cell, and where it is another, the call takes what a batch takes, T(n)/n.
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


@dataclass(frozen=True)
class Estimate:
    """Milliseconds. `ms` with its interval [low, high]; `by`: "slope", or "batch" for T(many)/many."""

    ms: float
    low: float
    high: float
    by: str
    slope_ms: float
    few_ms: float  # medians of whole batches
    many_ms: float
    intercept_ms: float
    null_intercept_ms: float


def charged(ms: float, looked_ms: float, null_looked_ms: float) -> float:
    """ms of a batch, and what it took longer to look at its answers than at a null candidate's, where that is much.

    A look runs on the GPU behind what the candidate left there, up to a time slice: who says "done" a slice early pays
    for it here.
    """
    late = looked_ms - null_looked_ms
    return ms + late if late > SHARE * ms else ms


def slope_of(few: Sequence[float], many: Sequence[float], calls: tuple[int, int]) -> float:
    """ms a call, of the medians of batches of calls[0] and of calls[1] calls (ms)."""
    return float(np.median(many) - np.median(few)) / (calls[1] - calls[0])


def intercept_of(few: Sequence[float], many: Sequence[float], calls: tuple[int, int]) -> float:
    """ms that a batch costs by itself."""
    return float(np.median(few)) - calls[0] * slope_of(few, many, calls)


def estimate(few: Sequence[float], many: Sequence[float], calls: tuple[int, int], null_intercept_ms: float) -> Estimate:
    """The time of a call from the batches (ms) of paired rounds: few[i] and many[i] are of one round."""
    slope, intercept = slope_of(few, many, calls), intercept_of(few, many, calls)
    whole = float(np.median(many)) / calls[1]
    agrees = slope > 0 and abs(intercept - null_intercept_ms) <= SHARE * calls[1] * slope
    picks = np.random.default_rng(SEED).integers(0, len(few), size=(RESAMPLES, len(few)))
    medians = [np.median(np.asarray(series)[picks], axis=1) for series in (few, many)]
    drawn = (medians[1] - medians[0]) / (calls[1] - calls[0])
    # The same is asked of every resample: who sleeps in some of the small batches leaves their median, and with it the
    # slope, as it is, and would have an interval that begins at nothing.
    apart = np.abs(medians[0] - calls[0] * drawn - null_intercept_ms) > SHARE * calls[1] * drawn
    drawn = np.where(apart | (not agrees), np.maximum(drawn, medians[1] / calls[1]), drawn)
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
