"""The level-2 studies: the collapses of problems 51 and 14, the tails of 53, 81 and 95, on the host executor.

test_rules.py has the rules that hold for every file.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kbsub.eval.host_executor import SMALL_LIMITS, host_namespace, kernel_names, poisoned
from kbsub.eval.tasks.declarations import read_declarations
from support.paths import ROOT

torch.set_num_threads(1)  # tiny tensors: thread pools only wait for each other
TASKS = ("level2_51", "level2_14", "level2_53", "level2_81", "level2_95")
SOURCES = {
    (task, stem): (ROOT / "submissions" / task / f"{stem}.py").read_text("utf-8")
    for task in TASKS
    for stem in read_declarations(ROOT / "submissions" / task)
}
COLLAPSED = [key for key in SOURCES if key[1] in ("collapsed_fp32", "collapsed_float64")]
TAILS = [key for key in SOURCES if key[0] in TASKS[2:]]
LIBRARY = [key for key, source in SOURCES.items() if "\nCUDA_SOURCE = " not in source]
SHAPES = ((5, 64, 96), (7, 4096, 33), (3, 30, 50), (9, 2052, 12), (2, 9000, 20))  # batch, inputs, outputs
LAYER = {"level2_53": "gemm", "level2_81": "gemm", "level2_95": "matmul"}
# Zeros, subnormal, smallest normal and largest numbers, the limits of the clamps and what lies behind them.
BOUNDARY = (
    0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, -1.1754942e-38, 1.1754944e-38, -1.1754944e-38, 0.5, -0.5, 1.0, -1.0,
    1.0000001, -1.0000001, 2.0, -2.0, 4.0, -4.0, 3.4028235e38, -3.4028235e38, math.inf, -math.inf, math.nan,
)  # fmt: skip


def init_of(task: str, inputs: int, outputs: int) -> list[Any]:
    more: dict[str, list[Any]] = {"level2_14": [1.5], "level2_53": [0.5, -2, 2], "level2_95": [(outputs,)]}
    return [inputs, outputs, *more.get(task, [])]


def space_of(key: tuple[str, str]) -> dict[str, Any]:
    if key not in LIBRARY:
        return host_namespace(SOURCES[key], SMALL_LIMITS, workers=1)
    space: dict[str, Any] = {}
    exec(SOURCES[key], space)
    return space


def tail_of(task: str, h: torch.Tensor, add: torch.Tensor | None) -> torch.Tensor:
    """What the task computes behind its product, operator by operator."""
    if task == "level2_53":
        return F.gelu(F.hardtanh(h * 0.5, -2.0, 2.0))
    if task == "level2_81":
        return torch.tanh((h * torch.sigmoid(h) / 2.0).clamp(-1.0, 1.0)).clamp(-1.0, 1.0)
    assert add is not None
    h = h + add
    return F.hardtanh(F.gelu(torch.tanh(torch.sigmoid(h) * h)), -1.0, 1.0)


def expected(task: str, model: Any, x: torch.Tensor) -> torch.Tensor:
    """The task written out in float64, product and all."""
    state = {name: tensor.double() for name, tensor in model.state_dict().items()}
    wide = x.double()
    if task == "level2_14":
        return ((wide @ state["weight"].T) / 2).sum(1, keepdim=True) * model.scaling_factor
    if task == "level2_51":
        h = F.linear(wide, state["gemm.weight"], state.get("gemm.bias")) - state["subtract"]
        return F.gelu(torch.logsumexp(h.mean(1, keepdim=True), 1, keepdim=True)) + wide
    h = F.linear(wide, state[f"{LAYER[task]}.weight"], state[f"{LAYER[task]}.bias"])
    return tail_of(task, h, state.get("add_value"))


# ---- the collapses ----


@pytest.mark.parametrize("key", COLLAPSED, ids=str)
def test_a_collapse_is_the_task_in_real_numbers(key: tuple[str, str]) -> None:
    space = space_of(key)
    limit = 2.0**-22 if key[1] == "collapsed_float64" else 2.0**-18
    for seed, (batch, inputs, outputs) in enumerate(SHAPES):
        torch.manual_seed(seed)
        model = space["ModelNew"](*init_of(key[0], inputs, outputs))
        for scale in (1.0, 100.0, -100.0):
            x = torch.rand(batch, inputs) * scale
            y = model(x)
            truth = expected(key[0], model, x)
            assert not poisoned(y).any() and y.shape == truth.shape
            terms = torch.full((batch, 1), abs(scale), dtype=torch.float64)  # what is added, where it cancels
            if key[0] == "level2_14":
                terms = x.double().abs() @ model.weight.detach().double().abs().sum(0, keepdim=True).T
                terms /= math.sqrt(inputs * outputs)
            size = truth.abs() + terms
            assert ((y - truth).abs() <= limit * size).all(), f"{(batch, inputs, outputs)} x {scale}"
    never = set(kernel_names(space["CUDA_SOURCE"], (*space["NVRTC_OPTIONS"], "-DWIDE=1", "-DHELD=1")))
    never -= set(space["host_executor"].launches)
    assert not never, f"kernels that no shape here reaches: {never}"


@pytest.mark.slow
@pytest.mark.parametrize("key", COLLAPSED, ids=str)
def test_a_collapse_reads_its_parameters_on_every_call(key: tuple[str, str]) -> None:
    model = space_of(key)["ModelNew"](*init_of(key[0], 64, 96))
    x = torch.rand(5, 64)
    before = model(x).clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5).add_(0.25)
    after = model(x)
    torch.testing.assert_close(after.double(), expected(key[0], model, x), rtol=1e-5, atol=1e-4)
    assert not torch.allclose(before, after)


def test_a_linear_layer_without_bias_has_none() -> None:
    for stem in ("collapsed_fp32", "collapsed_float64", "collapsed_native", "traced"):
        model = space_of(("level2_51", stem))["ModelNew"](64, 96, False)
        x = torch.rand(4, 64)
        assert "gemm.bias" not in model.state_dict()
        torch.testing.assert_close(model(x).double(), expected("level2_51", model, x), rtol=1e-6, atol=1e-6)


def test_half_of_a_sum_is_the_sum_of_halves_bit_for_bit() -> None:
    """What rounded_like_eager rests on, with torch's own operators."""
    model = space_of(("level2_14", "rounded_like_eager"))["ModelNew"](*init_of("level2_14", 512, 700))
    for scale in (1.0, 100.0, -1e-20, 1e20):
        x = torch.rand(33, 512) * scale
        eager = torch.sum(torch.matmul(x, model.weight.T) / 2, dim=1, keepdim=True) * 1.5
        assert torch.equal(model(x), eager)


# ---- the tails ----


@pytest.mark.parametrize("key", TAILS, ids=str)
def test_a_tail_is_right_where_clamps_act_too(key: tuple[str, str]) -> None:
    task, space = key[0], space_of(key)
    for outputs in (48, 7):  # the second: single elements
        torch.manual_seed(outputs)
        model = space["ModelNew"](*init_of(task, 64, outputs))
        for scale in (1.0, 100.0, -100.0, 1e-39):
            x = torch.randn(5, 64) * scale
            torch.testing.assert_close(model(x).double(), expected(task, model, x), rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        torch.testing.assert_close(model(x).double(), expected(task, model, x), rtol=1e-5, atol=1e-5)
    if key not in LIBRARY:
        assert set(space["host_executor"].launches) == {"tail_vectors", "tail_elements"}


@pytest.mark.parametrize("key", TAILS, ids=str)
def test_boundary_values_come_out_as_from_the_operators(key: tuple[str, str]) -> None:
    """Handed on by a product of one input, 1. Equal but for the last bits of the C library's functions."""
    task, count = key[0], len(BOUNDARY)
    model = space_of(key)["ModelNew"](*init_of(task, 1, count))
    values = torch.tensor(BOUNDARY)
    state = {f"{LAYER[task]}.weight": values.reshape(count, 1), f"{LAYER[task]}.bias": torch.zeros(count)}
    if task == "level2_95":
        state["add_value"] = torch.zeros(count)
    model.load_state_dict(state)
    one = torch.ones(4, 1)
    handed = F.linear(one, state[f"{LAYER[task]}.weight"], state[f"{LAYER[task]}.bias"])
    assert count == 23 and torch.equal(handed[0].isnan(), values.isnan())
    want, got = tail_of(task, handed, state.get("add_value")), model(one)
    assert torch.equal(got.isnan(), want.isnan())
    signed = ~want.isnan() & (want != 0)  # the CPU's own gelu has no negative zero; the device's has, as the kernel has
    assert torch.equal(got.signbit()[signed], want.signbit()[signed])
    torch.testing.assert_close(got, want, rtol=1e-6, atol=3e-7, equal_nan=True)  # 1 + erf(v) cancels where v is -4
    # Zeros and the smallest numbers: nothing is flushed, and at most two units of the last, subnormal, place differ.
    assert ((got - want)[:, :8].abs() <= 2 * 1.4013e-45).all() and (got[:, 4:8] != 0).all()


def test_the_clamps_that_can_never_act() -> None:
    """What the papers say of problems 81 and 95, over all magnitudes of fp32."""
    bits = torch.arange(-(2**31), 2**31, 65521).to(torch.int32)
    v = bits.view(torch.float32)
    v = v[~v.isnan()]
    tanh = torch.tanh(v)
    assert tanh.abs().max() <= 1
    gelu = F.gelu(tanh)
    assert gelu.min() > -0.18 and gelu.max() < 0.85
    swish = (v * torch.sigmoid(v))[v.isfinite()]
    assert swish.min() > -0.28 - 1e-3


def test_official_inputs_never_reach_the_clamps_of_53_and_81() -> None:
    """The same draw with fewer outputs: the spread depends on the inputs alone."""
    torch.manual_seed(42)
    h = torch.nn.Linear(8192, 256)(torch.rand(256, 8192)).detach()
    assert (h * 0.5).abs().max() < 2 and (h * torch.sigmoid(h) / 2).abs().max() < 1


# ---- refusals ----


@pytest.mark.parametrize("key", SOURCES, ids=str)
def test_refuses_what_it_does_not_take(key: tuple[str, str]) -> None:
    model = space_of(key)["ModelNew"](*init_of(key[0], 16, 8))
    for words, x in (
        ("x: dtype", torch.zeros(2, 16, dtype=torch.float64)),
        ("x: shape", torch.zeros(2, 15)),
        ("must be an ordinary", torch.zeros(2, 16).to_sparse()),
    ):
        with pytest.raises(ValueError, match=words):
            model(x)
    if key not in LIBRARY:
        plain: dict[str, Any] = {}
        exec(SOURCES[key], plain)
        with pytest.raises(ValueError, match="on cpu, must be on cuda"):
            plain["ModelNew"](*init_of(key[0], 16, 8))(torch.zeros(2, 16))
