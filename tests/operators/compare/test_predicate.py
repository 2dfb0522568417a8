"""The official predicate as a value: eval/operators/compare/predicate.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbsub.eval.operators.compare import predicate
from kbsub.eval.operators.compare.predicate import PredicateError, compare, same_bits

NAN, INF = math.nan, math.inf

# |r - c| = 1.00005e-4 lies between atol = 1e-4 (all that a reference of 0 allows) and 1e-4 * (1 + |c|).
WITNESS = (torch.tensor([0.0]), torch.tensor([1.00005e-4]))

# reference, candidate, field, value
SPECIALS = (
    ([1.0, NAN, 2.0], [1.0, NAN, 2.0], "allclose", True),
    ([1.0, NAN, 2.0], [1.0, 3.0, 2.0], "nan_mismatches", 1),
    ([1.0, 3.0, 2.0], [NAN, NAN, 2.0], "nan_mismatches", 2),
    ([INF, 1.0], [1.0, 1.0], "posinf_mismatches", 1),
    ([1.0, 1.0], [1.0, -INF], "neginf_mismatches", 1),
    ([INF], [-INF], "special_mismatches", 2),  # one +Inf and one -Inf out of place
    ([INF, -INF], [INF, -INF], "allclose", True),
    ([0.0, 1.0, 2.0], [0.0, 1.5, 2.5], "failing", 2),
    ([1.0, INF], [1.0, 1.0], "failing", 0),  # an infinity out of place is no failing *finite* element
    ([0.0], [-0.0], "identical", False),  # equal, but other bits
    ([0.0], [-0.0], "allclose", True),
)


def test_the_witness_passes_one_way_and_fails_the_other():
    reference, candidate = WITNESS
    found = compare(reference, candidate)
    assert torch.allclose(reference, candidate, atol=1e-4, rtol=1e-4), "the official order"
    assert not torch.allclose(candidate, reference, atol=1e-4, rtol=1e-4), "the other order"
    assert (found.allclose, found.allclose_swapped) == (True, False)
    assert found.ratio < 1.0 < found.ratio_swapped
    turned = compare(candidate, reference)
    assert (turned.allclose, turned.ratio) == (False, found.ratio_swapped)


@pytest.mark.parametrize(("reference", "candidate", "field", "value"), SPECIALS)
def test_special_values(reference, candidate, field, value):
    found = compare(torch.tensor(reference), torch.tensor(candidate))
    assert getattr(found, field) == value, found


def test_without_equal_nan_a_nan_never_passes():
    nan = torch.tensor([NAN])
    assert not compare(nan, nan, equal_nan=False).allclose


def test_any_nan_is_identical_to_any_nan_and_its_payload_is_reported_apart():
    reference = torch.tensor([0x7FC00000, 0x3F800000], dtype=torch.int32).view(torch.float32)
    candidate = torch.tensor([0x7FC00001, 0x3F800000], dtype=torch.int32).view(torch.float32)
    found = compare(reference, candidate)
    assert (found.identical, found.nan_payload_differences, found.bit_equal) == (True, 1, 0.5)
    assert same_bits(reference, candidate)
    assert not same_bits(reference, candidate, any_nan=False)


def test_the_worst_element_has_its_index_and_both_values():
    reference = torch.zeros(3, 4, 5)
    candidate = reference.clone()
    candidate[2, 1, 3], candidate[0, 0, 0] = -0.5, 0.25
    worst = compare(reference, candidate).worst
    assert (worst.index, worst.reference, worst.candidate) == ((2, 1, 3), 0.0, -0.5)


def test_a_special_value_out_of_place_is_worse_than_any_finite_error():
    candidate = torch.tensor([1e30, NAN, 5.0])
    assert compare(torch.zeros(3), candidate).worst.index == (1,)


def test_ratio_is_the_share_of_the_budget():
    found = compare(torch.tensor([10.0]), torch.tensor([20.0]), atol=1.0, rtol=0.1)
    assert found.ratio == pytest.approx(10 / (1 + 0.1 * 20))
    assert found.ratio_swapped == pytest.approx(10 / (1 + 0.1 * 10))


def test_differences_that_overflow_fp32_are_finite_ratios_and_fail():
    found = compare(torch.tensor([3e38]), torch.tensor([-3e38]))
    assert not found.allclose and math.isfinite(found.ratio) and found.failing == 1


VALUES = st.one_of(
    st.sampled_from([0.0, -0.0, NAN, INF, -INF, 1e-45, 3.4e38, 1e-4, 1.0001e-4]),
    st.floats(width=32, allow_nan=True, allow_infinity=True),
)


@settings(max_examples=150, deadline=None)
@given(
    pairs=st.lists(st.tuples(VALUES, st.sampled_from([0.0, 5e-5, 1e-4, 1.9e-4, -2e-4, 1.0])), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    equal_nan=st.booleans(),
)
def test_the_booleans_are_those_of_torch_allclose(pairs, dtype, equal_nan):
    reference = torch.tensor([value for value, _ in pairs]).to(dtype)
    candidate = torch.tensor([value * (1 + shift) + shift for value, shift in pairs]).to(dtype)
    tolerance = predicate.OFFICIAL_TOLERANCE[dtype]
    found = compare(reference, candidate, equal_nan=equal_nan)
    words = {"atol": tolerance, "rtol": tolerance, "equal_nan": equal_nan}
    assert found.allclose == torch.allclose(reference, candidate, **words)
    assert found.allclose_swapped == torch.allclose(candidate, reference, **words)


def test_chunks_change_nothing_and_no_chunk_is_larger_than_said(monkeypatch):
    generator = torch.Generator().manual_seed(5)
    reference = torch.randn(7, 31, generator=generator)
    candidate = reference + 1e-4 * torch.randn(7, 31, generator=generator)
    candidate[6, 30] = NAN
    whole = compare(reference, candidate)
    sizes = []
    isclose = torch.isclose
    monkeypatch.setattr(predicate, "CHUNK_ELEMENTS", 16)
    monkeypatch.setattr(torch, "isclose", lambda a, b, **kw: sizes.append(a.numel()) or isclose(a, b, **kw))
    assert repr(compare(reference, candidate)) == repr(whole)
    assert max(sizes) == 16 and sum(sizes) == 2 * reference.numel()


@pytest.mark.parametrize("empty", [(0,), (0, 3), (4, 0)])
def test_an_empty_pair_is_close_and_identical(empty):
    found = compare(torch.empty(empty), torch.empty(empty))
    assert found.allclose and found.identical and found.bit_equal == 1.0 and found.worst is None


@pytest.mark.parametrize(
    ("candidate", "word"),
    [(torch.zeros(2), "shape"), (torch.zeros(3, dtype=torch.float16), "dtype")],
)
def test_what_cannot_be_compared_is_named(candidate, word):
    with pytest.raises(PredicateError, match=word):
        compare(torch.zeros(3), candidate)


def test_the_record_is_json_and_says_equal_nan():
    import json

    record = compare(torch.tensor([1.0, INF]), torch.tensor([1.0, NAN])).to_json()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["equal_nan"] is True and record["worst"]["candidate"] == "nan"


@pytest.mark.gpu
def test_cuda_tensors_give_the_same_comparison():
    generator = torch.Generator().manual_seed(6)
    reference = torch.randn(1000, generator=generator)
    candidate = reference + 1e-4 * torch.randn(1000, generator=generator)
    candidate[3], reference[5] = NAN, INF
    assert repr(compare(reference.cuda(), candidate.cuda())) == repr(compare(reference, candidate))
