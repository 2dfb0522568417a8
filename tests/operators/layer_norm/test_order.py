"""The NumPy model of the reference order: its fma is exact, its contractions are nvcc's, the kernels agree with it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbsub.eval.host_executor import H200_LIMITS, RTX3090_LIMITS, RTX4090_LIMITS, SMALL_LIMITS, Limits, host_namespace
from kbsub.eval.operators.layer_norm import order as contract
from support.host_run import DTYPES, cuda_candidates, disagreement, drawn, source_of
from support.ptx import expressions, ptx_of

BIT_IDENTICAL = cuda_candidates("bit-identical")


def examples(count: int) -> settings:
    """The same examples on every machine and in every run; one may take long (a compile)."""
    unhealthy = list(HealthCheck)
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=unhealthy)


BITS = st.integers(0, 2**32 - 1)
# Exponents close to each other, so that sums cancel, round and reach the subnormals: uniform bits almost never do.
NEAR = st.builds(
    lambda sign, exponent, fraction: sign << 31 | exponent << 23 | fraction,
    st.integers(0, 1), st.integers(0, 3) | st.integers(100, 130),
    st.integers(0, 2**23 - 1) | st.sampled_from([0, 1, 2**23 - 1]),
)  # fmt: skip


def float32_of(bits: int) -> np.float32:
    return np.uint32(bits).view(np.float32)


def rounded_to_fp32(exact: Fraction) -> float:
    """The fp32 number nearest to a rational, ties to even, as a Python float (infinite beyond the range)."""
    if exact == 0:
        return 0.0
    magnitude = abs(exact)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    quotient, rest = divmod(magnitude, unit)
    quotient += rest * 2 > unit or (rest * 2 == unit and quotient % 2 == 1)
    value = quotient * unit
    result = float("inf") if value >= Fraction(2) ** 128 else float(value)
    return result if exact > 0 else -result


@examples(1500)
@given(st.one_of(BITS, NEAR), st.one_of(BITS, NEAR), st.one_of(BITS, NEAR))
def test_fma_is_rounded_once(a: int, b: int, c: int) -> None:
    x, y, z = (float32_of(bits) for bits in (a, b, c))
    with np.errstate(all="ignore"):
        got = float(contract.fma(np.array([x]), np.array([y]), np.array([z]))[0])
        if not all(np.isfinite(v) for v in (x, y, z)):
            special = float(np.float64(x) * np.float64(y) + np.float64(z))
            assert got == special or (np.isnan(got) and np.isnan(special))
            return
    expected = rounded_to_fp32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
    assert got == expected, (x.item().hex(), y.item().hex(), z.item().hex(), got.hex(), expected.hex())


def test_fma_where_rounding_twice_goes_wrong() -> None:
    # The exact sum lies 2^-70 below the middle between c and its upper neighbour; fp64 rounds it onto the middle,
    # and from there the second rounding goes up, to the even one.
    a, b, c = (np.array([v], np.float32) for v in (2.0**-24 * (1 - 2.0**-23), 1 + 2.0**-23, 1 + 2.0**-23))
    twice = np.float32(a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))
    assert twice == 1 + 2.0**-22
    assert contract.fma(a, b, c) == 1 + 2.0**-23


# ---- the contractions of nvcc, read from the PTX of the published operations ----
PLAIN = """
extern "C" __global__ void k(const float* p, float* out)
{
    const float a_count = p[0], a_mean = p[1], a_m2 = p[2], b_count = p[3], b_mean = p[4], b_m2 = p[5];
    const float delta = b_mean - a_mean, n = a_count + b_count, c = 1.f / n, a = a_count * c, b = b_count * c;
    out[0] = a * a_mean + b * b_mean;
    out[1] = a_m2 + b_m2 + delta * delta * a_count * b;
    const float x = p[6], gamma = p[7], beta = p[8], rstd = p[9];
    out[2] = gamma * (rstd * (x - a_mean)) + beta;
    const float mean = a_mean + (x - a_mean) * (1.f / b_count);
    out[3] = mean;
    out[4] = a_m2 + (x - a_mean) * (x - mean);
}
"""
WRITTEN = """
extern "C" __global__ void k(const float* p, float* out)
{
    const float a_count = p[0], a_mean = p[1], a_m2 = p[2], b_count = p[3], b_mean = p[4], b_m2 = p[5];
    const float delta = __fsub_rn(b_mean, a_mean), n = __fadd_rn(a_count, b_count), c = __frcp_rn(n);
    const float a = __fmul_rn(a_count, c), b = __fmul_rn(b_count, c);
    out[0] = __fmaf_rn(a, a_mean, __fmul_rn(b, b_mean));
    out[1] = __fmaf_rn(__fmul_rn(__fmul_rn(delta, delta), a_count), b, __fadd_rn(a_m2, b_m2));
    const float x = p[6], gamma = p[7], beta = p[8], rstd = p[9];
    out[2] = __fmaf_rn(gamma, __fmul_rn(rstd, __fsub_rn(x, a_mean)), beta);
    const float mean = __fmaf_rn(__fsub_rn(x, a_mean), __frcp_rn(b_count), a_mean);
    out[3] = mean;
    out[4] = __fmaf_rn(__fsub_rn(x, a_mean), __fsub_rn(x, mean), a_m2);
}
"""


def test_written_contractions_are_those_nvcc_makes() -> None:
    plain, written = expressions(ptx_of(PLAIN)), expressions(ptx_of(WRITTEN))
    assert len(plain) == 5 and plain == written


# ---- kernels on the host against the model ----
KINDS = ("normal", "offset", "huge", "tiny", "constant", "subnormal", "bits", "special")
LARGE = (2047, 2048, 2049, 4096, 5168, 12_001, 16_500, 33_000)
VECTORS = st.integers(1, 40) | st.integers(41, 1100) | st.sampled_from(LARGE)
DEVICES = st.sampled_from([H200_LIMITS, RTX3090_LIMITS, RTX4090_LIMITS, SMALL_LIMITS])


@pytest.mark.parametrize("stem", BIT_IDENTICAL)
def test_kernel_equals_the_model(stem: str) -> None:
    source, precisions = source_of(stem), BIT_IDENTICAL[stem]
    spaces: dict[tuple[Limits, int], dict[str, Any]] = {}

    @examples(80)
    @given(VECTORS, st.integers(1, 5), st.sampled_from(KINDS), st.sampled_from(precisions), st.integers(0, 99), DEVICES,
           st.sampled_from([0, 1, 7]), st.sampled_from([1e-5, 0.0, 1e-3]))  # fmt: skip
    def agrees(
        vectors: int, rows: int, kind: str, precision: str, seed: int, limits: Limits, order: int, eps: float
    ) -> None:
        rows = min(rows, max(1, 20_000 // vectors))
        if (limits, order) not in spaces:
            spaces[limits, order] = host_namespace(source, limits, seed=order, workers=1)
        dtype, n = DTYPES[precision], 4 * vectors
        model = spaces[limits, order]["ModelNew"]((n,)).to(dtype)
        with torch.no_grad():
            model.ln.weight.copy_(drawn("normal", 1, n, seed + 1)[0])
            model.ln.bias.copy_(drawn("normal", 1, n, seed + 2)[0])
        wrong = disagreement(model, drawn(kind, rows, n, seed).to(dtype), eps)
        assert not wrong, "\n".join(wrong)

    agrees()
