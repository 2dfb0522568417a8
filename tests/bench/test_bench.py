"""`kbsub bench` end to end on the CPU with stand-in candidates: drops, restarts, the stored rows, the plan's rules."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kbsub.adapters.task import load_local_task
from kbsub.eval.bench.machine import CpuMachine
from kbsub.eval.bench.parent import run_bench
from kbsub.eval.bench.plan import BenchPlan, CandidateFile, SceneSpec
from kbsub.eval.bench.record import _floors, store
from kbsub.eval.bench.timing import TimingProtocol
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.results.model import read_result
from support.small_reference import REFERENCE

pytestmark = pytest.mark.usefixtures("warm_children")

MODEL = """
import os, torch
class ModelNew(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = torch.nn.LayerNorm(n)
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        {body}
        return self.ln(x)
"""
# stem -> body of forward, status of its row
CANDIDATES = {
    "honest": ("", "OK"),
    "wrong": ("return self.ln(x) + 1", "INCORRECT_NUMERICAL"),
    "flat": ("return self.ln(x).flatten()", "INCORRECT_SHAPE"),
    "raises": ("raise RuntimeError('no')", "RUNTIME_ERROR"),
    "refuses": ("raise ValueError('x: only on Sundays')", "NOT_RUN"),
    "exits": ("if self.calls > 20: os._exit(7)", "CRASHED"),
    "changes_gamma": ("y = self.ln(x); self.ln.weight.data.mul_(1.0000001); return y", "INCORRECT_NUMERICAL"),
    "patches_clock": ("torch.cuda.synchronize = lambda *a: None", "RUNTIME_ERROR"),
    "syntax": (")", "COMPILE_ERROR"),
}


def candidate(stem: str, body: str) -> CandidateFile:
    return CandidateFile(stem, MODEL.format(body=body), "tolerance", ("fp32",))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "reference.py"
    path.write_text(REFERENCE)
    return path


def plan_of(reference: Path, files: list[CandidateFile], **changes) -> BenchPlan:
    shape = {"inputs": [[2, 24]], "init": [24], "seed": 827}
    names = [file.stem for file in files]
    scenes = [
        SceneSpec("official", "fp32", None, None, list(names), ["eager", "torchscript", "copy"]),
        SceneSpec("2x24", "fp32", shape, 8, ["honest"], ["eager"]),
    ]
    plan = BenchPlan(
        task=f"local:{reference}",
        kernelbench=None,
        device="cpu",
        candidates={file.stem: file for file in files},
        scenes=scenes,
        methods=["graph_replay", "cuda_event"],
        protocol=TimingProtocol(rounds=10),
        budget_s=100.0,
    )
    for name, value in changes.items():
        setattr(plan, name, value)
    return plan


@pytest.fixture(scope="module")
def benched(reference, tmp_path_factory):
    """One run over every stand-in; the record and the stored file."""
    files = [candidate(stem, body) for stem, (body, _) in CANDIDATES.items()]
    plan = plan_of(reference, files)
    out = tmp_path_factory.mktemp("out") / "task.json"
    task = load_local_task(reference)
    written = []

    def keep(record):
        store(out, record, task)
        written.append(len(json.loads(out.read_text())["candidates"]) if out.exists() else 0)

    record = run_bench(plan, on_record=keep)
    return plan, record, out, written


@pytest.mark.parametrize("stem", CANDIDATES)
def test_each_ends_its_own_way(benched, stem):
    plan, record, _, _ = benched
    row = record.rows(plan.scenes[0])[stem]
    assert row["status"] == CANDIDATES[stem][1], row


def test_the_others_are_timed_in_full(benched):
    plan, record, _, _ = benched
    for name in ("honest", "eager", "torchscript", "copy"):
        timing = record.rows(plan.scenes[0])[name]["timing"]
        assert len(timing["cpu_rehearsal"]["samples_ms"]) == 10, name
        assert "graph_replay" not in timing, "a rehearsal must not look like a measurement"


def test_an_extra_shape_is_stored_under_its_key(benched):
    _, _, out, _ = benched
    result = read_result(out)
    for row in (result.candidates["honest"], result.baselines["eager"]):
        assert row.shapes is not None
        assert len(row.shapes["2x24"].timing["cpu_rehearsal"].samples_ms) == 8
    assert result.candidates["honest"].shapes["2x24"].bit_identity.identical > 0


def test_a_crash_costs_its_own_row_and_the_scene_is_measured_again(benched):
    plan, record, _, _ = benched
    assert "exits" not in record.scenes[plan.scenes[0].id]["series"]["cpu_rehearsal"]["names"]
    assert any("exits ended the process" in note for note in record.notes)


def test_the_file_grows_while_the_run_goes_on(benched):
    _, _, _, written = benched
    assert len(written) >= 3 and written[0] > 0, f"rows in the file after each step: {written}"


def test_timing_never_touches_the_official_status(benched):
    _, _, out, _ = benched
    honest = read_result(out).candidates["honest"]
    assert honest.status is Status.NOT_RUN and honest.official is None and honest.timing
    assert honest.sha256 == hashlib.sha256(MODEL.format(body="").encode()).hexdigest()


def test_orders_and_quality_are_kept_with_the_run(benched):
    _, record, out, _ = benched
    block = json.loads(out.read_text())["bench"]["runs"][record.run]
    scene = block["scenes"]["official@fp32"]
    assert len(scene["series"]["cpu_rehearsal"]["orders"]) == 10
    assert scene["quality"]["before"]["available"] is False
    assert "upstream's methods need CUDA" in scene["upstream_methods"]
    assert scene["bytes"] == 4 * (4 * 12 + 12 + 12 + 4 * 12)


def test_a_second_run_drops_the_numbers_of_a_program_that_now_fails(benched, reference, tmp_path):
    _, _, out, _ = benched
    copy = tmp_path / "task.json"
    copy.write_text(out.read_text())
    good = MODEL.format(body="")
    plan = plan_of(reference, [CandidateFile("honest", good, "tolerance", ("fp32",))])
    events = [
        {"kind": "environment", "environment": read_result(copy).environment.model_dump(mode="json")},
        {"kind": "dropped", "scene": "official@fp32", "name": "honest", "status": "TIMEOUT", "reason": "hung"},
    ]

    def isolate(target, payload, *, timeout_s, on_progress, **_):
        for event in events:
            on_progress({"stage": event["kind"], "bench": event})
        return Outcome(Status.OK, {}, "", "", 0.1)

    record = run_bench(plan, isolate=isolate)
    store(copy, record, load_local_task(reference))
    row = read_result(copy).candidates["honest"]
    assert row.timing is None and row.bench.status is Status.TIMEOUT


def test_a_program_that_kills_twice_is_left_out_everywhere(reference):
    plan = plan_of(reference, [candidate("honest", "")])
    seen = []

    def isolate(target, payload, *, timeout_s, on_progress, **_):
        seen.append([(scene["key"], scene["candidates"]) for scene in payload["scenes"]])
        for scene in payload["scenes"]:
            if "honest" in scene["candidates"]:
                on_progress({"stage": "build", "program": "honest", "scene": f"{scene['key']}@fp32"})
                return Outcome(Status.TIMEOUT, None, "TIMEOUT after 9 s", "", 9.0)
        return Outcome(Status.OK, {}, "", "", 0.1)

    record = run_bench(plan, isolate=isolate)
    assert seen[-1] == [("official", []), ("2x24", [])], seen
    assert [record.rows(scene)["honest"]["status"] for scene in plan.scenes] == ["TIMEOUT", "TIMEOUT"]


def test_a_lost_context_restarts_without_the_program_that_lost_it(reference):
    plan = plan_of(reference, [candidate("honest", "")])
    children = []

    def isolate(target, payload, *, timeout_s, on_progress, **_):
        children.append(payload["scenes"][0]["candidates"])
        if len(children) == 1:
            row = {"status": "RUNTIME_ERROR", "reason": "illegal memory access"}
            on_progress({"stage": "capture", "program": "honest", "scene": "official@fp32"})
            on_progress(
                {"stage": "dropped", "bench": {"kind": "dropped", "scene": "official@fp32", "name": "honest", **row}}
            )
            return Outcome(Status.RUNTIME_ERROR, None, "ContextLost: the CUDA context is lost", "", 1.0)
        return Outcome(Status.OK, {}, "", "", 0.1)

    record = run_bench(plan, isolate=isolate)
    assert children == [["honest"], []] and record.failure is None
    assert record.rows(plan.scenes[0])["honest"] == {"status": "RUNTIME_ERROR", "reason": "illegal memory access"}


def test_a_child_that_dies_of_nobody_ends_the_run_with_its_reason(reference):
    plan = plan_of(reference, [candidate("honest", "")])
    record = run_bench(plan, isolate=lambda *a, **k: Outcome(Status.RUNTIME_ERROR, None, "no GPU", "log", 0.1))
    assert record.failure == "RUNTIME_ERROR: no GPU"
    assert record.rows(plan.scenes[0])["eager"]["reason"] == "RUNTIME_ERROR: no GPU"


# ---- upstream's methods inside the child, with a stand-in for the GPU ----


class StandInGpu(CpuMachine):
    """The CPU where the child expects a GPU: it "captures graphs" by calling again."""

    graphs = True


# Upstream's functions are taken before any candidate is loaded: one that replaces them later changes nothing.
FAKES_UPSTREAM = """import sys
        for each in list(sys.modules.values()):
            if vars(each).get("get_timing_function") is not None:
                each.get_timing_function = lambda name: lambda *a, num_trials, **k: [1e-6] * num_trials
                each.get_timing_stats = lambda times, device=None: dict()"""


@pytest.mark.kernelbench
def test_the_child_calls_upstreams_methods_for_candidates_and_baselines_alike(kernelbench, reference, monkeypatch):
    import contextlib

    import torch

    from kbsub.adapters.evaluator import import_upstream
    from kbsub.eval.bench import baselines
    from kbsub.eval.bench import child as bench_child

    timing = import_upstream(kernelbench.path).module.timing

    class Event:
        def __init__(self, **options):
            self.options = options

        def record(self):
            return None

        def elapsed_time(self, other):
            return 0.12345

    cuda = SimpleNamespace(
        device=lambda device: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        get_device_name=lambda device: "stand-in",
        Event=Event,
    )
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    monkeypatch.setattr(timing, "clear_l2_cache", lambda device=None: None)
    for name in ("get_timing_function", "get_timing_stats"):  # put back after FAKES_UPSTREAM
        monkeypatch.setattr(timing, name, getattr(timing, name))
    monkeypatch.setattr(bench_child, "machine_for", lambda device: StandInGpu())
    replays = baselines.BaselineProgram("replays graphs itself", own_graphs=True)
    monkeypatch.setitem(baselines.BASELINES, "own_graphs", replays)
    payload = {
        "task": f"local:{reference}",
        "kernelbench": str(kernelbench.path),
        "device": "cuda",
        "methods": ["graph_replay", "cuda_event", "host_time"],
        "protocol": {"rounds": 9, "trials": 20, "passes": 10},
        "budget_s": 60.0,
        "floors": None,
        "sources": {"fakes": MODEL.format(body=FAKES_UPSTREAM), "honest": MODEL.format(body="")},
        "scenes": [
            {
                "key": "official",
                "precision": "fp32",
                "candidates": ["fakes", "honest"],
                "baselines": ["eager", "own_graphs"],
            }
        ],
    }
    events = []
    bench_child.run(payload, events.append)
    final = [event["bench"] for event in events if event.get("bench", {}).get("finished")][-1]
    for name in ("fakes", "honest", "eager", "own_graphs"):
        row = final["rows"][name]
        assert row["status"] == "OK", row
        stats = row["timing"]["cuda_event"]
        assert (stats["trials"], stats["mean_ms"]) == (20, 0.123), "20 trials; upstream rounds to 3 digits"
        assert stats["samples_ms"] == [0.12345] * 20 and row["timing"]["host_time"]["trials"] == 20
        assert ("graph_replay" in row["timing"]) is (name != "own_graphs")
    assert final["upstream_methods"] == "called from the checkout, unmodified"
    assert sorted(final["series"]["cuda_event"]["orders"][0]) == [0, 1, 2, 3]


def test_bench_command_writes_json_table_and_picture(reference, tmp_path):
    from typer.testing import CliRunner

    from kbsub.eval.cli import app

    (tmp_path / "mine.py").write_text(MODEL.format(body=""))
    out = tmp_path / "out" / "task.json"
    call = ["bench", str(tmp_path / "mine.py"), "--task", str(reference), "--device", "cpu", "--allow-unverified"]
    outcome = CliRunner().invoke(app, [*call, "--baselines", "eager", "--rounds", "8", "--out", str(out)])
    assert outcome.exit_code == 0, outcome.output
    assert "these times say nothing about a GPU" in outcome.output
    assert "timed without an official pass" in outcome.output
    assert sorted(path.name for path in out.parent.iterdir()) == ["task.json", "task_time.png", "task_timing.md"]
    refused = CliRunner().invoke(app, [*call[:-1], "--baselines", "none", "--out", str(tmp_path / "none.json")])
    assert "no official verdict is stored for mine" in refused.output and not (tmp_path / "none.json").exists()


def test_interrupted_bench_keeps_what_was_finished(reference, tmp_path):
    import signal
    import subprocess
    import time

    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "bench.toml").write_text("[[shapes]]\ninputs = [[2, 24]]\ninit = [24]\nseed = 827\nrounds = 500\n")
    (tmp_path / "slow.py").write_text(MODEL.format(body="if len(x) == 2: import time; time.sleep(0.05)"))
    out = tmp_path / "task.json"
    call = [
        "bench",
        str(tmp_path / "slow.py"),
        "--task",
        str(tmp_path / "reference.py"),
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    options = ["--allow-unverified", "--shapes", "official,2x24", "--baselines", "eager"]
    command = [sys.executable, "-m", "kbsub.eval.cli", *call, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic() + 60
    while not out.exists() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.0)  # into the second scene
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130 and "every finished method is in" in output, output
    timing = read_result(out).candidates["slow"].timing
    assert timing is not None and len(timing["cpu_rehearsal"].samples_ms) == 35
    assert not [path for path in tmp_path.glob(".*") if path.is_file()], "a draft was left behind"


def test_a_run_without_the_official_shape_leaves_the_files_floors():
    """Copy, chain and bytes of a file are of one run: another run's copy beside them would be of another day."""
    record = SimpleNamespace(floors={"copy_gb_s": 4000.0, "chain_ms": 0.15}, scenes={"8x32@fp32": {"bytes": 8}})
    assert _floors(record).model_dump() == {}
    record.scenes["official@fp32"] = {"bytes": 4_000_000, "input_bytes": 2_000_000}
    found = _floors(record)
    assert (found.copy_gb_s, found.chain_ms, found.memory_ms) == (4000.0, 0.15, 0.001)
    assert found.memory_two_reads_ms == 0.0015


def test_a_rehearsal_keeps_the_two_replays_apart(reference):
    """Under one key the second overwrote the first."""
    plan = plan_of(reference, [candidate("honest", CANDIDATES["honest"][0])], methods=["graph_replay", "cold_replay"])
    plan.scenes = plan.scenes[1:]
    record = run_bench(plan)
    timing = record.rows(plan.scenes[0])["honest"]["timing"]
    assert set(timing) == {"cpu_rehearsal", "cold_cpu_rehearsal"}
    assert "ring" in timing["cold_cpu_rehearsal"] and "ring" not in timing["cpu_rehearsal"]
