"""pixel_order.py divides by a rounded reciprocal and corrects once: the proof that every quotient is rounded once.

x and d are fp32 numbers, here integers of 24 bits over 2^23: nothing on the way leaves the normal numbers, so their
exponents do not matter. r = RN(1/d), q = RN(x r), e = RN(x - d q), y = RN(q + e r). In units of the last place of x/d:

- |1/d - r| <= 2^-25, as 1/d is in (1/2, 1]. So |x/d - q| <= 3/2 for x < d and <= 1 for x >= d.
- e is exact, but for x < d, where it may have 25 bits: it is then off by less than 2^-24 of itself.
- q + e r = x/d + (x/d - q) (d r - 1) + what e is off, times r: within 3/2 2^-24 twice, 3 * 2^-24 in all, of x/d.

So y is RN(x/d) unless a tie M/2 (M odd) is as near to x/d as that. In units of the last place x/d is x 2^24 / d for
x < d, and x 2^23 / d otherwise, so a distance is |N| / (2 d) for the integer N = x 2^s - d M, s = 25 or 24; N is not 0,
since no quotient of two such numbers is a tie. |N| / (2 d) <= 3 * 2^-24 gives |N| <= 6 d 2^-24 < 6. All pairs of such
an N are found by modular inverses of 2^s, one to two million each; each is divided here, and each is right.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from support.paths import ROOT

Integers = npt.NDArray[np.int64]
FROM, TO = 1 << 23, 1 << 24
MOST = 5  # |N|
PARTS = 64  # of the divisors; `make test` takes one


def solutions(numerator: int, d: Integers, times: int) -> Integers:
    """x in [0, d) with x 2^times = numerator modulo d; d odd. Halving modulo d, `times` times."""
    x = np.mod(numerator, d)
    for _ in range(times):
        x = np.where(x & 1, x + d, x) >> 1
    return x


def near_ties(numerator: int, shift: int, divisors: Integers) -> tuple[Integers, Integers]:
    """All (x, d) of 24 bits with x 2^shift - d M = numerator, M odd; x < d where shift is 25, x >= d where it is 24."""
    twos = (numerator & -numerator).bit_length() - 1  # d has as many: 2^shift has more, and M has none
    d = divisors[(divisors & -divisors) == 1 << twos]
    odd = d >> twos
    least = solutions(numerator >> twos, odd, shift - twos)
    xs = np.concatenate([least + turn * odd for turn in range((2 << twos) + 1)])
    ds = np.tile(d, (2 << twos) + 1)
    kept = (xs >= FROM) & (xs < TO) & ((xs < ds) if shift == 25 else (xs >= ds))
    xs, ds = xs[kept], ds[kept]
    ties = ((xs << shift) - numerator) // ds
    assert (ties * ds + numerator == xs << shift).all() and (ties & 1).all()
    return xs, ds


def rounded_sum(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """a + b, rounded once to fp32: to odd in float64 first."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    bits = total.view(np.int64)
    odd = np.where((lost > 0) == (total > 0), bits | 1, bits - 1)
    return np.where((lost == 0) | (bits & 1 == 1), bits, odd).view(np.float64).astype(np.float32)


def quotients(x: Integers, d: Integers) -> list[npt.NDArray[np.float32]]:
    """[x / d rounded once, the product by the reciprocal, that corrected once], as the kernel's fp32 gives them."""
    of_x, of_d = (np.ldexp(each.astype(np.float32), -23) for each in (x, d))
    r = np.float32(1) / of_d
    q = of_x * r
    e = rounded_sum(of_x.astype(np.float64), -of_d.astype(np.float64) * q)  # the product is exact
    return [of_x / of_d, q, rounded_sum(q.astype(np.float64), e.astype(np.float64) * r)]


def parts() -> list[object]:
    return [pytest.param(part, marks=[] if part == 37 else [pytest.mark.slow]) for part in range(PARTS)]


@pytest.mark.parametrize("part", parts())
def test_every_quotient_near_a_tie_is_rounded_once(part: int) -> None:
    each = (TO - FROM) // PARTS
    divisors = np.arange(FROM + part * each, FROM + (part + 1) * each, dtype=np.int64)
    tried = uncorrected = 0
    for shift in (24, 25):
        for numerator in (n for n in range(-MOST, MOST + 1) if n):
            x, d = near_ties(numerator, shift, divisors)
            right, product, corrected = quotients(x, d)
            wrong = (corrected != right).nonzero()[0]
            assert not len(wrong), f"{len(wrong)} quotients are off, the first {x[wrong[0]]} / {d[wrong[0]]}"
            tried, uncorrected = tried + len(x), uncorrected + int((product != right).sum())
    assert tried > 200_000 and uncorrected > tried / 3, "these pairs would not show a quotient that is off"


def test_near_ties_are_all_found() -> None:
    """Beside a search of every x, for a few divisors."""
    divisors = np.array([FROM, FROM + 6, TO - 4, TO - 1], np.int64)
    numerators = [n for n in range(-MOST, MOST + 1) if n]
    some = False
    for shift in (24, 25):
        pairs = {n: near_ties(n, shift, divisors) for n in numerators}
        for d in divisors:
            x = np.arange(FROM, d, dtype=np.int64) if shift == 25 else np.arange(d, TO, dtype=np.int64)
            left = np.mod(x << shift, 2 * d) - d  # x 2^shift - d M for the nearest odd M
            for n in numerators:
                xs, ds = pairs[n]
                assert x[left == n].tolist() == sorted(xs[ds == d].tolist()), (n, d)
                some = some or n in left
    assert some


def test_the_kernel_divides_so() -> None:
    text = (ROOT / "submissions" / "level1_36" / "pixel_order.py").read_text("utf-8")
    assert "const float q = __fmul_rn(x, r);\n    return __fmaf_rn(__fmaf_rn(-d, q, x), r, q);" in text
