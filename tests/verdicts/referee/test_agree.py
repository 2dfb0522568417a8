"""What counts as an answer: what upstream's torch.allclose would take, and nothing else."""

from __future__ import annotations

import pytest
import torch

from kbsub.eval.verdicts.referee.agree import difference, spread

ONE = torch.arange(6.0).view(2, 3)
NAN = ONE / 0 * 0

# name: expected, got, words of the difference ("" where there is none)
PAIRS = {
    "the same": (ONE, ONE.clone(), ""),
    "within the tolerance": (ONE, ONE + 5e-5, ""),
    "beyond it": (ONE, ONE + 1e-2, "by up to 0.01"),
    "another layout": (ONE, ONE.t().contiguous().t(), ""),
    "another shape": (ONE, ONE.view(3, 2), "shape (3, 2)"),
    "that would broadcast": (ONE, ONE[:1], "shape (1, 3)"),
    "another dtype": (ONE, ONE.double(), "dtype torch.float64"),
    "NaN, as the reference": (NAN, NAN.clone(), "differs"),
    "a tuple for a tensor": (ONE, (ONE,), "a tuple"),
    "tuples": ((ONE, 3), (ONE.clone(), 3), ""),
    "a part of a tuple": ((ONE, ONE), (ONE, ONE + 1), "value 1: differs"),
    "another length": ((ONE, ONE), (ONE,), "not 2 values"),
    "a number for a tensor": (ONE, 1.0, "a float, not a tensor"),
    "another number": ((ONE, 3), (ONE, 4), "another value"),
    "an index off by one": (torch.tensor([20000]), torch.tensor([20001]), "differs from the reference by up to 1"),
    "equal integers": (torch.tensor([20000]), torch.tensor([20000]), ""),
    "other bools": (torch.tensor([True, False]), torch.tensor([True, True]), "differs"),
    "nothing in it": (ONE[:0], ONE[:0].clone(), ""),
}


@pytest.mark.parametrize("name", PAIRS)
def test_an_answer(name):
    expected, got, words = PAIRS[name]
    found = difference(expected, got, 1e-4)
    assert (found is None) == (not words) and words in (found or ""), found


def test_how_far_two_answers_of_the_reference_are_apart():
    assert spread(ONE, ONE.clone()) == 0.0
    assert spread((ONE, ONE), (ONE, ONE + 0.25)) == 0.25
