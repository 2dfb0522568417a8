"""`kbsub bench` on a real GPU, small: graphs are captured, upstream's methods run, cheats are caught inside them."""

from __future__ import annotations

import pytest

from kbsub.adapters.task import load_local_task
from kbsub.eval.bench.methods.register import part_of_all
from kbsub.eval.bench.parent import run_bench
from kbsub.eval.bench.plan import BenchPlan, CandidateFile, ChainSpec, SceneSpec
from kbsub.eval.bench.record import store
from kbsub.eval.bench.timing import TimingProtocol
from kbsub.eval.results.model import read_result

pytestmark = pytest.mark.gpu

REFERENCE = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = torch.nn.LayerNorm(n)
    def forward(self, x):
        return self.ln(x)
def get_inputs():
    return [torch.rand(64, 4096)]
def get_init_inputs():
    return [4096]
"""
MODEL = """
import torch
cache = {{}}
class ModelNew(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = torch.nn.LayerNorm(n)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        {body}
"""
BODIES = {
    "honest": "return self.ln(x)",
    "remembers_address": "return cache.setdefault(x.data_ptr(), self.ln(x)).clone()",
    "side_stream": (
        "side = torch.cuda.Stream(); y = torch.empty_like(x)\n"
        "        with torch.cuda.stream(side): y.copy_(self.ln(x))\n"
        "        return y"
    ),
    "breaks_the_context": (
        "i = torch.full((8,), 1 << 40, device=x.device)\n"
        "        return self.ln(x) if self.calls < 6 else x.flatten()[i].sum() + self.ln(x)"
    ),
}
BASELINES = ["copy", "eager", "torchscript", "compile_default", "compile_reduce_overhead"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    from kbsub.adapters.checkout import CheckoutError, find_checkout

    folder = tmp_path_factory.mktemp("bench_gpu")
    (folder / "reference.py").write_text(REFERENCE)
    try:
        checkout = str(find_checkout().path)
    except CheckoutError:
        checkout = None
    files = {
        stem: CandidateFile(stem, MODEL.format(body=body), "tolerance", ("fp32",)) for stem, body in BODIES.items()
    }
    shape = {"inputs": [[8, 512]], "init": [512], "seed": 827}
    plan = BenchPlan(
        task=f"local:{folder / 'reference.py'}",
        kernelbench=checkout,
        device="cuda",
        candidates=files,
        scenes=[
            SceneSpec("official", "fp32", None, None, list(BODIES), BASELINES),
            SceneSpec("8x512", "fp16", shape, 9, ["honest"], ["eager"]),
        ],
        methods=part_of_all() if checkout else ["graph_replay"],
        protocol=TimingProtocol(rounds=12, trials=20),
        budget_s=200.0,
        chain=ChainSpec(chains=64 * 128, updates=4096),
    )
    out = folder / "out.json"
    task = load_local_task(folder / "reference.py")
    record = run_bench(plan, on_record=lambda found: store(out, found, task))
    return plan, record, out


def test_the_run_ends_well(measured):
    _, record, _ = measured
    assert record.failure is None, record.notes


def test_graph_replay_of_everything_but_modes_with_graphs_of_their_own(measured):
    plan, record, _ = measured
    rows = record.rows(plan.scenes[0])
    for name in ("honest", "copy", "eager", "torchscript", "compile_default"):
        assert rows[name]["status"] == "OK", rows[name]
        samples = rows[name]["timing"]["graph_replay"]["samples_ms"]
        assert len(samples) == 12 and min(samples) > 0, name
    assert rows["compile_reduce_overhead"]["status"] == "OK", rows["compile_reduce_overhead"]
    assert "graph_replay" not in rows["compile_reduce_overhead"]["timing"]


@pytest.mark.kernelbench
def test_upstreams_methods_are_there_for_everybody(measured):
    plan, record, _ = measured
    for name in ("honest", *BASELINES):
        row = record.rows(plan.scenes[0])[name]
        assert set(row["timing"]) >= {"cuda_event", "do_bench", "do_bench_impl", "host_time"}, (name, row)
        assert row["timing"]["cuda_event"]["trials"] == 20


def test_a_broken_context_costs_its_own_row(measured):
    plan, record, _ = measured
    rows = record.rows(plan.scenes[0])
    assert rows["breaks_the_context"]["status"] in ("RUNTIME_ERROR", "CRASHED"), rows["breaks_the_context"]
    assert rows["honest"]["status"] == "OK"


@pytest.mark.kernelbench
def test_an_answer_remembered_by_address_is_caught(measured):
    plan, record, _ = measured
    row = record.rows(plan.scenes[0])["remembers_address"]
    assert row["status"] == "INCORRECT_NUMERICAL", row


def test_floors_clocks_and_orders_are_stored(measured):
    _, record, out = measured
    floors = read_result(out).floors
    assert floors.copy_gb_s is not None and 100 < floors.copy_gb_s < 20_000
    assert floors.chain_ms is not None and 0 < floors.chain_ms < floors.chain_mean_m2_ms * 1.05
    scene = record.scenes["official@fp32"]
    assert len(scene["series"]["graph_replay"]["orders"]) == 12
    before = scene["quality"]["before"]
    assert before["available"] is False or before["sm_mhz"] > 0, before


def test_a_half_precision_shape_is_bit_equal_to_eager(measured):
    plan, record, _ = measured
    row = record.rows(plan.scenes[1])["honest"]
    assert row["status"] == "OK" and row["verified"]["bit_identical"] == row["verified"]["outputs"], row
