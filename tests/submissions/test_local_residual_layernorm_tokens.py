"""residual_best.py executed on the CPU: right at every size, and the sum is rounded as eager's stored one is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kbsub.eval.host_executor import SMALL_LIMITS, host_namespace, kernel_names, poisoned
from support.host_run import DTYPES
from support.paths import ROOT

torch.set_num_threads(1)
FILE = ROOT / "submissions" / "local_residual_layernorm_tokens" / "residual_best.py"
# Largest difference from float64 in units of the largest output.
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3}
# (tokens, hidden): lanes, each held count of a warp and of a block, an odd size; LARGE: shared memory, and beyond it.
SHAPES = (
    (5, 3), (2, 17), (2, 100), (2, 128), (1, 256), (1, 512), (1, 768), (1, 1023), (2, 2048), (1, 8192), (1, 12_288),
    (1, 16_392),
)  # fmt: skip
LARGE = ((1, 40_000), (1, 65_536), (1, 100_003), (1, 330_000))


def model_of(space: dict[str, Any], hidden: int, precision: str) -> Any:
    model = space["ModelNew"](hidden).to(DTYPES[precision])
    with torch.no_grad():
        model.ln.weight.normal_()
        model.ln.bias.normal_()
    return model


def error_of(model: Any, x: torch.Tensor, residual: torch.Tensor) -> float:
    y = model(x, residual).detach()
    assert not poisoned(y).any(), f"not written at {poisoned(y).nonzero()[:3].tolist()}"
    weight, bias = (p.detach().double() for p in (model.ln.weight, model.ln.bias))
    exact = torch.nn.functional.layer_norm((x + residual).double(), x.shape[-1:], weight, bias, model.ln.eps)
    return float((y.double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))


def drawn(tokens: int, hidden: int, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, hidden).to(DTYPES[precision]), torch.randn(tokens, hidden).to(DTYPES[precision])


@pytest.mark.parametrize(
    "precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16", pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_right_at_every_size(precision: str) -> None:
    space = host_namespace(FILE.read_text("utf-8"), SMALL_LIMITS, workers=1)
    torch.manual_seed(4)
    for tokens, hidden in SHAPES:
        error = error_of(model_of(space, hidden, precision), *drawn(tokens, hidden, precision))
        assert error < TOLERANCE[precision], f"{tokens}x{hidden} {precision}: off by {error:.2g} of the largest output"


@pytest.mark.slow
@pytest.mark.parametrize("precision", DTYPES)
def test_right_where_rows_are_wide(precision: str) -> None:
    space = host_namespace(FILE.read_text("utf-8"), SMALL_LIMITS, workers=1)
    torch.manual_seed(5)
    for tokens, hidden in (*SHAPES, *LARGE):
        error = error_of(model_of(space, hidden, precision), *drawn(tokens, hidden, precision))
        assert error < TOLERANCE[precision], f"{tokens}x{hidden} {precision}: off by {error:.2g} of the largest output"
    never = set(kernel_names(space["CUDA_SOURCE"])) - set(space["host_executor"].launches)
    assert not never, f"kernels that no shape here reaches: {sorted(never)}; add one"


@pytest.mark.parametrize(
    "moved", [pytest.param(each, marks=pytest.mark.slow) for each in ("x", "residual", "weight", "bias")] + ["both"]
)
def test_reads_what_is_not_aligned(moved: str) -> None:
    """Tensors that start one element into their storage; x and the residual need not start at the same place."""
    torch.manual_seed(6)
    space = host_namespace(FILE.read_text("utf-8"), SMALL_LIMITS, workers=1)
    for hidden in (512, 1003):
        model = model_of(space, hidden, "fp16")
        x, residual = drawn(3, hidden, "fp16")

        def later(tensor: torch.Tensor) -> torch.Tensor:
            room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
            return room[1:].view(tensor.shape).copy_(tensor)

        x = later(x) if moved in ("x", "both") else x
        residual = later(residual) if moved in ("residual", "both") else residual
        if moved in ("weight", "bias"):
            getattr(model.ln, moved).data = later(getattr(model.ln, moved).data)
        assert error_of(model, x, residual) < TOLERANCE["fp16"], f"hidden {hidden}"


def test_the_sum_is_rounded_as_a_stored_one_is() -> None:
    """2048 + 1 is 2048 in half: a row of it and of 2048 is constant, and the output is the bias."""
    space = host_namespace(FILE.read_text("utf-8"), SMALL_LIMITS, workers=1)
    model = model_of(space, 64, "fp16")
    x, residual = torch.full((2, 64), 2048.0).half(), torch.zeros(2, 64).half()
    residual[:, ::2] = 1
    assert torch.equal(model(x, residual), model.ln.bias.expand(2, 64))


def test_what_is_not_taken_is_refused_by_name() -> None:
    space = host_namespace(FILE.read_text("utf-8"), SMALL_LIMITS, workers=1)
    model = model_of(space, 8, "fp32")
    x = torch.zeros(4, 8)
    wrong = {
        "residual: shape": torch.zeros(4, 1),  # eager would broadcast it
        "residual: dtype": torch.zeros(4, 8, dtype=torch.float16),
        "residual: strides": torch.zeros(8, 4).t(),
        "residual: torch.sparse_coo": torch.zeros(4, 8).to_sparse(),
    }
    for words, residual in wrong.items():
        with pytest.raises(ValueError, match=words):
            model(x, residual)
    assert model(torch.zeros(0, 8), torch.zeros(0, 8)).shape == (0, 8)
    assert not space["host_executor"].launches, "a grid of no blocks is a CUDA error"
