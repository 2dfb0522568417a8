"""RemoteModel on a GPU: tensors by raw CUDA IPC handles, both ways, across the cell; and builds inside it."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import pytest
import torch

from kbsub.adapters.task import load_task
from kbsub.eval.process.cell import Cell
from kbsub.eval.process.isolated import Status
from kbsub.eval.remote.model import RemoteError, Worker, WorkerFailure
from kbsub.eval.remote.probes import Poison
from support.paths import TESTS

pytestmark = pytest.mark.gpu
HERE = TESTS / "support" / "remote_candidates"
SHAPE = (8,)

GPU_CANDIDATE = """
import os, time
import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)
        self.kept = []

    def forward(self, x):
        return self.ln(x)

    def many(self, x):
        big = torch.empty(1 << 22, device=x.device)
        return self.ln(x), self.ln(x)[1:], x[1:], self.ln(x).cpu(), big.fill_(3)[100:116], x.t(), x[:0], 7

    def writes_input(self, x):
        x.add_(1)
        return x.clone()

    def illegal(self, x):
        torch.ops.aten.index_select(x, 0, torch.tensor([1 << 20], device=x.device))
        torch.cuda.synchronize()

    def hog(self, x):
        self.kept += [torch.empty(1 << 40, dtype=torch.uint8, device=x.device)]

    def expandable(self, x):
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        return torch.full((1 << 22,), 5.0, device=x.device) + x.sum() * 0

    def foreign(self, x):
        import cupy
        return torch.from_dlpack(cupy.full(100, 9, dtype=cupy.float32))

    def frees(self, x, value):
        torch.cuda.empty_cache()  # the last answer's memory goes back to the driver, and this one takes its place
        return torch.full((1 << 23,), value, device=x.device)

    def refuses(self, x):
        raise ValueError("not this one")

    def exits(self, x):
        os._exit(0)
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    task = load_task(1, 40, kernelbench=None)
    cell = Cell(tmp_path_factory.mktemp("gpu") / "cell")
    print("cell:", cell.confinement())
    with Worker.start(GPU_CANDIDATE, task, cell=cell, device="cuda", timeout_s=180) as started:
        yield started


def fresh(tmp_path: Path, text: str = GPU_CANDIDATE, **options) -> Worker:
    task = load_task(1, 40, kernelbench=None)
    return Worker.start(text, task, cell=Cell(tmp_path / "cell"), device="cuda", timeout_s=300, **options)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).cuda()


def reference() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.ln = torch.nn.LayerNorm(SHAPE)
    for each in layer.ln.parameters():
        each.data.normal_()
    return layer.cuda()


def test_an_output_has_the_bits_of_a_call_in_this_process(worker):
    truth, x = reference(), draw(6, 8)
    model = worker.construct([SHAPE])
    model.load_state(truth.state_dict())
    with torch.no_grad():
        assert torch.equal(model(x), truth.ln(x))
    assert all(torch.equal(value, truth.state_dict()[key]) for key, value in model.state().items())


def test_memory_that_the_worker_frees_and_takes_anew_is_read_anew(worker):
    model, x = worker.construct([SHAPE]), draw(6, 8)
    for turn in range(40):  # more than mappings are kept
        answer = model.call([x, float(turn)], method="frees").value
        assert bool((answer == turn).all())
    model.drop()


@pytest.mark.parametrize("rows", [3, 70_000, 5])  # the block grows, and stays
def test_outputs_of_every_size_and_call_after_call(worker, rows):
    model, x = worker.construct([SHAPE]), draw(rows, 8)
    for scale in (1, 2, 3):
        assert torch.equal(model(x * scale), torch.nn.functional.layer_norm(x * scale, SHAPE))
    model.drop()


def test_outputs_of_every_kind_arrive(worker):
    x = draw(6, 8)
    reply = worker.construct([SHAPE]).call([x], method="many")
    y = torch.nn.functional.layer_norm(x, SHAPE)
    plain, part, view, cpu, inner, turned, empty, number = reply.value
    for found, expected in ((plain, y), (part, y[1:]), (view, x[1:]), (cpu, y), (turned, x.t())):
        assert torch.equal(found, expected)
    assert inner.tolist() == [3.0] * 16 and empty.shape == (0, 8) and number == 7
    assert reply.mutated == ()
    facts = reply.tensors
    assert [each.copied for each in facts[:5]] == [False, False, True, True, False]
    assert [each.device for each in facts[3:4]] == ["cpu"] and facts[2].aliases_input and not facts[0].aliases_input


def test_a_view_keeps_its_layout(worker):
    model, x = worker.construct([SHAPE]), draw(8, 6).t()
    assert torch.equal(model(x), torch.nn.functional.layer_norm(x, SHAPE))
    offset = draw(49)[1:].view(6, 8)
    assert torch.equal(model(offset), torch.nn.functional.layer_norm(offset, SHAPE))


def test_an_input_that_was_written_is_seen(worker):
    x = draw(6, 8)
    before = x.clone()
    assert worker.construct([SHAPE]).call([x], method="writes_input").mutated == (0,)
    assert torch.equal(x, before)


def test_a_captured_graph_is_replayed_on_new_contents_and_parameters(worker):
    model, x = worker.construct([SHAPE]), draw(6, 8)
    model.capture([x])
    truth = reference()
    model.load_state(truth.state_dict())
    with torch.no_grad():
        assert torch.equal(model.replay([x * 3 + 1]).value, truth.ln(x * 3 + 1))


@pytest.mark.parametrize("method", ["expandable", "foreign"])
def test_memory_of_another_allocator_arrives(tmp_path, method):
    if method == "foreign":
        pytest.importorskip("cupy")
    with fresh(tmp_path) as worker:
        value = worker.construct([SHAPE]).call([draw(6, 8)], method=method).value
    assert set(value.flatten().tolist()) == {5.0 if method == "expandable" else 9.0}


@pytest.mark.parametrize(
    ("method", "status"),
    [
        ("illegal", Status.RUNTIME_ERROR),
        ("hog", Status.OUT_OF_MEMORY),
        ("refuses", Status.RUNTIME_ERROR),
        ("exits", Status.CRASHED),
    ],
)
def test_what_goes_wrong_there_leaves_this_process_and_its_gpu_whole(tmp_path, method, status):
    x = draw(6, 8)
    with fresh(tmp_path) as worker:
        with pytest.raises(RemoteError) as caught:
            worker.construct([SHAPE]).call([x], method=method)
    assert caught.value.status is status, caught.value
    assert (x + 1).sub(1).allclose(x, atol=1e-5)


def test_a_handle_that_is_none_is_a_malformed_reply(tmp_path):
    text = GPU_CANDIDATE + (
        "\nimport kbsub.eval.remote.worker as w, sys\nsys.modules['__main__'].handle_of = lambda base: b'x' * 64\n"
    )
    with fresh(tmp_path, text) as worker, pytest.raises(WorkerFailure) as caught:
        worker.construct([SHAPE])(draw(6, 8))
    assert caught.value.status is Status.CRASHED


BUILDS = {
    "cupy": '''
import cupy
KERNEL = cupy.RawKernel('extern "C" __global__ void f(float* y, int n)'
                        '{int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] *= 2.f;}', "f")
def twice(x):
    y = x.clone(); KERNEL((64,), (256,), (cupy.from_dlpack(y), cupy.int32(y.numel()))); return y
''',
    "inductor": "twice = torch.compile(lambda x: x * 2)\n",
    "load_inline": '''
from torch.utils.cpp_extension import load_inline
MODULE = load_inline("kbsub_twice", cpp_sources="torch::Tensor f(torch::Tensor x);", functions=["f"], cuda_sources="""
#include <torch/extension.h>
__global__ void k(float* y, int n) { int i = blockIdx.x * 256 + threadIdx.x; if (i < n) y[i] *= 2.f; }
torch::Tensor f(torch::Tensor x) {
    auto y = x.clone(); k<<<(y.numel() + 255) / 256, 256>>>(y.data_ptr<float>(), y.numel()); return y; }
""")
twice = lambda x: MODULE.f(x)
''',
    "triton": '''
import importlib.util, os, tempfile
PATH = os.path.join(tempfile.mkdtemp(), "twice_kernel.py")
open(PATH, "w").write("""
import triton, triton.language as tl
@triton.jit
def k(X, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(X + i, tl.load(X + i, mask=i < n) * 2, mask=i < n)
""")
SPEC = importlib.util.spec_from_file_location("twice_kernel", PATH)
MODULE = importlib.util.module_from_spec(SPEC); SPEC.loader.exec_module(MODULE)
def twice(x):
    y = x.clone(); MODULE.k[(16,)](y, y.numel(), 1024); return y
''',
}  # fmt: skip


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.timeout(600)
def test_what_compiles_outside_compiles_inside(tmp_path, name):
    if name in ("cupy", "triton"):
        pytest.importorskip(name)
    text = f"import torch\n{BUILDS[name]}\nclass ModelNew(torch.nn.Module):\n"
    text += "    def __init__(self, shape): super().__init__()\n    def forward(self, x): return twice(x)\n"
    x = draw(16, 1000)
    started = time.monotonic()
    with fresh(tmp_path, text) as worker:
        assert torch.equal(worker.construct([SHAPE])(x), x * 2)
    print(f"{name}: {time.monotonic() - started:.1f} s")


def test_the_price_of_a_call_is_said(worker, capsys):
    """Prints ms a call for a small and for the official input; fails beyond a generous bound."""
    small, large = draw(6, 8), torch.rand(16, 64, 256, 256, device="cuda")
    tiny, full = worker.construct([SHAPE]), worker.construct([(64, 256, 256)])
    for name, model, x, bound_ms in (("6x8", tiny, small, 50), ("16x64x256x256", full, large, 500)):
        model(x)
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            started = time.perf_counter()
            model(x)
            samples.append((time.perf_counter() - started) * 1e3)
        with capsys.disabled():
            print(f"\nremote call, {name}: median {statistics.median(samples):.2f} ms, least {min(samples):.2f} ms")
        assert statistics.median(samples) < bound_ms


def test_an_output_behind_slow_work_on_the_current_stream(tmp_path):
    """A call that joins its stream is seen finished; one that works on a stream of its own is not."""
    text = (
        GPU_CANDIDATE
        + """
    def elsewhere(self, x):
        with torch.cuda.stream(torch.cuda.Stream()):
            return self.ln(x)
"""
    )
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(1 << 16, 8, device=device)
    right = torch.nn.functional.layer_norm(x, SHAPE)
    cell, task = Cell(tmp_path / "cell"), load_task(1, 40, kernelbench=None)
    with Worker.start(text, task, cell=cell, device=device) as worker:
        model = worker.construct([SHAPE])
        model(x)
        seen, finished = model.on_current_stream([x], Poison(shape=tuple(x.shape), dtype=x.dtype, blocks=8)).value
        assert torch.allclose(seen, right, atol=1e-5) and torch.equal(seen, finished)
        assert torch.equal(model.call([x], keep=1).value, model.read(1, [x + 1]).value)
    beside = text.replace("def forward", "def joined").replace("def elsewhere", "def forward")
    with Worker.start(
        beside, load_task(1, 40, kernelbench=None), cell=Cell(tmp_path / "cell"), device=device
    ) as worker:
        model = worker.construct([SHAPE])
        model(x)
        seen, _ = model.on_current_stream([x], Poison(shape=tuple(x.shape), dtype=x.dtype, blocks=8)).value
        assert not torch.allclose(seen, right, atol=1e-5)
        assert worker.peak_bytes() > x.nbytes
