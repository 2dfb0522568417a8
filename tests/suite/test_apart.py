"""`apart`: where native's own error is of the tolerance's size, another order is not failed; a wrong file or one of
lower precision is."""

from __future__ import annotations

import functools

import pytest
import torch

from kbsub.eval.operators.compare.oracle import Truth, error_of, spread_of
from kbsub.eval.operators.compare.predicate import compare
from kbsub.eval.suite import checks
from kbsub.eval.suite.classes import Question, classify
from kbsub.eval.suite.questions import rounds_to_tf32
from kbsub.eval.tasks.cases import APART, FAIL, NEARER, PASS


def tf32(x, *, truncated=False):
    """Ten explicit bits of 23, to the nearest or cut off."""
    return (x.view(torch.int32) + (0 if truncated else 1 << 12) >> 13 << 13).view(torch.float32)


def in_order(a, b, dtype=torch.float32):
    """Products summed one after the other."""
    a, b = a.to(dtype), b.to(dtype)
    total = torch.zeros(a.shape[0], b.shape[1], dtype=dtype)
    for k in range(a.shape[1]):
        total += a[:, k : k + 1] * b[k : k + 1]
    return total.float()


def cut(x, dtype):
    return x.to(dtype).float()


DOTS = {
    "another order": lambda a, b: in_order(tf32(a), tf32(b)),
    "cut operands": lambda a, b: tf32(a, truncated=True) @ tf32(b, truncated=True),
    "fp16 operands": lambda a, b: cut(a, torch.float16) @ cut(b, torch.float16),
    "full fp32": lambda a, b: a @ b,
    "bf16 operands": lambda a, b: cut(a, torch.bfloat16) @ cut(b, torch.bfloat16),
    "fp16 sums": lambda a, b: in_order(a, b, torch.float16),
    "0.1 % off": lambda a, b: 1.001 * (tf32(a) @ tf32(b)),
    "a product left out": lambda a, b: tf32(a[:, 1:]) @ tf32(b[1:]),
    "one element off": lambda a, b: (tf32(a) @ tf32(b)).index_fill_(1, torch.tensor([3]), 0.0),
}
OF_A_DOT = {
    "another order": (APART, NEARER),
    "cut operands": (APART,),
    "fp16 operands": (APART,),
    "full fp32": (NEARER,),
}


@functools.cache
def dot():
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(96, 576, generator=generator)
    return a, (torch.rand(576, 64, generator=generator) * 2 - 1) / 576**0.5


def classed(truth, native, output, *, reduced=False, undeclared=True):
    answer = Truth(truth, None, False)
    question = Question(None, None, [], native, answer, "", error_of(answer, native), rounds_operands=reduced)
    how = {"strict": False, "accurate": False, "undeclared": undeclared}
    return classify(question, output, compare(native, output), error_of(answer, output), **how)


@pytest.mark.parametrize("name", DOTS)
def test_where_native_rounds_its_operands_the_same_rounding_is_apart_and_a_coarser_one_fails(name):
    a, b = dot()
    native, output = tf32(a) @ tf32(b), DOTS[name](a, b)
    class_, reason = classed(a.double() @ b.double(), native, output, reduced=True)
    expected = OF_A_DOT.get(name, (FAIL,))
    near = class_ == PASS and compare(native, output).allclose  # the same operands: nearly the same bits
    assert class_ in expected or (near and APART in expected), (class_, reason)
    if class_ == APART:
        assert "rounds its operands to TF32" in reason


@pytest.mark.parametrize("name", DOTS)
def test_where_native_is_full_fp32_no_lower_precision_is_apart(name):
    a, b = dot()
    class_, _ = classed(a.double() @ b.double(), a @ b, DOTS[name](a, b))
    assert class_ == (PASS if name == "full fp32" else FAIL)


def test_a_file_a_little_nearer_than_native_is_no_worse_off_than_one_a_little_further():
    truth = torch.linspace(-1, 1, 1000).double()
    sign = torch.tensor([1.0, -1.0]).repeat(500)
    native = (truth + 1e-3 * sign).float()
    for size in (0.9e-3, 1.1e-3):
        assert classed(truth, native, (truth - size * sign).float())[0] == APART
        assert classed(truth, native, (truth - size * sign).float(), undeclared=False)[0] == FAIL


@functools.cache
def norm():
    x = torch.randn(4, 16384, generator=torch.Generator().manual_seed(1)) + 1e4
    native = torch.nn.functional.layer_norm(x, (16384,))
    return x, torch.nn.functional.layer_norm(x.double(), (16384,)), native


def normalised(x, mean):
    away = x - mean
    return away / torch.sqrt((away * away).mean(1, keepdim=True) + 1e-5)


def test_a_norm_in_two_passes_is_apart_and_one_in_one_pass_fails():
    x, truth, native = norm()
    mean = x.reshape(4, 64, 256).sum(1).sum(1, keepdim=True) / 16384
    assert classed(truth, native, normalised(x, mean))[0] in (APART, NEARER, PASS)
    one_pass = ((x * x).mean(1, keepdim=True) - mean * mean).clamp_min(0)
    assert classed(truth, native, (x - mean) / torch.sqrt(one_pass + 1e-5))[0] == FAIL


def test_one_bad_element_of_native_excuses_no_others_and_a_large_one_no_small_ones():
    truth = torch.linspace(-1, 1, 4096).double()
    native = truth.float()
    native[7] += 1e-2
    assert classed(truth, native, (truth + 5e-3).float())[0] == FAIL  # all of them, by less than native's largest
    moved = truth.float()
    moved[7] -= 1e-2
    assert classed(truth, native, moved)[0] == APART  # as far on the other side
    truth[0], native = 1e6, truth.float()
    native[0], native[7] = 1e6 + 1, native[7] + 2e-4
    wrong = truth.float()
    wrong[9] += 0.9  # less than native's error at the element of 1e6
    assert classed(truth, native, wrong)[0] == FAIL


def test_the_tf32_of_a_reference_is_found_by_asking_it_without(monkeypatch):
    a, b = dot()

    class Model(torch.nn.Module):
        def __init__(self, honours):
            super().__init__()
            self.honours, self.weight = honours, torch.nn.Parameter(b, requires_grad=False)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            reduced = torch.backends.cudnn.allow_tf32 or not self.honours
            return tf32(x) @ tf32(self.weight) if reduced else x @ self.weight

    truth = Truth(a.double() @ b.double(), None, False)
    for allowed, honours, found in ((True, True, True), (True, False, False), (False, True, False)):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        model = Model(honours)
        assert rounds_to_tf32(model, [a], truth) is found
        assert torch.backends.cudnn.allow_tf32 is allowed and float(model.calls) == 0


def test_a_check_of_a_file_nearer_than_native_does_not_fail_it_for_native_s_error():
    """A file in full fp32 beside a convolution in TF32: after many calls it is as far from native as it was before."""
    a, b = dot()
    rounded = torch.nn.Linear(576, 64, bias=False)
    rounded.weight = torch.nn.Parameter(b.T.contiguous(), requires_grad=False)
    rounded.forward = lambda x: tf32(x) @ tf32(b)
    expected = rounded(a)
    for model, problem in ((lambda x: x @ b, None), (Stale(b), "after 3 calls new contents are answered wrongly")):
        output = model(a)
        slack = spread_of(expected, output)[0]
        scene = checks.Scene(rounded, model, [a], expected, output, strict=False, calls=3, slack=slack)
        found = checks.after_1000_calls(scene)
        assert (found or "").startswith(problem or "") and bool(found) is bool(problem), found
        holed = output.clone()
        holed[0, 0] = torch.nan
        assert checks._differs(scene, expected, output) is None and checks._differs(scene, expected, holed)


class Stale:
    """Its first answer for ever."""

    def __init__(self, b):
        self.b, self.kept = b, None

    def __call__(self, x):
        self.kept = x @ self.b if self.kept is None else self.kept
        return self.kept
