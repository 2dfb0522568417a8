"""The token task's kernels, each executed on the CPU: odd sizes, what half sums do, what they refuse."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from kbsub.adapters.task import load_local_task
from kbsub.eval.host_executor import H200_LIMITS, SMALL_LIMITS, host_namespace, kernel_names, poisoned
from kbsub.eval.tasks.declarations import read_declarations
from support.host_run import DTYPES, Host, array_of
from support.paths import ROOT

torch.set_num_threads(1)
FOLDER = ROOT / "submissions" / "local_layernorm_tokens"
DECLARED = read_declarations(FOLDER)
SOURCES = {stem: (FOLDER / f"{stem}.py").read_text("utf-8") for stem in DECLARED}
CONTROLS = [stem for stem, declared in DECLARED.items() if declared.contract == "control"]
RUNS = [(stem, precision) for stem, declared in DECLARED.items() for precision in declared.precision]
HALF = [stem for stem, precision in RUNS if precision == "fp16"]

# (tokens, hidden): the odd sizes, one more than a warp, a full warp of vectors, and each held count.
SHAPES = (
    (3, 1), (5, 3), (2, 17), (9, 33), (2, 128), (2, 256), (3, 512), (2, 1000), (2, 1023), (2, 1024), (2, 2048),
    (2, 4096), (2, 8191), (2, 8192), (1, 16_384), (1, 40_000), (1, 65_536),
)  # fmt: skip
# Largest difference from float64 in units of the largest output. Half sums: a rounding of 2^-11 a level of the tree.
TOLERANCE = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 8e-3, "half sums": 5e-3}


def space_of(stem: str, limits: Any = SMALL_LIMITS) -> dict[str, Any]:
    return host_namespace(SOURCES[stem], limits, workers=1)


def model_of(space: dict[str, Any], hidden: int, precision: str) -> Any:
    model = space["ModelNew"](hidden).to(DTYPES[precision])
    with torch.no_grad():
        model.ln.weight.normal_()
        model.ln.bias.normal_()
    return model


def exact_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (p.detach().double() for p in (model.ln.weight, model.ln.bias))
    return torch.nn.functional.layer_norm(x.double(), (x.shape[-1],), weight, bias, model.ln.eps)


def error_of(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.detach().double() - exact).abs().max() / exact.abs().max().clamp_min(1e-30))


# `make test` takes the best file and one rung at every precision; the shapes of measure/test_sanitizer.py reach all.
OFTEN = ("token_best", "f16x8_pack_f32")
AT_EVERY_SIZE = [pytest.param(*run, marks=[] if run[0] in OFTEN else [pytest.mark.slow]) for run in RUNS]


@pytest.mark.parametrize(("stem", "precision"), AT_EVERY_SIZE)
def test_right_at_every_size(stem: str, precision: str) -> None:
    space = space_of(stem)
    torch.manual_seed(4)
    for tokens, hidden in SHAPES:
        if stem in CONTROLS and hidden > 65_519:
            continue  # infinite in half: its own test below
        model = model_of(space, hidden, precision)
        x = torch.randn(tokens, hidden).to(DTYPES[precision])
        y = model(x)
        assert not poisoned(y).any(), f"{tokens}x{hidden}: not written at {poisoned(y).nonzero()[:3].tolist()}"
        error = error_of(y, exact_of(model, x))
        allowed = TOLERANCE["half sums" if stem in CONTROLS else precision]
        assert error < allowed, f"{stem} {tokens}x{hidden} {precision}: off by {error:.2g} of the largest output"
    never = set(kernel_names(space["CUDA_SOURCE"])) - set(space["host_executor"].launches)
    assert not never, f"{stem}: kernels that no shape here reaches: {sorted(never)}; add one to SHAPES"


@pytest.mark.parametrize(("stem", "precision"), RUNS)
@pytest.mark.parametrize("moved", ["x", "weight", "bias"])
def test_reads_what_is_not_aligned(stem: str, precision: str, moved: str) -> None:
    """A tensor that starts one element into its storage; token_best's vectors then start inside a row."""
    torch.manual_seed(5)
    space = space_of(stem)
    for hidden in (512, 1003):
        model = model_of(space, hidden, precision)
        x = torch.randn(3, hidden).to(DTYPES[precision])
        tensor = {"x": x, "weight": model.ln.weight.data, "bias": model.ln.bias.data}[moved]
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)
        if moved == "x":
            x = room
        else:
            getattr(model.ln, moved).data = room
        error = error_of(model(x), exact_of(model, x))
        assert error < TOLERANCE["half sums" if stem in CONTROLS else precision], f"{stem}, hidden {hidden}: {error}"


@pytest.mark.parametrize("stem", DECLARED)
def test_takes_no_tokens_and_any_leading_dimensions(stem: str) -> None:
    space, precision = space_of(stem), DECLARED[stem].precision[0]
    model = model_of(space, 40, precision)
    assert model(torch.zeros(0, 40, dtype=DTYPES[precision])).shape == (0, 40)
    assert not space["host_executor"].launches, "a grid of no blocks is a CUDA error"
    x = torch.randn(2, 3, 40).to(DTYPES[precision])
    assert torch.equal(model(x).view(6, 40), model(x.view(6, 40)))


def test_more_tokens_than_a_grid_dimension_takes() -> None:
    space = space_of("token_best")
    model, x = model_of(space, 3, "fp32"), torch.randn(65_537, 3)
    assert error_of(model(x), exact_of(model, x)) < TOLERANCE["fp32"]


# ---- half sums ----


@pytest.mark.parametrize("stem", HALF)
def test_inputs_times_100_leave_zeros_of_every_half_sum(stem: str) -> None:
    """512 squares of standard deviation 100 are 5 million; half ends at 65,504."""
    torch.manual_seed(6)
    x = (torch.randn(4, 512) * 100).half()
    model = space_of(stem)["ModelNew"](512).half()
    y = model(x).detach()
    if stem in CONTROLS:
        assert not y.any(), f"{stem}: {int((y != 0).sum())} of {y.numel()} are not zero; is it still a control?"
    else:
        assert error_of(y, exact_of(model, x)) < TOLERANCE["fp16"]


@pytest.mark.parametrize("stem", HALF)
@pytest.mark.parametrize(("hidden", "fits"), [(65_504, True), (65_519, True), (65_520, False), (65_536, False)])
def test_hidden_sizes_above_65519_are_infinite_in_half(stem: str, hidden: int, fits: bool) -> None:
    torch.manual_seed(7)
    x = torch.randn(1, hidden).half() / 2  # a sum of squares of 16,384
    model = space_of(stem)["ModelNew"](hidden).half()
    error = error_of(model(x).nan_to_num(nan=1e9), exact_of(model, x))
    right = fits or stem not in CONTROLS
    assert (error < 2e-2) == right, f"{stem} at {hidden}: off by {error:.2g} of the largest output"


def test_the_control_of_the_official_task_fails_at_its_row_length() -> None:
    source = (FOLDER.parent / "level1_40" / "half_accumulated.py").read_text("utf-8")
    space = host_namespace(source, SMALL_LIMITS, workers=1)
    torch.manual_seed(8)
    for precision, dtype in DTYPES.items():
        for hidden, right in ((1000, True), (65_536, False)):
            model, x = space["ModelNew"]((hidden,)).to(dtype), torch.rand(1, hidden).to(dtype)
            close = torch.allclose(exact_of(model, x), model(x).detach().double(), atol=1e-2, rtol=1e-2)
            assert close == right, f"{precision}, rows of {hidden}"


HALF_OPERATIONS = r"""
extern "C" __global__ void operations(
    const unsigned short* a, const unsigned short* b, const unsigned short* c, unsigned short* y, int n)
{
    const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= n)
        return;
    for (int k = i; k < i + 2; ++k) {
        y[k] = half_add(a[k], b[k]);
        y[n + k] = half_sub(a[k], b[k]);
        y[2 * n + k] = half_mul(a[k], b[k]);
        y[3 * n + k] = half_fma(a[k], b[k], c[k]);
    }
    const unsigned p = a[i] | (unsigned)a[i + 1] << 16, q = b[i] | (unsigned)b[i + 1] << 16;
    const unsigned r = c[i] | (unsigned)c[i + 1] << 16;
    const unsigned pairs[4] = {half2_add(p, q), half2_sub(p, q), half2_mul(p, q), half2_fma(p, q, r)};
    for (int k = 0; k < 4; ++k) {
        y[(4 + k) * n + i] = (unsigned short)pairs[k];
        y[(4 + k) * n + i + 1] = (unsigned short)(pairs[k] >> 16);
    }
}
"""


def test_half_arithmetic_of_the_host_rounds_once() -> None:
    """Against NumPy: a float64 holds each result exactly (numbers of 2^-7 to 2^8), and is rounded once."""
    random = np.random.default_rng(9)
    draw = (np.exp2(random.integers(-7, 8, (3, 4000))) * random.uniform(-2, 2, (3, 4000))).astype(np.float16)
    # A sum just beside a tie of half that fp32 cannot tell from it: rounded twice, it goes the wrong way.
    tie = np.array([[1 + 2**-10, 1.0], [2**-11 + 2**-21, 2**-11], [1.0, 1.0]], np.float16)
    edges = np.array([[65504, 6e-8, np.inf, 0], [65504, 6e-8, -np.inf, -0.0], [-65504, 6e-8, 1, -0.0]], np.float16)
    a, b, c = np.concatenate([draw, tie, edges], axis=1)
    host = Host(HALF_OPERATIONS)
    given = [host.tensor(torch.from_numpy(v), dtype=torch.float16) for v in (a, b, c)]
    y, n = host.empty(8 * len(a), dtype=torch.float16), len(a)
    host.launch("operations", -(-n // 512), 256, *given, y, np.int32(n))
    wide = [v.astype(np.float64) for v in (a, b, c)]
    with np.errstate(all="ignore"):
        results = (wide[0] + wide[1], wide[0] - wide[1], wide[0] * wide[1], wide[0] * wide[1] + wide[2])
        expected = np.concatenate([r.astype(np.float16) for r in results] * 2)
    got = array_of(y)
    wrong = np.flatnonzero(~((got.view(np.uint16) == expected.view(np.uint16)) | (np.isnan(got) & np.isnan(expected))))
    assert not len(wrong), f"operation {wrong[0] // n}, case {wrong[0] % n}: {got[wrong[0]]}, not {expected[wrong[0]]}"


# ---- token_best ----


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("hidden", [1, 3, 17, 512, 1000, 1023, 2048, 8191, 8192, 16_384, 65_536, 1 << 20, 1 << 24])
@pytest.mark.parametrize("tokens", [1, 4096, 65_537, (1 << 31) - 1])
def test_geometry_of_token_best(precision: str, hidden: int, tokens: int) -> None:
    space: dict[str, Any] = {}
    exec(SOURCES["token_best"], space)
    size = torch.finfo(DTYPES[precision]).bits // 8
    plan = space["geometry"](tokens, hidden, DTYPES[precision], H200_LIMITS)
    assert 0 < plan.grid[0] < 2**31 and plan.block[0] % 32 == 0 and plan.block[0] <= 1024
    assert plan.shared_bytes + space["STATIC_SHARED"] <= H200_LIMITS.shared_bytes_per_block
    if hidden <= 65_536:
        held = int(plan.kernel.rpartition("_")[2]) if plan.kernel[-1].isdigit() else space["WIDE_HELD"]
        threads = {"rows_by_lanes": plan.last}.get(plan.kernel, 32 if "warps" in plan.kernel else plan.block[0])
        vectors = threads * (1 if plan.kernel == "rows_by_lanes" else held + max(plan.last, 0))
        assert vectors * 16 // size >= hidden, f"{plan}: a row of {hidden} would be read twice"


# A constant row of a power-of-two length is beta exactly; a mean far from zero costs no digits.
@pytest.mark.parametrize("hidden", [256, 1024, 8192])
def test_token_best_keeps_what_an_offset_hides(hidden: int) -> None:
    torch.manual_seed(10)
    space = space_of("token_best")
    model = model_of(space, hidden, "fp32")
    constant = torch.full((2, hidden), 2.7182817459106445)
    assert torch.equal(model(constant).detach(), model.ln.bias.detach().expand(2, hidden))
    x = torch.randn(2, hidden) + 1e5
    assert error_of(model(x), exact_of(model, x)) < TOLERANCE["fp32"]


# ---- refusals and budget ----


@pytest.mark.parametrize("stem", SOURCES)
def test_refuses_what_it_does_not_take(stem: str) -> None:
    space = space_of(stem)
    dtype = DTYPES[DECLARED[stem].precision[0]]
    cases = {
        "x: dtype": lambda m: m(torch.zeros(2, 8, dtype=torch.float64)),
        "x: shape": lambda m: m(torch.zeros(2, 9, dtype=dtype)),
        "x: strides": lambda m: m(torch.zeros(8, 2, dtype=dtype).t()),
        "weight: dtype": lambda m: m.double() and m(torch.zeros(2, 8, dtype=dtype)),
        "weight, bias:": lambda m: setattr(m.ln, "bias", None) or m(torch.zeros(2, 8, dtype=dtype)),
    }
    for words, call in cases.items():
        with pytest.raises(ValueError, match=words):
            call(space["ModelNew"](8).to(dtype))
    plain: dict[str, Any] = {}
    exec(SOURCES[stem], plain)
    with pytest.raises(ValueError, match="x: on cpu, must be on cuda"):
        plain["ModelNew"](8).to(dtype)(torch.zeros(2, 8, dtype=dtype))
    assert not space["host_executor"].launches


def test_is_a_local_task() -> None:
    task = load_local_task(FOLDER / "reference.py")
    assert task.slug == "local_layernorm_tokens" and task.provenance == "local"


# ---- peers and the benchmark ----


@pytest.mark.parametrize(("stem", "factor"), [("unfused", 1.0), ("unfused_std", (511 / 512) ** 0.5)])
def test_unfused_peers_compute_what_their_docstrings_state(stem: str, factor: float) -> None:
    space: dict[str, Any] = {}
    exec((FOLDER / "peers" / f"{stem}.py").read_text("utf-8"), space)
    x = torch.randn(3, 512)
    biased = torch.nn.functional.layer_norm(x, (512,))
    assert torch.allclose(space["ModelNew"](512)(x), biased * factor, atol=1e-5)


def test_every_choice_of_the_tuner_holds_the_row() -> None:
    from kbsub.eval.measure import tokens as measure_tokens

    space: dict[str, Any] = {}
    exec(SOURCES["token_best"], space)
    hosted = host_namespace(SOURCES["token_best"], SMALL_LIMITS, workers=1)
    own = hosted["geometry"]
    for (tokens, hidden, precision), known in itertools.product([(4, 512, "fp16"), (4, 2048, "fp32")], [True]):
        dtype = DTYPES[precision]
        plans = measure_tokens.choices(space, tokens, hidden, dtype.itemsize)
        assert (own(tokens, hidden, dtype, H200_LIMITS) in [tuple(plan) for plan in plans]) is known
        for plan in plans:
            hosted["geometry"] = lambda *_, plan=plan: plan
            model, x = model_of(hosted, hidden, precision), torch.randn(tokens, hidden).to(dtype)
            assert error_of(model(x), exact_of(model, x)) < TOLERANCE[precision], plan


def test_measured_scenes_and_files() -> None:
    from kbsub.eval.measure import tokens as measure_tokens

    wanted = [(4096, n) for n in (512, 1024, 2048, 4096, 8192)] + [(8192, 8192)]
    wanted += [(4096, n) for n in (8196, 10_000, 12_288, 16_384)]
    assert measure_tokens.scenes() == [(*shape, p) for shape in wanted for p in ("fp32", "fp16", "bf16")]
    for precision in ("fp32", "fp16", "bf16"):
        stems = {file.stem for file in measure_tokens.files(precision)}
        assert stems >= {stem for stem, found in DECLARED.items() if precision in found.precision} | {"unfused"}


def test_a_ring_checks_another_buffer_each_round_and_mends_inputs() -> None:
    from kbsub.eval.bench.ring import Ring, RingProgram
    from kbsub.eval.bench.scene import BenchScene

    class Plain:
        """A captured program without a graph."""

        def __init__(self, run: Any) -> None:
            self.run, self.result = run, run()

        def replay(self) -> None:
            self.result = self.run()

        def output(self) -> Any:
            return self.result

    task = load_local_task(FOLDER / "reference.py")
    scene = BenchScene(task, torch.device("cpu"), {"inputs": [[8, 16]], "init": [16], "seed": 1}, 3)
    ring = Ring(scene, ring_bytes=5 * scene.input_bytes)
    assert ring.size == 5 and len({buffer[0].data_ptr() for buffer in ring.buffers}) == 5
    with torch.no_grad():
        program = RingProgram(Plain(ring.over(scene.reference)), ring)
        for round_index in range(7):
            shown = ring.load(round_index)
            assert shown == round_index % 5 % 3
            program.output().fill_(float("nan"))
            assert ring.check("eager", program.output(), shown) is not None, "an output that nobody wrote passes"
            program.replay()
            assert ring.check("eager", program.output(), shown) is None
        ring.buffers[ring.watched][0].add_(1)
        assert ring.check("eager", program.output(), shown) == "it changed its input"
        assert ring.check("eager", program.output(), shown) is None
