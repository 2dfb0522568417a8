"""A task that this machine cannot hold is said before its inputs are drawn; nothing is refused that would have fit."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kbsub.adapters.task import load_local_task
from kbsub.eval.cli import app
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run import batch, task_size
from kbsub.eval.run.task_size import estimate, most_bytes, refusals, too_large
from support.paths import TESTS

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = """
import torch


class Model(torch.nn.Module):
    def __init__(self{arguments}):
        super().__init__()
        {init}

    def forward(self, {inputs}):
        {forward}


def get_inputs():
    {draws}


def get_init_inputs():
    return [{given}]
"""


def task_text(draws="return [torch.rand(4096, 393216)]", forward="return x.relu()", inputs="x", init="pass", **more):
    facts = {"arguments": "", "given": "", **more}
    return TASK.format(draws=draws, forward=forward, inputs=inputs, init=init, **facts)


GB4 = 4096 * 393216 * 4
# task -> bytes of inputs, parameters, outputs at fp32, of inputs as drawn; None: no estimate, the run goes on
ESTIMATES = {
    "one ReLU": (task_text(), (GB4, 0, GB4, GB4)),
    "in place": (task_text(forward="return x.relu_()"), (GB4, 0, 0, GB4)),
    "an expanded input lies in memory once": (
        task_text("return [torch.rand(1, 8).expand(1 << 30, 8)]", forward="return x.sum()"),
        (32, 0, 4, 32),
    ),
    "parameters": (
        task_text(
            "return [torch.rand(2, 64)]",
            init="self.l = torch.nn.Linear(64, n)",
            forward="return self.l(x)",
            arguments=", n",
            given="1 << 28",
        ),
        (512, 4 * 65 * (1 << 28), 4 * 2 * (1 << 28), 512),
    ),
    "integers count in the task's precision, as upstream casts them": (
        task_text("return [torch.randint(0, 9, (1 << 20,))]"),
        (4 << 20, 0, 4 << 20, 8 << 20),
    ),
    # the output cannot be had without values; inputs and parameters can
    "a forward that reads values": (task_text(forward="return x * x.sum().item()"), (GB4, 0, 0, GB4)),
    "inputs from numpy": (
        task_text("import numpy as np\n    return [torch.from_numpy(np.zeros((2, 3), np.float32))]"),
        None,
    ),
    "inputs that read values": (task_text("return [torch.rand(int(torch.rand(3).sum().item()) + 1)]"), None),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_the_estimate(tmp_path, name):
    text, expected = ESTIMATES[name]
    (tmp_path / "task.py").write_text(text)
    found = estimate({"task": str(tmp_path / "task.py"), "precision": "fp32", "device": "cpu"}, lambda event: None)
    keys = ("inputs", "parameters", "outputs", "drawn")
    assert (found and tuple(found[key] for key in keys)) == expected


def test_half_precision_takes_half(tmp_path):
    (tmp_path / "task.py").write_text(task_text())
    found = estimate({"task": str(tmp_path / "task.py"), "precision": "bf16", "device": "cpu"}, lambda event: None)
    assert found is not None and (found["inputs"], found["drawn"]) == (GB4 // 2, GB4)


FOUND = {"inputs": 600, "parameters": 100, "outputs": 300, "drawn": 600, "shrinks": False, "gpu_free": None}
OFFICIAL = {"official", "identity", "referee"}
ALL = {*OFFICIAL, "stress", "oracle", "guards"}
# what was found, bytes there, device -> stages that are refused
REFUSED = {
    "it fits to the byte": ({}, 1000, "cpu", set()),
    "one byte too much": ({}, 999, "cpu", OFFICIAL),
    "the draw alone is too much": ({}, 599, "cpu", ALL),
    "a bare LayerNorm is run smaller elsewhere": ({"shrinks": True}, 599, "cpu", {"official"}),
    "on a GPU the draw lies elsewhere": ({}, 599, "cuda", OFFICIAL),
    "on a GPU it fits": ({}, 1000, "cuda", set()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    more, there, device, stages = REFUSED[name]
    task = load_local_task(TESTS / "support" / "small_layer_norm_task" / "reference.py")
    assert set(refusals(task, {**FOUND, **more}, there, device)) == stages


# a program's text -> whether a child is worth asking
WORTH = {
    "small numbers": ("batch_size, features, dim1, dim2 = 16, 64, 256, 256", False),
    "large numbers": ("shape = (4096, 393216)", True),
    "a power": ("n = 2 ** 40", True),
    "a shift": ("n = 1 << 40", True),
    "large floats": ("n = int(1e10)", True),
    "huge": (f"n = {'9' * 400}", True),
    "no program": ("def (", True),
}


@pytest.mark.parametrize("name", WORTH)
def test_small_tasks_cost_no_child(name):
    text, worth = WORTH[name]
    assert (most_bytes(text) > task_size.SURELY_FITS) is worth


def test_a_small_task_asks_no_child(monkeypatch):
    monkeypatch.setattr(task_size, "run_isolated", lambda *given, **more: pytest.fail("a child was asked"))
    task = load_local_task(TESTS / "support" / "small_layer_norm_task" / "reference.py")
    assert too_large(task, "local:reference.py", None, "cpu") == {}


@pytest.mark.parametrize("ended", [Status.TIMEOUT, Status.CRASHED, Status.RUNTIME_ERROR])
def test_where_the_estimate_cannot_be_had_the_run_goes_on(tmp_path, monkeypatch, ended):
    (tmp_path / "task.py").write_text(task_text() + f"# {ended}\n")
    monkeypatch.setattr(task_size, "run_isolated", lambda *given, **more: Outcome(ended, None, "", "", 0.1))
    monkeypatch.setattr(task_size, "memory_limit_bytes", lambda: 1)
    task = load_local_task(tmp_path / "task.py")
    assert too_large(task, str(tmp_path / "task.py"), None, "cpu") == {}


# ---- whole commands: nothing of this size is ever drawn ----

CANDIDATE = (
    "import torch\n\n\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x.clamp(min=0)\n"
)


@pytest.fixture
def huge(tmp_path, monkeypatch):
    """A task of 2 x 6.4 GB beside two candidates, on a machine that can give 8 GB."""
    (tmp_path / "huge.py").write_text(task_text())
    for stem in ("one", "two"):
        (tmp_path / f"{stem}.py").write_text(CANDIDATE)
    monkeypatch.setattr(task_size, "memory_limit_bytes", lambda: 8_000_000_000)
    task_size._asked.cache_clear()
    return tmp_path


def test_kbsub_eval_says_it_and_runs_nothing(huge, monkeypatch):
    asked = []
    ask = task_size.run_isolated
    monkeypatch.setattr(task_size, "run_isolated", lambda *given, **more: asked.append(given[0]) or ask(*given, **more))
    out = huge / "out.json"
    names = [str(huge / "one.py"), str(huge / "two.py")]
    only = ["--only", "official,identity", "--device", "cpu"]
    done = CliRunner().invoke(app, ["eval", *names, "--task", str(huge / "huge.py"), "--out", str(out), *only])
    rows = json.loads(out.read_text())["candidates"]
    assert {row["status"] for row in rows.values()} == {"NOT_RUN"} and done.exit_code == 0, done.output
    words = rows["two"]["reason"]
    assert "huge is too large for here: 6.4 GB of inputs and 6.4 GB of outputs in fp32" in words
    assert "this machine can give 8.0 GB" in words and "Run it on a machine with more memory" in words
    assert asked == [task_size.TARGET], "once a run, not once a row"


def test_kbsub_gate_cannot_certify_it(huge):
    arguments = [str(huge / "one.py"), "--task", str(huge / "huge.py"), "--require", "official", "--device", "cpu"]
    done = CliRunner().invoke(app, ["gate", *arguments])
    assert done.exit_code == 3 and "too large for here" in done.output, done.output


def test_a_row_of_a_batch_is_not_run_either(huge, monkeypatch):
    task = load_local_task(huge / "huge.py")
    monkeypatch.setattr("kbsub.adapters.task.resolve_task", lambda text, **more: task)
    monkeypatch.setattr(task_size, "_asked", lambda *given: {**FOUND, "inputs": GB4, "outputs": GB4, "drawn": GB4})
    runs = huge / "runs"
    runs.mkdir()
    (runs / "level_1_problem_19_sample_0_kernel.py").write_text(CANDIDATE)
    settings = batch.Settings(device="cpu")
    ran = []
    (job,) = batch.prepare(runs, settings).jobs
    row = batch.judge(job, isolate=lambda *given, **more: ran.append(given))
    assert row["status"] == "NOT_RUN" and "too large for here" in row["message"] and not ran
