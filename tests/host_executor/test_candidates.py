"""Every CUDA kernel of every candidate runs on the host, at widths that reach each, and gives the right numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kbsub.eval.host_executor import H200_LIMITS, SMALL_LIMITS, host_namespace, kernel_names, poisoned
from kbsub.eval.host_executor.compile_gate import option_sets, shapes_of
from support.host_run import DTYPES, FOLDER, cuda_candidates, disagreement, source_of

# (rows, width): each next width reaches another kernel of some candidate (registers, shared memory, rings, chunks).
SHAPES = (
    (3, 4), (3, 7), (5, 100), (3, 200), (2, 516), (2, 1001), (2, 1028), (3, 2052), (2, 4100), (2, 8192),
    (3, 10_000), (9, 12_288),  # 512 threads a row where all rows are resident at once, else 256
    (3, 20_672), (5, 33_000), (4, 65_540), (2, 131_076), (2, 150_001),
    (1, 327_684),  # a row with the device to itself: larger stages, and enough of them to go round the ring
)  # fmt: skip
# Against float64, in units of the largest output: a few roundings in the dtype, and for fp32 statistics in fp32.
TOLERANCE = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 8e-3}
CUDA = cuda_candidates()
BIT_IDENTICAL = cuda_candidates("bit-identical")


def space_of(stem: str) -> tuple[dict[str, Any], set[tuple[str, ...]]]:
    """The candidate's namespace on a small device, and the option sets that it will have asked for."""
    space, asked = host_namespace(source_of(stem), SMALL_LIMITS), set()
    on_host = space["cuda_module"]

    def cuda_module(source: str, options: tuple[str, ...], index: int) -> Any:
        asked.add(options)
        return on_host(source, options, index)

    space["cuda_module"] = cuda_module
    return space, asked


def error_of(y: torch.Tensor, x: torch.Tensor, model: Any) -> float:
    """Largest difference from float64, in units of the largest output."""
    y = y.detach()
    exact = torch.nn.functional.layer_norm(
        x.double(), x.shape[1:], model.ln.weight.detach().double(), model.ln.bias.detach().double(), model.ln.eps
    )
    return float((y.double() - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("stem,precision", [(s, p) for s, ps in CUDA.items() for p in ps])
def test_every_kernel_runs_and_is_right(stem: str, precision: str) -> None:
    (space, asked), dtype = space_of(stem), DTYPES[precision]
    torch.manual_seed(3)
    refused = []
    for rows, n in SHAPES:
        model = space["ModelNew"]((n,)).to(dtype)
        with torch.no_grad():
            model.ln.weight.normal_()
            model.ln.bias.normal_()
        x = (torch.randn(rows, n) + 0.5).to(dtype)
        try:
            y = model(x)
        except ValueError as error:  # a width that the file says it does not take
            assert n % 4, f"{stem} {rows}x{n}: {error}"
            refused.append(n)
            continue
        assert not poisoned(y).any(), f"{stem} {rows}x{n}: output not written at {poisoned(y).nonzero()[:3].tolist()}"
        error = error_of(y, x, model)
        assert error < TOLERANCE[precision], f"{stem} {rows}x{n} {precision}: off by {error}"
        if stem in BIT_IDENTICAL:
            wrong = disagreement(model, x)
            assert not wrong, f"{stem} {rows}x{n}: " + "\n".join(wrong)
    there = {name for options in asked for name in kernel_names(space["CUDA_SOURCE"], options)}
    never = there - set(space["host_executor"].launches)
    assert not never, f"{stem}: kernels that no shape here reaches: {sorted(never)}; add a shape to SHAPES"
    rehearsed = option_sets(source_of(stem), [precision], SMALL_LIMITS, shapes_of(FOLDER))
    assert asked == set(rehearsed), "builds that no shape here reaches"


@pytest.mark.parametrize("stem", CUDA)
@pytest.mark.parametrize("seed", [1, 7])
def test_thread_order_changes_nothing(stem: str, seed: int) -> None:
    results = []
    for order in (0, seed):
        space = host_namespace(source_of(stem), H200_LIMITS, seed=order)
        model = space["ModelNew"]((20_672,))
        torch.manual_seed(5)
        results.append(model(torch.randn(3, 20_672)))
    assert torch.equal(*results)


# Input kinds on which a sum in the wrong place loses what the bound asks for.
HARD = {
    "normal": lambda x: x,
    "far": lambda x: x + 1e5,
    "outlier first": lambda x: x.index_fill(1, torch.tensor([0]), 1e6),
    "outlier": lambda x: x.index_fill(1, torch.tensor([777]), -1e30),
    "subnormal": lambda x: x * 1e-39,
    "near-constant": lambda x: 8e37 * (1 + x * 1e-7),
    "constant": lambda x: torch.full_like(x, 1e4),
    "constant but the first": lambda x: torch.full_like(x, 2.0**120).index_fill(1, torch.tensor([0]), 2.0**120 + 2**97),
    "alternating": lambda x: x.sign() * 1e18,
}


# The official width: what an outlier costs the mean grows with the row. The small device: every kind, fast.
@pytest.mark.parametrize(
    ("limits", "width", "kind"),
    [*((SMALL_LIMITS, 65_540, kind) for kind in HARD), (H200_LIMITS, 4_194_304, "outlier first")],
)
def test_rows_read_once_keep_the_accurate_bound(limits: Any, width: int, kind: str) -> None:
    space = host_namespace(source_of("oracle_accurate"), limits)
    torch.manual_seed(2)
    x = HARD[kind](torch.randn(4, width))
    model = space["ModelNew"]((width,))
    y = model(x).detach().double()
    assert set(space["host_executor"].launches) == {"rows_once"}
    away = x.double() - x.double().mean(1, keepdim=True)
    z = away / torch.sqrt((away * away).mean(1, keepdim=True) + model.ln.eps)
    share = ((y - z).abs() / (5 * 2.0**-24 * z.abs() + 2.0**-149)).max().item()
    assert share <= 1, f"{kind}: an error {share:.3g} of the bound"
