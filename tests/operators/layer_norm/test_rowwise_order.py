"""The NumPy model of PyTorch's other LayerNorm order: its contractions are nvcc's, its sums are near float64's."""

from __future__ import annotations

import numpy as np
import pytest

from kbsub.eval.operators.layer_norm import order, rowwise_order
from support.ptx import expressions, ptx_of

PLAIN = """
extern "C" __global__ void k(const float* p, float* out)
{
    const float a_nf = p[0], a_mean = p[1], a_m2 = p[2], b_nf = p[3], b_mean = p[4], b_m2 = p[5], nb_over_n = p[6];
    const float delta = b_mean - a_mean;
    out[0] = a_mean + delta * nb_over_n;
    out[1] = a_m2 + b_m2 + delta * delta * a_nf * nb_over_n;
    const float data = p[7], mean = p[8], m2 = p[9], quotient = p[10];
    const float new_mean = mean + quotient;
    out[2] = m2 + (data - mean) * (data - new_mean);
    const float rstd = p[11], gamma = p[12], beta = p[13];
    out[3] = (data - mean) * rstd * gamma + beta;
}
"""
WRITTEN = """
extern "C" __global__ void k(const float* p, float* out)
{
    const float a_nf = p[0], a_mean = p[1], a_m2 = p[2], b_nf = p[3], b_mean = p[4], b_m2 = p[5], nb_over_n = p[6];
    const float delta = __fsub_rn(b_mean, a_mean);
    out[0] = __fmaf_rn(delta, nb_over_n, a_mean);
    out[1] = __fmaf_rn(__fmul_rn(__fmul_rn(delta, delta), a_nf), nb_over_n, __fadd_rn(a_m2, b_m2));
    const float data = p[7], mean = p[8], m2 = p[9], quotient = p[10];
    const float new_mean = __fadd_rn(mean, quotient);
    out[2] = __fmaf_rn(__fsub_rn(data, mean), __fsub_rn(data, new_mean), m2);
    const float rstd = p[11], gamma = p[12], beta = p[13];
    out[3] = __fmaf_rn(__fmul_rn(__fsub_rn(data, mean), rstd), gamma, beta);
}
"""


def test_written_contractions_are_those_nvcc_makes() -> None:
    plain, written = expressions(ptx_of(PLAIN)), expressions(ptx_of(WRITTEN))
    assert len(plain) == 4 and plain == written


@pytest.mark.parametrize("n", [1, 2, 3, 31, 33, 511, 512, 513, 1023, 4099, 20_001])
def test_near_float64(n: int) -> None:
    draw = np.random.default_rng(n)
    x = (draw.standard_normal((3, n)) * 3 + 100).astype(np.float32)
    gamma, beta = (draw.standard_normal(n).astype(np.float32) for _ in range(2))
    got = rowwise_order.layer_norm(x, gamma, beta, 1e-5)
    wide = x.astype(np.float64)
    mean, var = wide.mean(1, keepdims=True), wide.var(1, keepdims=True)
    assert np.allclose(got.mean, mean[:, 0], rtol=1e-6)
    assert np.allclose(got.var, var[:, 0], rtol=1e-4, atol=1e-9)
    assert np.allclose(got.y, (wide - mean) / np.sqrt(var + 1e-5) * gamma + beta, atol=2e-3)


def test_one_element_a_thread_is_the_tree_alone() -> None:
    """512 elements: every chain is one element, so mean and M2 come from the merges; a different tree shows."""
    x = np.random.default_rng(1).standard_normal((16, 512)).astype(np.float32)
    groups = rowwise_order.chains(x)
    assert np.array_equal(groups.mean, x) and not groups.m2.any() and (groups.count == 1).all()
    got = rowwise_order.merge(groups)
    fields = groups.count, groups.mean, groups.m2
    moved = (f.reshape(16, 32, 16).swapaxes(1, 2).reshape(16, 512) for f in fields)
    neighbours = rowwise_order.merge(order.Moments(*moved))
    assert (got.count == 512).all()
    assert not np.array_equal(got.m2, neighbours.m2) and np.allclose(got.m2, neighbours.m2, rtol=1e-5)


def test_an_empty_group_gives_the_other_one_back() -> None:
    full = order.Moments(*(np.array([v], np.float32) for v in (3, -0.0, 7)))
    none = order.Moments(*(np.zeros(1, np.float32) for _ in range(3)))
    for merged in (rowwise_order.combine(full, none), rowwise_order.combine(none, full)):
        assert np.signbit(merged.mean[0]) and merged.m2[0] == 7 and merged.count[0] == 3


def test_where_the_two_orders_differ_their_bits_do() -> None:
    x = np.random.default_rng(2).standard_normal((4, 4096)).astype(np.float32)
    ones, zeros = np.ones(4096, np.float32), np.zeros(4096, np.float32)
    here, vectorised = (m.layer_norm(x, ones, zeros, 1e-5) for m in (rowwise_order, order))
    assert not np.array_equal(here.mean, vectorised.mean)
    assert np.abs(here.mean - vectorised.mean).max() < 1e-6


def test_which_rows_go_this_way() -> None:
    assert not rowwise_order.taken(1024, 4, (64, 128, 256, 512))
    assert rowwise_order.taken(1023, 4, (64, 128, 256, 512))
    assert rowwise_order.taken(1024, 4, (64, 128, 256, 516)) and rowwise_order.taken(1024, 2, (64, 132, 256, 512))
    assert rowwise_order.taken(2**24 + 4, 4, (64, 128, 256, 512)) and not rowwise_order.taken(2**24, 2, (8, 8, 8, 8))


def test_a_reciprocal_of_two_words_divides_right() -> None:
    """q = fma(d, hi, d * lo) with hi + lo near 1 / n: d / n, correctly rounded, for every n up to 2^21.

    That is rows of 2^30 elements; beyond, the bound no longer holds.

    d / n is no midpoint of two fp32 numbers (that has 25 significant bits and would have to divide d's 24 times a
    power of two), and |d / n - midpoint| is at least 2^-25 / n of it: the numerators differ by at least one. So an
    error below that, relative, before the one rounding cannot change the result. Its bound is worked out for every n.
    """
    n = np.arange(1, 2**21 + 1, dtype=np.float64)
    hi = (np.float32(1) / n.astype(np.float32)).astype(np.float64)
    rest = 1 - n * hi  # exact: 46 bits of product, and the leading ones cancel
    lo = (hi * rest).astype(np.float32).astype(np.float64)  # as __fmul_rn(hi, __fmaf_rn(-n, hi, 1))
    assert np.array_equal(rest.astype(np.float32).astype(np.float64), rest), "the fma that makes `rest` is exact"
    of_words = np.abs(1 - n * hi - n * lo)  # relative to 1 / n; n * lo has 46 bits, the difference a few in common
    of_product = 2.0**-24 * np.abs(n * lo)  # d * lo is rounded
    slack = (of_words + of_product) * (1 + 2.0**-20) * n * 2.0**25
    assert slack.max() < 1, (int(n[slack.argmax()]), slack.max())
    # and so it comes out, where the device's operations are NumPy's
    draw = np.random.default_rng(3)
    d = (draw.standard_normal(200_000) * np.exp2(draw.integers(-60, 100, 200_000))).astype(np.float32)
    at = draw.integers(1, 2**21, 200_000)
    words = hi[at - 1].astype(np.float32), lo[at - 1].astype(np.float32)
    assert np.array_equal(order.fma(d, words[0], d * words[1]), d / at.astype(np.float32))
