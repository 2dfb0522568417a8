"""The float64 oracle, checked against exact rationals: eval/operators/compare/oracle.py."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy
import pytest
import torch

from kbsub.eval.operators.compare import oracle
from kbsub.eval.operators.compare.oracle import OracleError, error_of, model_in_float64, nearer
from kbsub.eval.operators.layer_norm.formula import layer_norm
from kbsub.eval.operators.layer_norm.operator import OPERATOR

F32_MAX = float(torch.finfo(torch.float32).max)

# name, values of one row, eps; each row is read as fp32 first
ROWS = (
    ("small integers", [1, 2, 3, 4], 1e-5),
    ("noise around 2000", [2000.5, 1999.25, 2000.125, 1998.75], 1e-5),
    ("around 1e5", [100000.0, 100000.0078125, 99999.9921875, 100001.0], 1e-5),
    ("first element an outlier", [1e6, 0.5, -0.25, 0.125, 1.0, -1.0], 1e-5),
    ("alternating 1e18", [1e18, -1e18] * 3, 1e-5),
    ("near-constant 8e37", [8e37, 8.00001e37, 8.00002e37, 8e37], 1e-5),
    ("subnormal", [1e-40, -2e-40, 3e-41, 0.0], 1e-5),
    ("subnormal, no eps", [1e-40, -2e-40, 3e-41, 0.0], 0.0),
    ("constant", [-3.7] * 5, 1e-5),
    ("one element", [4.0], 1e-3),
    ("odd width", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], 1e-3),
    ("tiny eps", [0.1, 0.1, 0.1, 0.1000001], 1e-12),
)


def exact_root(value: Fraction) -> Fraction:
    """The square root to 60 digits below its leading one, from integers alone."""
    scale = 10**60
    shift = 0
    while value * scale * 4**shift < scale:
        shift += 1
    return Fraction(math.isqrt(math.floor(value * scale**2 * 4**shift)), scale * 2**shift)


def exact_rows(x, gamma, beta, eps):
    """y of one row in exact rationals, the root excepted (60 digits)."""
    numbers = [Fraction(float(each)) for each in x]
    mean = sum(numbers) / len(numbers)
    variance = sum((each - mean) ** 2 for each in numbers) / len(numbers)
    root = exact_root(variance + Fraction(eps))
    scaled = [Fraction(float(g)) * (each - mean) / root for each, g in zip(numbers, gamma, strict=True)]
    return scaled, [each + Fraction(float(b)) for each, b in zip(scaled, beta, strict=True)]


@pytest.mark.parametrize(("name", "values", "eps"), ROWS, ids=[row[0] for row in ROWS])
def test_the_formula_agrees_with_exact_rationals(name, values, eps):
    x = torch.tensor([values], dtype=torch.float32)
    generator = torch.Generator().manual_seed(9)
    gamma, beta = torch.randn(2, x.shape[1], generator=generator)
    got = layer_norm(x, gamma, beta, eps, (x.shape[1],)).y[0].tolist()
    scaled, exact = exact_rows(x[0], gamma, beta, eps)
    for index, (mine, truth) in enumerate(zip(got, exact, strict=True)):
        # A few float64 roundings of the summands; 2^-29 below an fp32 rounding.
        allowed = 16 * 2.0**-53 * (abs(float(scaled[index])) + abs(float(beta[index])))
        off = abs(Fraction(mine) - truth)
        assert off <= allowed, f"{name}[{index}]: {mine!r}, exactly {float(truth)!r}, off by {float(off):.3g}"


def test_it_never_calls_torchs_layer_norm(monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("the oracle must not call what is being judged")

    for owner, name in ((torch, "layer_norm"), (torch, "native_layer_norm"), (torch.nn.functional, "layer_norm")):
        monkeypatch.setattr(owner, name, forbidden)
    model = torch.nn.Sequential(torch.nn.LayerNorm(4))
    y = OPERATOR.truth(model, [torch.tensor([[1.0, 2.0, 3.0, 4.0]])]).y
    assert y[0, 3] == pytest.approx(1.5 / math.sqrt(1.25 + 1e-5), rel=1e-14)


def test_rows_wider_and_shorter_than_a_chunk_agree(monkeypatch):
    x = torch.randn(5, 3, 37, generator=torch.Generator().manual_seed(1)) + 1e4
    weight, bias = torch.randn(2, 3, 37, generator=torch.Generator().manual_seed(2))
    whole = layer_norm(x, weight, bias, 1e-5, (3, 37)).y
    for chunk in (16, 200):  # columns of one row; a few rows
        monkeypatch.setattr(oracle, "CHUNK_ELEMENTS", chunk)
        torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5, (3, 37)).y, whole, rtol=1e-13, atol=1e-13)


def test_the_answer_rounded_to_fp32_meets_every_bound_even_in_chunks(monkeypatch):
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(3)) * 3 + 1000
    weight, bias = torch.randn(2, 50, generator=torch.Generator().manual_seed(4))
    truth = layer_norm(x, weight, bias, 1e-5, (50,))
    for chunk in (1 << 22, 33):  # 33: chunks that begin inside a row and end inside another
        monkeypatch.setattr(oracle, "CHUNK_ELEMENTS", chunk)
        found = error_of(truth, truth.y.float())
        assert found.allclose and found.max_ulp <= 0.5 and 0 < found.bound_ratio <= 0.2, found


def test_the_bound_is_five_roundings_of_the_summands():
    weight, bias = torch.full((2,), 3.0), torch.full((2,), -3.0)
    truth = layer_norm(torch.tensor([[1.0, -1.0]]), weight, bias, 0.0, (2,))
    assert truth.y.tolist() == [[0.0, -6.0]]  # gamma z and beta cancel: the bound is on 3 + 3, not on 0
    allowed = 5 * 2.0**-24 * 6
    for share, met in ((0.9, True), (1.1, False)):
        output = torch.tensor([[allowed * share, -6.0]])
        assert (error_of(truth, output).bound_ratio <= 1) is met


def test_an_output_that_is_not_finite_where_the_answer_is_has_infinite_error():
    truth = layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), None, None, 1e-5, (3,))
    found = error_of(truth, torch.tensor([[math.nan, 0.0, math.inf]]))
    assert found.max_abs == math.inf and found.special_mismatches == 2 and not found.allclose


def test_an_answer_above_the_largest_fp32_number_is_infinity():
    weight = torch.tensor([F32_MAX, F32_MAX])
    truth = layer_norm(torch.tensor([[1.0, -1.0]]), weight, weight, 0.0, (2,))
    assert truth.y[0, 0] == 2 * F32_MAX
    assert error_of(truth, torch.tensor([[math.inf, 0.0]])).special_mismatches == 0


@pytest.mark.parametrize(
    ("scale", "eps", "overflows"), [(1e-40, 0.0, True), (1e-40, 1e-5, False), (1.0, 0.0, False), (0.0, 0.0, False)]
)
def test_rstd_above_the_largest_fp32_number_is_noticed(scale, eps, overflows):
    x = torch.tensor([[1.0, 2.0, 3.0, 5.0]]) * scale
    assert layer_norm(x, None, None, eps, (4,)).rstd_overflows is overflows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ulp_is_the_spacing_of_the_dtype(dtype):
    values = [0.0, 1.0, 1.5, -2.0, 1000.0, float(torch.finfo(dtype).tiny), float(torch.finfo(dtype).tiny) / 2]
    got = oracle.ulp(torch.tensor(values, dtype=torch.float64), dtype).tolist()
    below = [abs(value) for value in values]
    if dtype == torch.bfloat16:  # numpy has none: 16 bits above fp32's spacing
        expected = [max(float(numpy.spacing(numpy.float32(v))) * 2.0**16, 2.0**-133) for v in below]
    else:
        kind = numpy.float32 if dtype == torch.float32 else numpy.float16
        expected = [float(numpy.spacing(kind(v))) for v in below]
    assert got == expected


class WithActivation(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln = torch.nn.LayerNorm(6)

    def forward(self, x):
        return torch.relu(self.ln(x))


@pytest.mark.parametrize(
    ("model", "one"),
    [
        (torch.nn.Sequential(torch.nn.LayerNorm(6)), True),
        (torch.nn.LayerNorm((2, 3), elementwise_affine=False), True),
        (torch.nn.Sequential(torch.nn.LayerNorm(6), torch.nn.LayerNorm(6)), False),
        (torch.nn.Linear(6, 6), False),
    ],
)
def test_a_task_that_declares_layer_norm_for_another_model_is_refused(model, one):
    x = torch.ones(2, 2, 3) if isinstance(model, torch.nn.LayerNorm) else torch.ones(2, 6)
    if one:
        assert OPERATOR.truth(model, [x]).normalised
    else:
        with pytest.raises(OracleError, match="not one LayerNorm"):
            OPERATOR.truth(model, [x])


def test_any_other_task_is_answered_by_its_own_model_in_float64():
    model = torch.nn.Linear(3, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(8))
    truth = model_in_float64(model, [x])
    expected = x.double() @ model.weight.double().T + model.bias.double()
    torch.testing.assert_close(truth.y, expected, rtol=1e-15, atol=1e-15)
    assert model.weight.dtype == torch.float32, "the task's own model is left as it was"
    assert math.isnan(error_of(truth, model(x)).bound_ratio), "the LayerNorm bound has no meaning here"


def test_nearer_counts_special_values_before_distances():
    truth = layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), None, None, 1e-5, (3,))
    exact, off = truth.y.float(), truth.y.float() + 0.5
    broken = exact.clone()
    broken[0, 0] = math.nan
    errors = [error_of(truth, each) for each in (exact, off, broken)]
    assert nearer(errors[0], errors[1]) == "reference"
    assert nearer(errors[2], errors[1]) == "candidate"
    assert nearer(errors[0], errors[0]) == "equal"


def test_of_equal_largest_errors_the_one_within_the_tolerance_is_nearer():
    """In half the largest outputs of both round alike; one of the two may still have lost all of the small ones."""
    truth = layer_norm(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), None, None, 1e-5, (4,))
    near, far = truth.y.float(), truth.y.float()
    near[0, 0] -= 1e-5
    far[0, 1] -= 1e-5
    near, far = (error_of(truth, each) for each in (near, far))
    near, far = replace(near, max_abs=1e-5, allclose=True), replace(far, max_abs=1e-5, allclose=False)
    assert nearer(far, near) == "candidate"
    assert nearer(near, far) == "reference"
