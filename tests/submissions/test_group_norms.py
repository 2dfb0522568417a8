"""The kernels of level1_34 and level1_35 on the host executor: eager's bits, or the float64 answer.

test_rules.py has the rules that hold for every file.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from kbsub.eval.host_executor import SMALL_LIMITS, host_namespace, kernel_names, poisoned
from kbsub.eval.operators.compare.oracle import error_of
from kbsub.eval.operators.group_norm import on_cpu
from kbsub.eval.operators.group_norm.formula import Layer, norm_of_groups
from support.paths import ROOT

torch.set_num_threads(1)  # tiny tensors: thread pools only wait for each other
LIMITS = dataclasses.replace(SMALL_LIMITS, multiprocessors=8)  # room for a set of sixteen blocks
EPS = 1e-5
SOURCES = {
    f"{kind}_{what}": (ROOT / "submissions" / task / f"{kind}_{what}.py").read_text("utf-8")
    for task, kind in (("level1_34", "instance"), ("level1_35", "group"))
    for what in ("order", "accurate")
}
PLANES = (  # shape, groups of the group norm
    ((2, 4, 64, 64), 2),  # the kernels of the official shape
    ((1, 4, 64, 96), 1),  # counts that are no powers of two
    ((3, 5, 32, 32), 5),
    ((2, 6, 17, 19), 2),
    ((1, 4, 5, 7), 2),  # fewer elements than threads
    ((1, 4, 10, 10), 4),
    ((2, 4, 8, 8), 4),
)
OF_PLANES = ("-DTHREADS=128", "-DBLOCKS=3", "-DCHAINS=1")  # what instance_order asks for at the official shape
HARD = {
    "plain": lambda x: x,
    "+1000": lambda x: x + 1000,
    "zero": lambda x: x * 0,
    "constant": lambda x: torch.full_like(x, 1e4),
    "subnormal": lambda x: x * 1e-39,
    "quotients near the subnormal numbers": lambda x: x * 1e-30,
    "squares overflow": lambda x: x * 1e25,
    "special": lambda x: (
        x.flatten().index_copy(0, torch.tensor([0, 77]), torch.tensor([math.nan, -math.inf])).view_as(x)
    ),
}


def made(space: dict[str, Any], stem: str, channels: int, groups: int, seed: int = 0) -> Any:
    if stem.startswith("instance"):
        return space["ModelNew"](channels)
    model = space["ModelNew"](channels, groups)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.gn.weight.normal_(generator=generator)
        model.gn.bias.normal_(generator=generator)
    return model


def eager(stem: str, model: Any, x: torch.Tensor, groups: int) -> torch.Tensor:
    if stem.startswith("instance"):
        return on_cpu.instance_norm(x, EPS)
    return on_cpu.group_norm(x, groups, model.gn.weight, model.gn.bias, EPS)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("stem", ["instance_order", "group_order"])
def test_gives_the_bits_of_pytorchs_order(stem: str) -> None:
    space = host_namespace(SOURCES[stem], LIMITS, workers=1)
    for seed, (shape, groups) in enumerate(PLANES):
        model = made(space, stem, shape[1], groups, seed)
        torch.manual_seed(seed)
        x = torch.randn(shape) * 3 + 0.5
        y = model(x)
        assert not poisoned(y).any(), f"{shape}: not written"
        assert same_bits(y, eager(stem, model, x, groups)), shape
    never = set(kernel_names(space["CUDA_SOURCE"], space["NVRTC_OPTIONS"] + space.get("BUILD", OF_PLANES)))
    never -= set(space["host_executor"].launches)
    assert not never, f"kernels that no shape here reaches: {never}"


@pytest.mark.parametrize("stem", ["instance_order", "group_order"])
def test_gives_them_for_hard_values(stem: str) -> None:
    space = host_namespace(SOURCES[stem], LIMITS, workers=1)
    for shape, groups in (PLANES[0], PLANES[3]):
        model = made(space, stem, shape[1], groups)
        torch.manual_seed(3)
        base = torch.randn(shape)
        for name, change in HARD.items():
            x = change(base)
            assert same_bits(model(x), eager(stem, model, x, groups)), f"{shape}, {name}"


@pytest.mark.parametrize("stem", ["instance_accurate", "group_accurate"])
def test_keeps_the_accurate_bound(stem: str) -> None:
    space = host_namespace(SOURCES[stem], LIMITS, workers=1)
    for seed, (shape, groups) in enumerate((*PLANES, ((2, 2, 96, 96), 2))):
        model = made(space, stem, shape[1], groups, seed)
        gn = getattr(model, "gn", None)
        layer = Layer("", None, EPS, None, None) if gn is None else Layer("", groups, EPS, gn.weight, gn.bias)
        for scale, offset in ((1.0, 0.5), (1.0, 1000.0), (1e-30, 0.0), (1e25, 0.0)):
            torch.manual_seed(seed)
            x = torch.randn(shape) * scale + offset
            y = model(x)
            error = error_of(norm_of_groups(x, layer), y)
            assert not poisoned(y).any()
            assert error.bound_ratio <= 1 and error.allclose, f"{shape}, {scale}, {offset}: {error}"
    assert set(space["host_executor"].launches) == {"sets_once", "row_any"}


@pytest.mark.slow
@pytest.mark.parametrize("stem", SOURCES)
def test_thread_order_changes_nothing(stem: str) -> None:
    shape, groups = PLANES[0]
    results = []
    for seed in (0, 7):
        space = host_namespace(SOURCES[stem], LIMITS, workers=1, seed=seed)
        torch.manual_seed(5)
        results.append(made(space, stem, shape[1], groups)(torch.randn(shape)))
    assert torch.equal(*results)


@pytest.mark.parametrize("stem", SOURCES)
def test_refuses_what_it_does_not_take(stem: str) -> None:
    space = host_namespace(SOURCES[stem], LIMITS, workers=1)
    model = made(space, stem, 4, 2)
    for words, x in (
        ("x: dtype", torch.zeros(2, 4, 8, 8, dtype=torch.float64)),
        ("x: shape", torch.zeros(4)),
        ("must be an ordinary", torch.zeros(2, 4, 8, 8).to_sparse()),
    ):
        with pytest.raises(ValueError, match=words):
            model(x)
    if stem.endswith("order"):
        with pytest.raises(ValueError, match="x: strides"):
            model(torch.zeros(2, 4, 8, 8).transpose(2, 3)[:, :, 1:])
        with pytest.raises(ValueError, match="more than one pixel"):
            model(torch.zeros(2, 4, 1, 1))
    assert model(torch.zeros(0, 4, 8, 8)).shape == (0, 4, 8, 8)
    assert not space["host_executor"].launches, "a grid of no blocks is a CUDA error"
    plain: dict[str, Any] = {}
    exec(SOURCES[stem], plain)
    with pytest.raises(ValueError, match="x: on cpu, must be on cuda"):
        made(plain, stem, 4, 2)(torch.zeros(2, 4, 8, 8))


def test_the_corrected_product_is_the_quotient() -> None:
    """For every count of a chain and a spread of significands; all 2^23 of them were tried once for each count."""
    d = (torch.arange(0, 1 << 23, 8191) + (127 << 23)).to(torch.int32).view(torch.float32).numpy()
    for n in range(1, 4097):
        n32 = np.float32(n)
        reciprocal = np.float32(1) / n32
        q = d * reciprocal
        corrected = on_cpu.fma(on_cpu.fma(np.full_like(d, -n32), q, d), np.full_like(d, reciprocal), q)
        assert (corrected == d / n32).all(), n
