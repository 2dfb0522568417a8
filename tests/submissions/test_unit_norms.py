"""The kernels of level1_36, level1_38 and level1_39 on the host executor: eager's bits, or the float64 answer.

test_rules.py has the rules that hold for every file.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from kbsub.eval.host_executor import H200_LIMITS, SMALL_LIMITS, host_namespace, kernel_names, poisoned
from kbsub.eval.operators import reduction_order as order
from kbsub.eval.operators.compare.oracle import error_of
from kbsub.eval.operators.register import operator
from kbsub.eval.operators.unit_norm.formula import Norm, unit_norm
from kbsub.eval.operators.unit_norm.on_cpu import in_cuda_order
from kbsub.eval.operators.unit_norm.unit_norm import UnitNorm
from kbsub.eval.tasks.declarations import read_declarations
from kbsub.eval.tasks.task_file import read_task_file
from support.paths import ROOT

torch.set_num_threads(1)  # tiny tensors: thread pools only wait for each other
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Every folder whose task declares one of these norms: a new one is found by its task.toml.
FOLDERS = {
    table.parent.name: table.parent
    for table in sorted(ROOT.glob("submissions/*/task.toml"))
    if isinstance(operator(read_task_file(table.parent).operator), UnitNorm)
}
OPERATORS = {task: operator(read_task_file(folder).operator) for task, folder in FOLDERS.items()}
NORMS = {task: each.norm for task, each in OPERATORS.items() if isinstance(each, UnitNorm)}
EPS = {task: 1e-5 if norm is Norm.RMS else 0.0 for task, norm in NORMS.items()}
INIT = {task: read_task_file(folder).grid[0].at(2, 64).init for task, folder in FOLDERS.items()}
PLANAR = {task for task, folder in FOLDERS.items() if len(read_task_file(folder).grid[0].inputs[0]) > 2}
DECLARED = {task: read_declarations(folder) for task, folder in FOLDERS.items()}
SOURCES = {
    (task, stem): (ROOT / "submissions" / task / f"{stem}.py").read_text("utf-8")
    for task, rows in DECLARED.items()
    for stem in rows
}
CUDA = [key for key, source in SOURCES.items() if "\nCUDA_SOURCE = " in source]
LIBRARY = [key for key in SOURCES if key not in CUDA]
EXACT = [key for key in CUDA if DECLARED[key[0]][key[1]].contract == "bit-identical"]
ACCURATE = [key for key in CUDA if DECLARED[key[0]][key[1]].accurate]
ROWS = [key for key in EXACT if key[0] not in PLANAR]
# `make test` takes fp32, and one half precision a task; the rest is slow.
OFTEN = {task: "fp16" if norm is Norm.MEAN_ABS else "bf16" for task, norm in NORMS.items()}
PRECISIONS = [
    pytest.param(key, precision, marks=[] if precision in ("fp32", OFTEN[key[0]]) else [pytest.mark.slow])
    for key in EXACT
    for precision in DECLARED[key[0]][key[1]].precision
]

PLANES = (
    (2, 64, 8, 12),  # four threads share a pixel: the official order
    (3, 64, 7, 5),  # an odd plane: no vectors, one output a thread
    (2, 64, 6, 5),  # two outputs a thread
    (2, 32, 16, 16),  # vectors, a thread a pixel
    (1, 128, 12, 12),
    (1, 64, 8),  # few pixels: another block, 64 threads share one
    (2, 300, 65),  # sixteen threads share a pixel
    (2, 5, 7, 9),
    (3, 1, 5, 5),
    (5, 2, 3),
)
LINES = (
    (16, 8191),  # a row a block of 512 threads, at every alignment
    (19, 8200),
    (9, 65535),  # the official length
    (3, 20001),  # few rows: a block of 256 x 2
    (40, 1003),  # a warp a row
    (7, 100),  # no vectors
    (600, 20),
    (1, 5),
    (2, 70001),  # longer than what a block keeps
)
SHAPES = {task: PLANES if task in PLANAR else LINES for task in NORMS}
SHORT = ((5, 1), (3, 1), (4, 2), (7, 3))  # rows shorter than a vector, whose first aligned element may be another row's


def test_the_three_tasks_are_found() -> None:
    assert set(NORMS) >= {"level1_36", "level1_38", "level1_39"} and set(NORMS.values()) == set(Norm)
    assert set(OFTEN) == set(NORMS) and "level1_36" in PLANAR and len(EXACT) >= 3 and len(ACCURATE) >= 3


def space_of(key: tuple[str, str], limits: Any = SMALL_LIMITS, **options: Any) -> dict[str, Any]:
    return host_namespace(SOURCES[key], limits, workers=1, **options)


def device_of(limits: Any) -> order.Device:
    return order.Device(limits.multiprocessors, limits.threads_per_multiprocessor)


def eager(task: str, x: torch.Tensor, version: str = torch.__version__, limits: Any = SMALL_LIMITS) -> torch.Tensor:
    return in_cuda_order(x, NORMS[task], EPS[task], order.trees_of(version), device_of(limits))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(((a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())).all())


# ---- eager's bits ----


@pytest.mark.parametrize(("key", "precision"), PRECISIONS, ids=str)
def test_gives_the_bits_of_pytorchs_order(key: tuple[str, str], precision: str) -> None:
    space = space_of(key)
    model = space["ModelNew"](*INIT[key[0]])
    for seed, shape in enumerate(SHAPES[key[0]]):
        torch.manual_seed(seed)
        x = (torch.randn(shape) * 3 + 0.5).to(DTYPES[precision])
        y = model(x)
        assert not poisoned(y).any(), f"{shape}: not written at {poisoned(y).nonzero()[:3].tolist()}"
        wrong = (y != eager(key[0], x)).nonzero()
        assert not len(wrong), f"{shape} {precision}: {len(wrong)} elements differ, the first at {wrong[0].tolist()}"
    never = set(kernel_names(space["CUDA_SOURCE"], space["NVRTC_OPTIONS"])) - set(space["host_executor"].launches)
    assert not never, f"kernels that no shape here reaches: {never}"


HARD = {
    "zero": lambda x: x * 0,
    "subnormal": lambda x: x * 1e-39,
    "squares overflow": lambda x: x * 1e25,
    "constant": lambda x: torch.full_like(x, 1e4),
    "special": lambda x: (
        x.flatten().index_copy(0, torch.tensor([0, 77]), torch.tensor([math.nan, -math.inf])).view_as(x)
    ),
}


@pytest.mark.parametrize("key", EXACT, ids=str)
def test_gives_them_for_hard_values(key: tuple[str, str]) -> None:
    model = space_of(key)["ModelNew"](*INIT[key[0]])
    torch.manual_seed(3)
    base = torch.randn(SHAPES[key[0]][0])
    for name, change in HARD.items():
        x = change(base)
        assert same_bits(model(x), eager(key[0], x)), name


@pytest.mark.parametrize("key", ROWS, ids=str)
@pytest.mark.parametrize("version", ["2.6", "2.11"])
def test_has_the_trees_of_each_torch_version(key: tuple[str, str], version: str) -> None:
    space = space_of(key)
    trees = space["trees_of"]
    space["trees_of"] = lambda _: trees(version)
    differs = 0
    for shape in LINES[:2] + LINES[3:5]:
        torch.manual_seed(1)
        x = torch.randn(shape)
        y = space["ModelNew"]()(x)
        assert torch.equal(y, eager(key[0], x, version)), f"{shape}, {version}"
        differs += not torch.equal(y, eager(key[0], x, {"2.6": "2.11", "2.11": "2.6"}[version]))
    assert differs, "these inputs do not tell the two orders apart"


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_reads_rows_that_begin_anywhere(key: tuple[str, str]) -> None:
    """x one element into its storage: the 2-norm's vectors begin elsewhere, the magnitudes have their own tensor."""
    space = space_of(key)
    torch.manual_seed(2)
    for by in (1, 2, 3):
        x = torch.randn(16 * 8191 + by)[by:].view(16, 8191)
        seen = space["host_executor"]
        assert torch.equal(space["ModelNew"]()(x), _moved(key[0], x, by)), f"{by} elements in: {seen.launches}"


def _moved(task: str, x: torch.Tensor, by: int) -> torch.Tensor:
    """The model reads the alignment off its tensor: given one that begins where the candidate's does."""
    room = torch.empty(x.numel() + 8)
    start = -(room.data_ptr() // 4) % 4 + (by if NORMS[task] is Norm.L2 else 0)
    return eager(task, room[start : start + x.numel()].view(x.shape).copy_(x))


@pytest.mark.parametrize("key", EXACT, ids=str)
def test_thread_order_changes_nothing(key: tuple[str, str]) -> None:
    results = []
    for seed in (0, 7):
        torch.manual_seed(5)
        results.append(space_of(key, seed=seed)["ModelNew"](*INIT[key[0]])(torch.randn(SHAPES[key[0]][0])))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["order", "accurate"])
def test_the_two_row_tasks_share_their_kernels(kind: str) -> None:
    sources: dict[str, Any] = {"l1": {}, "l2": {}}
    for task, stem in (("level1_38", "l1"), ("level1_39", "l2")):
        exec(SOURCES[task, f"{stem}_{kind}"], sources[stem])
    assert sources["l1"]["CUDA_SOURCE"] == sources["l2"]["CUDA_SOURCE"]


def test_the_order_in_the_files_is_that_of_the_operator() -> None:
    """Sizes by the thousand: the candidates' own launch rules against the operator's."""
    device = device_of(H200_LIMITS)
    planes: dict[str, Any] = {}
    exec(SOURCES["level1_36", "pixel_order"], planes)
    for images, channels, pixels in itertools.product(
        (1, 2, 5, 112), (2, 3, 31, 63, 64, 65, 130, 300, 1000), range(2, 70)
    ):
        how = order.plan(images * pixels, channels, False, pixels, device)
        mine = planes["order_of"](images, channels, pixels)
        assert mine == (how.height if how.along_y else 1) and how.blocks == 1, (images, channels, pixels)
    for task, stem in ROWS:
        lines: dict[str, Any] = {}
        exec(SOURCES[task, stem], lines)
        for rows, n in itertools.product(
            (1, 2, 3, 7, 16, 33, 1000), (2, 31, 100, 127, 128, 1000, 4095, 8160, 8161, 65535)
        ):
            for size, vector in ((4, 4), (2, lines["VECTOR16"])):
                how = order.plan(rows, n, True, 1, device, vector)
                mine = lines["order_of"](rows, n, size, 132, 2048, (True, True))
                assert (mine.width, mine.height, mine.along_y) == (how.width, how.height, how.along_y), (rows, n)
                assert (mine.by_vectors, mine.vector) == (how.by_vectors, how.vector) and how.blocks == 1
                assert 1 << len(mine.distances) == how.sharing


@pytest.mark.parametrize("key", ROWS, ids=str)
def test_an_unknown_torch_version_is_refused(key: tuple[str, str]) -> None:
    space = space_of(key)
    with pytest.raises(ValueError, match=r"torch 9\.9\.0 adds in an order that is not known"):
        space["trees_of"]("9.9.0")


# ---- channels-last ----


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("channels", [32, 64, 128])
def test_channels_last_rows_have_eagers_bits_of_that_layout(channels: int, precision: str) -> None:
    space = space_of(("level1_36", "channel_rows"))
    torch.manual_seed(channels)
    x = torch.randn(2, channels, 9, 5).to(DTYPES[precision]).to(memory_format=torch.channels_last)
    y = space["ModelNew"](channels)(x)
    rows = x.movedim(1, -1).reshape(-1, channels)
    assert torch.equal(y.movedim(1, -1).reshape(-1, channels), eager("level1_36", rows))
    assert y.stride() == x.stride()
    there_and_back = space["ModelNew"](channels)(x.contiguous())
    assert torch.equal(there_and_back, y) and there_and_back.is_contiguous()


# ---- the float64 answer ----


AS_DRAWN, SCALED = (1.0,), (1e-30, 1e25, 1e-41)  # the second: no numbers of fp16
BOUNDS = [
    pytest.param(precision, scales, marks=[] if precision == "fp32" else [pytest.mark.slow])
    for precision, scales in itertools.product(DTYPES, (AS_DRAWN, SCALED))
    if (precision, scales) != ("fp16", SCALED)
]


@pytest.mark.parametrize(("precision", "scales"), BOUNDS, ids=str)
@pytest.mark.parametrize("key", ACCURATE, ids=str)
def test_keeps_the_accurate_bound(key: tuple[str, str], precision: str, scales: tuple[float, ...]) -> None:
    space = space_of(key)
    model = space["ModelNew"](*INIT[key[0]])
    shapes = SHAPES[key[0]] + (SHORT if key[0] not in PLANAR else ())
    for (seed, shape), scale in itertools.product(enumerate(shapes), scales):
        if scale != 1.0 and seed > 3:
            continue
        torch.manual_seed(seed)
        x = (torch.randn(shape) * scale).to(DTYPES[precision])
        y = model(x)
        assert not poisoned(y).any()
        truth = unit_norm(x, NORMS[key[0]], EPS[key[0]])
        error = error_of(truth, y)
        if truth.rstd_overflows:
            continue  # 1 / norm is no fp32 number: not judged, as in the stress suite
        assert error.bound_ratio <= 1 and error.allclose, f"{shape}, scale {scale}: {error}"
    if scales != AS_DRAWN:
        return  # fewer shapes, which need not reach every kernel
    never = set(kernel_names(space["CUDA_SOURCE"], space["NVRTC_OPTIONS"])) - set(space["host_executor"].launches)
    assert not never, f"kernels that no shape here reaches: {never}"


# ---- refusals ----

REFUSED = {
    "x: dtype": lambda shape: torch.zeros(shape, dtype=torch.float64),
    "x: shape": lambda shape: torch.zeros(shape[:1]),
    "must be an ordinary": lambda shape: torch.zeros(shape).to_sparse(),
}


@pytest.mark.parametrize("key", CUDA, ids=str)
def test_refuses_what_it_does_not_take(key: tuple[str, str]) -> None:
    shape = SHAPES[key[0]][0]
    space = space_of(key)
    for words, make in REFUSED.items():
        with pytest.raises(ValueError, match=words):
            space["ModelNew"](*INIT[key[0]])(make(shape))
    if key in EXACT:
        with pytest.raises(ValueError, match="x: strides"):
            space["ModelNew"](*INIT[key[0]])(torch.zeros(shape).transpose(0, 1))
    plain: dict[str, Any] = {}
    exec(SOURCES[key], plain)
    with pytest.raises(ValueError, match="x: on cpu, must be on cuda"):
        plain["ModelNew"](*INIT[key[0]])(torch.zeros(shape))
    assert space["ModelNew"](*INIT[key[0]])(torch.zeros(0, *shape[1:])).shape == (0, *shape[1:])
    assert not space["host_executor"].launches, "a grid of no blocks is a CUDA error"


def test_orders_that_are_not_reproduced_are_refused() -> None:
    planes = space_of(("level1_36", "pixel_order"))["order_of"]
    with pytest.raises(ValueError, match="one pixel an image"):
        planes(4, 64, 1)
    with pytest.raises(ValueError, match="1030 channels"):
        planes(4, 1030, 64)
    for key in ROWS:
        with pytest.raises(ValueError, match="several blocks"):
            space_of(key)["order_of"](2, 300_007, 4, 132, 2048, (True, True))
        with pytest.raises(ValueError, match="cuts the row itself"):
            space_of(key)["order_of"](2, 2**29, 4, 132, 2048, (True, True))


# ---- library files ----


@pytest.mark.parametrize("key", LIBRARY, ids=str)
def test_library_files_compute_the_formula(key: tuple[str, str]) -> None:
    space: dict[str, Any] = {}
    exec(SOURCES[key], space)
    torch.manual_seed(0)
    for shape in SHAPES[key[0]][:2]:
        x = torch.randn(shape)
        model = space["ModelNew"](*INIT[key[0]])
        for _ in range(2):
            y = model(x)
            truth = unit_norm(x, NORMS[key[0]], EPS[key[0]]).y.float()
            torch.testing.assert_close(y, truth, atol=1e-5, rtol=1e-5)
        assert y.is_contiguous()
    with pytest.raises(ValueError, match="x: shape"):
        model(torch.zeros(3))
