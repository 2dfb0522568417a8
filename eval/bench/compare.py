"""Which of two programs is faster, by how much, and whether the difference is real.

The samples of one run are paired: round i timed every program once, in shuffled order, so a clock that drifts moves
both sides of a pair. What is compared is the ratio inside each round, never one median against another.
This file knows numbers only: no torch, no files, no GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

CONFIDENCE = 0.95
RESAMPLES = 4000
SEED = 913  # the protocol's own seed; a fixed one makes a stored run give the same words each time
MARGIN = 0.005  # ratios within 0.5% count as a tie: below it, clocks and alignment decide, not the kernel
MIN_ROUNDS = 8  # with fewer rounds the bootstrap interval of a median is far too narrow


class Verdict(str, Enum):
    """How program A stands against program B. A tie is SAME or UNSURE, never a win."""

    FASTER = "FASTER"  # the whole interval is more than the margin below 1
    SLOWER = "SLOWER"  # the whole interval is more than the margin above 1
    SAME = "SAME"  # the whole interval is within the margin of 1
    UNSURE = "UNSURE"  # anything else: measure more rounds, or on a quieter machine

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class PairedComparison:
    """Time of A over time of B: the median ratio over rounds and its bootstrap interval (all dimensionless)."""

    verdict: Verdict
    ratio: float
    low: float
    high: float
    rounds: int
    reason: str = ""

    @property
    def speedup(self) -> float:
        """Time of B over time of A: how many times faster A is."""
        return 1.0 / self.ratio if self.ratio > 0 else math.nan

    def words(self, other: str) -> str:
        """The comparison as a person reads it: "FASTER than eager: 1.60x (1.59 to 1.61)"."""
        joint = "as" if self.verdict is Verdict.SAME else "about" if self.verdict is Verdict.UNSURE else "than"
        if math.isnan(self.ratio):
            return f"{self.verdict} {joint} {other}: {self.reason}"
        return f"{self.verdict} {joint} {other}: {self.speedup:.3g}x ({1 / self.high:.3g} to {1 / self.low:.3g})" + (
            f"; {self.reason}" if self.reason else ""
        )


def interval(ratios: Sequence[float], confidence: float = CONFIDENCE, seed: int = SEED) -> tuple[float, float, float]:
    """Median of paired ratios with its percentile-bootstrap interval over rounds: (median, low, high).

    The median, because timing noise has a one-sided tail (an interrupted round is slow, never fast).
    """
    logs = np.log(np.asarray(ratios, dtype=np.float64))
    rounds = len(logs)
    picks = np.random.default_rng(seed).integers(0, rounds, size=(RESAMPLES, rounds))
    medians = np.median(logs[picks], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, (tail, 1.0 - tail))
    return math.exp(float(np.median(logs))), math.exp(float(low)), math.exp(float(high))


def compare(
    a_ms: Sequence[float], b_ms: Sequence[float], *, margin: float = MARGIN, seed: int = SEED
) -> PairedComparison:
    """Compare paired samples in milliseconds: a_ms[i] and b_ms[i] come from the same round i.

    A series that ended early is paired as far as it goes. Raises ValueError on a time that is not positive and finite.
    """
    rounds = min(len(a_ms), len(b_ms))
    a, b = list(a_ms[:rounds]), list(b_ms[:rounds])
    for name, series in (("first", a), ("second", b)):
        for index, value in enumerate(series):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} series, round {index}: {value} ms is not a time; measure that program again")
    if rounds < MIN_ROUNDS:
        reason = f"{rounds} paired rounds, at least {MIN_ROUNDS} are needed"
        ratio = float(np.median(np.divide(a, b))) if rounds else math.nan
        return PairedComparison(Verdict.UNSURE, ratio, ratio, ratio, rounds, reason)
    ratio, low, high = interval([x / y for x, y in zip(a, b, strict=True)], seed=seed)
    return PairedComparison(judge(low, high, margin), ratio, low, high, rounds)


def judge(low: float, high: float, margin: float = MARGIN) -> Verdict:
    """The verdict of a ratio interval [low, high] against the band [1 - margin, 1 + margin]."""
    if high < 1.0 - margin:
        return Verdict.FASTER
    if low > 1.0 + margin:
        return Verdict.SLOWER
    if low >= 1.0 - margin and high <= 1.0 + margin:
        return Verdict.SAME
    return Verdict.UNSURE


def unpaired(reason: str) -> PairedComparison:
    """Two measurements that may not be compared: other runs, GPUs or versions."""
    return PairedComparison(Verdict.UNSURE, math.nan, math.nan, math.nan, 0, reason)
