"""The predicate on chunks says what one call of torch.allclose says, and how much of the tolerance was used."""

from __future__ import annotations

import math

import pytest
import torch

from kbsub.eval.blindspots import margin as margins
from kbsub.eval.blindspots.margin import judged

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(margins, "CHUNK", 4)


@pytest.mark.parametrize(
    ("reference", "output"),
    [
        ([1.0] * 9, [1.0] * 9),
        ([1.0] * 9, [1.0] * 8 + [1.0003]),
        ([1.0] * 9, [1.0] * 8 + [1.00019]),
        ([NAN] * 5, [NAN] * 5),
        ([INF, -INF, 1.0, 2.0, 3.0], [INF, -INF, 1.0, 2.0, 3.0]),
        ([INF, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, NAN]),
        ([0.0] * 6, [5e-5] * 6),
        ([], []),
    ],
)
def test_as_allclose(reference, output):
    r, o = torch.tensor(reference), torch.tensor(output)
    found = judged(r, o, 1e-4, whole=True)
    assert found.passed == torch.allclose(r, o, atol=1e-4, rtol=1e-4)
    assert found.passed == (found.share <= 1) or not reference


def test_share_and_count_and_where_it_stops():
    r, o = torch.zeros(12), torch.zeros(12)
    o[5], o[10] = 3e-4, 9e-4
    first, whole = judged(r, o, 1e-4), judged(r, o, 1e-4, whole=True)
    assert (first.failing, first.whole, whole.failing, whole.whole) == (1, False, 2, True)
    assert first.share == pytest.approx(3 / 1.0003, rel=1e-3)
    assert whole.share == pytest.approx(9 / 1.0009, rel=1e-3)


def test_shapes_and_integers():
    assert judged(torch.zeros(3), torch.zeros(3, 1), 1e-4).why == "shape (3, 1) for (3,)"
    assert judged(torch.arange(9), torch.arange(9), 1e-4).passed
    assert not judged(torch.arange(9), torch.arange(9) + 1, 1e-4).passed
