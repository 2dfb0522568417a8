"""What the files of submissions/level1_40 refuse and take, and their grids and traces; test_rules.py has the rules."""

from __future__ import annotations

import pytest
import torch

from kbsub.eval.tasks.declarations import read_declarations
from support.paths import ROOT

FOLDER = ROOT / "submissions" / "level1_40"
torch.set_num_threads(1)  # tiny tensors: thread pools only wait for each other
DECLARED = read_declarations(FOLDER)
SOURCES = {stem: (FOLDER / f"{stem}.py").read_text("utf-8") for stem in DECLARED}
CUDA = [stem for stem, source in SOURCES.items() if "\nCUDA_SOURCE = " in source]
LIBRARY = [stem for stem in SOURCES if stem not in CUDA]
TORCHSCRIPT = [stem for stem in SOURCES if stem.endswith("torchscript")]
SHAPE = (4, 3, 4)  # of one row in these tests: 48 elements

every = pytest.mark.parametrize("stem", SOURCES)
every_cuda = pytest.mark.parametrize("stem", CUDA)


def namespace(stem: str, device: str | None = None) -> dict:
    """The file executed alone, in an empty dict; `device` takes the place of "cuda"."""
    space: dict = {}
    exec(compile(SOURCES[stem], f"{stem}.py", "exec"), space)
    if device is not None:
        assert space["DEVICE_TYPE"] == "cuda"
        space["DEVICE_TYPE"] = device
    return space


class Recorder:
    """Stands where the loader's module stands: remembers launches, computes nothing."""

    def __init__(self) -> None:
        self.launches: list[str] = []

    def launch(self, name, grid, block, arguments, shared_bytes=0, cooperative=False) -> None:
        self.launches.append(name)

    def resident_blocks(self, name, threads, shared_bytes) -> int:
        return 132


def h200_limits(space: dict):
    """The facts of an H200, as the loader would read them."""
    return space["DeviceLimits"](0, 90, 132, 232448, 233472, 2048, 62914560, 2)


def recorded(stem: str, device: str) -> tuple[dict, Recorder]:
    """The file with its launches recorded and its tensors expected on `device`."""
    space, recorder = namespace(stem, device), Recorder()
    space["cuda_module"] = lambda source, options, index: recorder
    space["device_limits"] = lambda index: h200_limits(space)
    return space, recorder


# ---- arguments ----


@every
def test_takes_one_dimension_as_a_number(stem):
    assert tuple(namespace(stem)["ModelNew"](8).ln.weight.shape) == (8,)


# ---- unsupported inputs of the CUDA files: a ValueError that names the tensor and the rule ----

VECTORISED = [stem for stem in CUDA if stem.startswith("reference_order")]  # what PyTorch's vectorised kernel takes
ANY_WIDTH = [stem for stem in CUDA if stem not in VECTORISED]
STRICT = [stem for stem in CUDA if not DECLARED[stem].accurate]  # the accurate kernel takes whatever nn.LayerNorm takes
SINGLE = [stem for stem in CUDA if DECLARED[stem].precision == ("fp32",)]


def _x(shape=(2, *SHAPE), **options):
    return torch.zeros(shape, **options)


def _shifted(shape, by=1):
    """A contiguous view that starts `by` elements into its storage."""
    count = torch.Size(shape).numel()
    return torch.zeros(count + by)[by:].view(shape)


def _with(model, **parameters):
    for name, value in parameters.items():
        setattr(model.ln, name, None if value is None else torch.nn.Parameter(value))


# id: (files, device, row shape, words the message must hold, change(model) -> x)
REFUSED = {
    "cpu": (CUDA, "cuda", SHAPE, ("x", "cuda", "cpu"), lambda m: _x()),
    "float64": (CUDA, "cpu", SHAPE, ("x", "float64"), lambda m: _x(dtype=torch.float64)),
    "half": (SINGLE, "cpu", SHAPE, ("x", "float16"), lambda m: _x(dtype=torch.float16)),
    "weight of another dtype": (
        CUDA,
        "cpu",
        SHAPE,
        ("weight", "float64"),
        lambda m: _with(m, weight=torch.ones(SHAPE, dtype=torch.float64)) or _x(),
    ),
    "transposed": (STRICT, "cpu", SHAPE, ("x", "contiguous"), lambda m: _x((2, 4, 4, 3)).transpose(2, 3)),
    "expanded": (STRICT, "cpu", SHAPE, ("x", "contiguous"), lambda m: _x((1, *SHAPE)).expand(2, *SHAPE)),
    "strided": (STRICT, "cpu", SHAPE, ("x", "contiguous"), lambda m: _x((4, *SHAPE))[::2]),
    "bias not contiguous": (
        STRICT,
        "cpu",
        SHAPE,
        ("bias", "contiguous"),
        lambda m: _with(m, bias=torch.zeros(4, 4, 3).transpose(1, 2)) or _x(),
    ),
    "x misaligned": (VECTORISED, "cpu", SHAPE, ("x", "address"), lambda m: _shifted((2, *SHAPE))),
    "weight misaligned": (
        VECTORISED,
        "cpu",
        SHAPE,
        ("weight", "address"),
        lambda m: _with(m, weight=_shifted(SHAPE)) or _x(),
    ),
    "N % 4": (VECTORISED, "cpu", (3, 5), ("x", "15", "multiple of 4"), lambda m: _x((2, 3, 5))),
    "N > 2^24": (
        VECTORISED,
        "meta",
        (2**24 + 4,),
        ("x", str(2**24 + 4)),
        lambda m: m.to("meta") and _x((1, 2**24 + 4), device="meta"),
    ),
    "no weight": (STRICT, "cpu", SHAPE, ("weight", "affine"), lambda m: _with(m, weight=None) or _x()),
    "no bias": (STRICT, "cpu", SHAPE, ("bias", "affine"), lambda m: _with(m, bias=None) or _x()),
    "two batch dims": (STRICT, "cpu", SHAPE, ("x", "shape"), lambda m: _x((2, 2, *SHAPE))),
    "no batch dim": (STRICT, "cpu", SHAPE, ("x", "shape"), lambda m: _x(SHAPE)),
    "other row": (CUDA, "cpu", SHAPE, ("x", "shape"), lambda m: _x((2, 4, 4, 3))),
    "2^31 elements": (
        SINGLE,
        "meta",
        (2**15,),
        ("x", "2^31"),
        lambda m: m.to("meta") and _x((2**16, 2**15), device="meta"),
    ),
}


@pytest.mark.parametrize(("case", "stem"), [(case, stem) for case, row in REFUSED.items() for stem in row[0]])
def test_refuses_what_it_does_not_support(case, stem):
    _, device, shape, words, change = REFUSED[case]
    space, recorder = recorded(stem, device)
    model = space["ModelNew"](shape)
    x = change(model)
    with pytest.raises(ValueError) as caught:
        model(x)
    assert all(word in str(caught.value) for word in words), f"{stem}.py, {case}: {caught.value} lacks one of {words}"
    assert not recorder.launches, f"{stem}.py launched {recorder.launches} before it refused"


# id: (files, device, row shape, x) that must reach the launches; without them the table above could not fail
ACCEPTED = {
    "plain": (CUDA, "cpu", SHAPE, lambda: _x()),
    "a gradient": (CUDA, "cpu", SHAPE, lambda: _x(requires_grad=True)),
    "odd width": (ANY_WIDTH, "cpu", (3, 5), lambda: _x((2, 3, 5))),
    "misaligned x": (ANY_WIDTH, "cpu", SHAPE, lambda: _shifted((2, *SHAPE))),
    "N = 2^24": (CUDA, "meta", (2**24,), lambda: _x((1, 2**24), device="meta")),
    "65,537 rows": (CUDA, "meta", (4,), lambda: _x((65537, 4), device="meta")),
    "2^31 - 2^15 elements": (SINGLE, "meta", (2**15,), lambda: _x((2**16 - 1, 2**15), device="meta")),
}


@pytest.mark.parametrize(("case", "stem"), [(case, stem) for case, row in ACCEPTED.items() for stem in row[0]])
def test_launches_for_what_it_supports(case, stem):
    _, device, shape, make = ACCEPTED[case]
    space, recorder = recorded(stem, device)
    model = space["ModelNew"](shape).to(device)
    x = make()
    with torch.enable_grad():  # upstream times with grad enabled
        y = model(x)
    assert recorder.launches, f"{stem}.py launched nothing"
    assert y.shape == x.shape and y.dtype == x.dtype and not y.requires_grad


@every_cuda
def test_zero_rows_give_an_empty_output_and_no_launch(stem):
    space, recorder = recorded(stem, "cpu")
    model = space["ModelNew"](SHAPE)
    assert model(_x((0, *SHAPE))).shape == (0, *SHAPE)
    if hasattr(model, "forward_with_stats"):
        assert [tuple(t.shape) for t in model.forward_with_stats(_x((0, *SHAPE)))] == [(0, *SHAPE), (0,), (0,)]
    assert not recorder.launches, "a grid of no blocks is a CUDA error"


# official, and the shapes at which a grid limit lies
GRIDS = [(16, 4194304), (1, 4), (65536, 512), (65537, 512), (1 << 20, 512), (2, 2**24), (1, 2**24 - 4), (4096, 1024)]


@every_cuda
@pytest.mark.parametrize(("rows", "n"), GRIDS)
def test_no_grid_exceeds_what_cuda_takes(stem, rows, n):
    space = namespace(stem)
    plan = space["geometry"](rows, n, torch.float32, h200_limits(space))
    grids = {name: value for name, value in plan._asdict().items() if "grid" in name}
    assert grids, f"{stem}.py: geometry names no grid"
    for name, grid in grids.items():
        for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False):
            assert 0 < size <= limit, f"{stem}.py at {rows} x {n}: {name} {grid}"


# ---- TorchScript ----


def reference_of(model, x):
    return torch.nn.functional.layer_norm(x, SHAPE, model.ln.weight, model.ln.bias, model.ln.eps)


def _double(model):
    model.to(torch.float64)
    return _random(dtype=torch.float64)


def _other_storage(model):
    model.ln.weight = torch.nn.Parameter(torch.randn(SHAPE))
    return _random()


def _other_eps(model):
    model.ln.eps = 0.5
    return _random()


def _in_place(model):
    with torch.no_grad():
        model.ln.weight.mul_(3)
        model.ln.bias.add_(1)
    return _random()


def _random(rows=2, **options):
    return torch.randn((rows, *SHAPE), **options)


CHANGES = {  # (change(model) -> x, traces in all)
    "nothing": (lambda model: _random(), 1),
    "values of the parameters": (_in_place, 1),
    "rows": (lambda model: _random(rows=5), 2),
    "dtype": (_double, 2),
    "storage of a parameter": (_other_storage, 2),
    "eps": (_other_eps, 2),
}


@pytest.mark.parametrize("stem", TORCHSCRIPT)
@pytest.mark.parametrize("change", CHANGES)
def test_torchscript_traces_again_when_what_the_trace_holds_changes(stem, change, monkeypatch):
    torch.manual_seed(0)
    model = namespace(stem)["ModelNew"](SHAPE)
    made, trace = [], torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda *a, **k: made.append(1) or trace(*a, **k))
    for _ in range(3):
        model(_random())
    assert len(made) == 1, f"{stem}.py traced {len(made)} times for one key"
    alter, traces = CHANGES[change]
    x = alter(model)
    torch.testing.assert_close(model(x), reference_of(model, x), atol=1e-5, rtol=1e-5)
    assert len(made) == traces, f"{stem}.py after another {change}: {len(made)} traces"
    assert set(model.state_dict()) == {"ln.weight", "ln.bias"}, "the trace must not enter the state dict"


@pytest.mark.parametrize("stem", [stem for stem in TORCHSCRIPT if stem != "native_torchscript"])
def test_no_run_before_the_fuser_is_done_is_handed_out(stem, monkeypatch):
    """On a GPU the first run of a trace is not fused: 200 calls gave two hashes, and Inf in one row changed others."""
    runs = []

    def trace(module, inputs, check_trace):
        def run(x):
            runs.append(1)
            return module(x) * (1 + 1e-6 * (len(runs) == 1))

        return run

    monkeypatch.setattr(torch.jit, "trace", trace)
    model, x = namespace(stem)["ModelNew"](SHAPE), _random()
    first = model(x)
    assert all(torch.equal(first, model(x)) for _ in range(3))


# ---- library files ----

REFUSED_BY_LIBRARY = {
    "other row": ("x", lambda m: _x((2, 4, 4, 3))),
    "no weight": ("weight", lambda m: _with(m, weight=None) or _x()),
    "weight of another dtype": ("weight", lambda m: _with(m, weight=torch.ones(SHAPE).double()) or _x()),
}


@pytest.mark.parametrize("stem", LIBRARY)
@pytest.mark.parametrize("case", REFUSED_BY_LIBRARY)
def test_library_files_refuse_what_would_broadcast_or_promote(stem, case):
    word, change = REFUSED_BY_LIBRARY[case]
    model = namespace(stem)["ModelNew"](SHAPE)
    x = change(model)
    with pytest.raises(ValueError, match=word):
        model(x)


@pytest.mark.parametrize("stem", LIBRARY)
def test_library_files_compute_layer_norm(stem):
    torch.manual_seed(0)
    model = namespace(stem)["ModelNew"](SHAPE)
    with torch.no_grad():
        model.ln.weight.normal_()
        model.ln.bias.normal_()
    x = _random(rows=3)
    torch.testing.assert_close(model(x), reference_of(model, x), atol=1e-5, rtol=1e-5)
