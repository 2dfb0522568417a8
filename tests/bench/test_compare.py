"""The comparison tells the truth on synthetic rounds whose true ratio is known."""

from __future__ import annotations

import numpy as np
import pytest

from kbsub.eval.bench.compare import MARGIN, PairedComparison, Verdict, compare, interval, judge, unpaired

ROUNDS = 35  # the protocol's number


def rounds(
    rng: np.random.Generator, ratio: float, noise: float, count: int = ROUNDS
) -> tuple[list[float], list[float]]:
    """Paired rounds: a clock that drifts by 5%, noise of its own, and one round in twenty interrupted on each side."""
    drift = 0.3 * (1 + 0.05 * np.cumsum(rng.normal(size=count)) / np.sqrt(count))
    series = []
    for factor in (ratio, 1.0):
        spikes = np.where(rng.random(count) < 0.05, rng.uniform(1.2, 3.0, count), 1.0)
        series.append(list(drift * factor * np.exp(noise * rng.normal(size=count)) * spikes))
    return series[0], series[1]


def test_interval_covers_the_true_ratio_as_often_as_it_says():
    trials, covered = 600, 0
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        true = float(rng.uniform(0.5, 2.0))
        a, b = rounds(rng, true, noise=0.02)
        _, low, high = interval([x / y for x, y in zip(a, b, strict=True)], seed=seed)
        covered += low <= true <= high
    share = covered / trials
    # 95% nominal; three standard deviations of 600 draws are 2.7%, and a bootstrapped median runs up to 1.5% high.
    assert 0.923 <= share <= 0.99, f"a 95% interval covered the true ratio in {share:.1%} of {trials} runs"


# true ratio A/B, noise of one sample, the verdicts allowed, least share of runs that must give the first one
KNOWN = [
    (0.90, 0.01, (Verdict.FASTER,), 1.0),
    (1.10, 0.01, (Verdict.SLOWER,), 1.0),
    (1.00, 0.002, (Verdict.SAME, Verdict.UNSURE), 0.95),  # a tie measured well
    (1.00, 0.05, (Verdict.UNSURE, Verdict.SAME), 0.80),  # a tie measured badly stays undecided
    (0.98, 0.10, (Verdict.UNSURE, Verdict.FASTER), 0.60),  # real, but too small for this noise
]


@pytest.mark.parametrize(("true", "noise", "allowed", "share"), KNOWN)
def test_verdict_on_known_ratio(true, noise, allowed, share):
    runs = 60
    seen = [compare(*rounds(np.random.default_rng(1000 + seed), true, noise)).verdict for seed in range(runs)]
    # 95% intervals: one run in forty may stray on the side that matters
    strays = [v for v in seen if v not in allowed]
    assert len(strays) <= 3, f"ratio {true}, noise {noise}: {strays}"
    assert seen.count(allowed[0]) >= share * runs, f"ratio {true}, noise {noise}: {[v.value for v in seen]}"


def test_a_tie_is_never_a_win():
    wins = 0
    for seed in range(400):
        verdict = compare(*rounds(np.random.default_rng(5000 + seed), 1.0, noise=0.01)).verdict
        wins += verdict in (Verdict.FASTER, Verdict.SLOWER)
    assert wins <= 4, f"{wins} of 400 ties were printed as a win or a loss (the 0.5% margin should leave next to none)"


EDGES = [
    (0.90, 0.99, Verdict.FASTER),
    (0.99, 0.9999, Verdict.UNSURE),  # excludes 1, but not the margin: not a win
    (0.996, 0.999, Verdict.SAME),
    (0.996, 1.004, Verdict.SAME),
    (0.99, 1.01, Verdict.UNSURE),
    (1.004, 1.02, Verdict.UNSURE),
    (1.006, 1.02, Verdict.SLOWER),
]


@pytest.mark.parametrize(("low", "high", "verdict"), EDGES)
def test_judge_edges(low, high, verdict):
    assert judge(low, high, MARGIN) is verdict


def test_equal_samples_are_the_same():
    assert compare([0.3] * ROUNDS, [0.3] * ROUNDS).verdict is Verdict.SAME


def test_pairing_survives_a_clock_that_halves():
    # Medians alone would differ by chance of the order; within a round the ratio is exactly 0.98.
    clock = np.repeat([1.0, 2.0], [18, 17])
    assert compare(list(0.98 * clock), list(clock)).verdict is Verdict.FASTER


def test_few_rounds_are_unsure():
    result = compare([0.1] * 7, [1.0] * 7)
    assert result.verdict is Verdict.UNSURE and "at least 8" in result.reason


def test_a_series_that_ended_early_is_paired_as_far_as_it_goes():
    assert compare([0.1] * 10, [1.0] * ROUNDS).rounds == 10


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_not_a_time(bad):
    with pytest.raises(ValueError, match=r"round 3: .* is not a time"):
        compare([0.1] * 3 + [bad] + [0.1] * 6, [1.0] * 10)


def test_words_show_speedup_and_interval():
    text = PairedComparison(Verdict.FASTER, 0.5, 0.4, 0.625, 35).words("eager")
    assert text == "FASTER than eager: 2x (1.6 to 2.5)"
    assert "other GPU" in unpaired("measured on another GPU, other GPU").words("eager")
