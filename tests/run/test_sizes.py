"""Three sizes of every task: what they cost, at which a stage judges, and that nothing which does not fit is drawn."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kbsub.adapters.integers import integers, most_bytes, with_integers
from kbsub.adapters.task import load_local_task, load_task
from kbsub.eval.cli import app
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run import sizes
from kbsub.eval.run.batch import job as jobs
from kbsub.eval.run.batch.work import prepare
from kbsub.eval.run.derive_size import LIMITS, costs_of, derive, halved, kinds_of
from kbsub.eval.run.sizes import RunSizes, sizes_for
from kbsub.eval.tasks.sizes import CHECK, OFFICIAL, SMALL, Costs, Size, TaskSizes, recorded, stated
from kbsub.eval.verdicts.register import KINDS

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = """
import torch
{integers}

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
    facts = {"arguments": "", "given": "", "integers": "", **more}
    return TASK.format(draws=draws, forward=forward, inputs=inputs, init=init, **facts)


def local(folder, text):
    (folder / "task.py").write_text(text)
    return load_local_task(folder / "task.py")


@pytest.fixture
def tiny(tmp_path):
    """The path of a task of a few elements."""
    (tmp_path / "tiny.py").write_text(task_text("return [torch.rand(4, 4)]"))
    return tmp_path / "tiny.py"


# ---- what a size costs, without drawing it ----

GB4 = 4096 * 393216 * 4
# task -> bytes of inputs, parameters, outputs; None: not known, the run goes on
COSTS = {
    "one ReLU": (task_text(), (GB4, 0, GB4)),
    "in place": (task_text(forward="return x.relu_()"), (GB4, 0, 0)),
    "an expanded input lies in memory once": (
        task_text("return [torch.rand(1, 8).expand(1 << 30, 8)]", forward="return x.sum()"),
        (32, 0, 4),
    ),
    "parameters": (
        task_text(
            "return [torch.rand(2, 64)]",
            init="self.l = torch.nn.Linear(64, n)",
            forward="return self.l(x)",
            arguments=", n",
            given="1 << 28",
        ),
        (512, 4 * 65 * (1 << 28), 4 * 2 * (1 << 28)),
    ),
    "several outputs": (task_text("return [torch.rand(4)]", forward="return x + 1, [x * 2]"), (16, 0, 32)),
    "integers as they are drawn": (task_text("return [torch.randint(0, 9, (1 << 20,))]"), (8 << 20, 0, 8 << 20)),
    # the output cannot be had without values; inputs and parameters can
    "a forward that reads values": (task_text(forward="return x * x.sum().item()"), (GB4, 0, 0)),
    "small inputs from numpy are made": (
        task_text("import numpy as np\n    return [torch.from_numpy(np.zeros((2, 3), np.float32))]"),
        (24, 0, 24),
    ),
    "large ones are not": (
        task_text("import numpy as np\n    return [torch.from_numpy(np.zeros((4096, 393216), np.float32))]"),
        None,
    ),
}


@pytest.mark.parametrize("name", COSTS)
def test_the_costs(tmp_path, name):
    text, expected = COSTS[name]
    task = local(tmp_path, text)
    if expected is None:
        with pytest.raises(RuntimeError, match="what its inputs take is not known"):
            costs_of(task)
        return
    found = costs_of(task)
    assert (found.inputs, found.parameters, found.outputs) == expected


def test_products_are_counted_and_the_largest_tensor_on_the_way(tmp_path):
    task = local(tmp_path, task_text("return [torch.rand(8, 4)]", forward="return (x @ x.T).sum()"))
    assert costs_of(task) == Costs(inputs=128, outputs=4, largest=256, flops=2 * 8 * 8 * 4)


# ---- what the integers of a program are for ----

PRODUCT = task_text(
    "return [torch.rand(batch_size, *shape)]",
    integers="batch_size = 64 * 64\nshape = (65535,)\nout = 1000\nkernel = (3, 3)\nlayers = 2",
    init="self.l = torch.nn.Linear(w, out); self.more = torch.nn.Sequential(*[torch.nn.ReLU() for _ in range(n)])",
    arguments=", w, out, n",
    given="shape[0], out, layers",
    forward="return self.more(self.l(x))",
)


def test_an_integer_s_use_is_found_out_by_halving_it(tmp_path):
    task = local(tmp_path, PRODUCT)
    assert integers(task.source) == {"batch_size": 4096, "shape[0]": 65535, "out": 1000, "kernel[*]": 3, "layers": 2}
    assert kinds_of(task) == {"batch_size": "batch", "shape[0]": "width", "out": "width"}


def test_sizes_keep_ranks_and_batch_like_integers_shrink_first(tmp_path):
    found = derive(local(tmp_path, PRODUCT)).sizes
    assert found[OFFICIAL].values == {} and found[OFFICIAL].costs.inputs == 4 * 4096 * 65535
    assert set(found[CHECK].values) == {"batch_size"} and found[CHECK].values["batch_size"] >= 2
    assert not LIMITS[CHECK].score(found[CHECK].costs) and not LIMITS[SMALL].score(found[SMALL].costs)
    assert set(found[SMALL].values) == {"batch_size", "shape[0]", "out"} and found[SMALL].cpu_seconds < 1
    assert found[SMALL].values["shape[0]"] % 2 == 1, "an odd width stays odd"


def test_two_inputs_that_must_agree_shrink_together(tmp_path):
    text = task_text(
        "return [torch.rand(rows, columns), torch.rand(columns)]",
        integers="rows = 32768\ncolumns = 32768",
        inputs="x, y",
        forward="return x * y + y[:, None].expand_as(x)",
    )
    values = derive(local(tmp_path, text)).sizes[SMALL].values
    assert values["rows"] == values["columns"] < 1024


def test_groups_follow_the_width_that_they_divide(tmp_path):
    text = task_text(
        "return [torch.rand(4, width)]",
        integers="width = 8192\ngroups = 512",
        init="self.l = torch.nn.Linear(w, w); self.n = torch.nn.GroupNorm(g, w)",
        arguments=", w, g",
        given="width, groups",
        forward="return self.n(self.l(x))",
    )
    values = derive(local(tmp_path, text)).sizes[SMALL].values
    assert values["width"] % values["groups"] == 0 and values["width"] // values["groups"] >= 16


def test_a_reference_that_takes_no_cast_integers_says_so(tmp_path):
    text = task_text(
        "return [torch.rand(n, 9), torch.randint(0, 9, (n,))]",
        integers="n = 32768",
        inputs="x, y",
        forward="return torch.nn.functional.cross_entropy(x, y)",
    )
    found = derive(local(tmp_path, text))
    assert "refuses its inputs as KernelBench casts them" in found.why_not[OFFICIAL]
    assert found.sizes[SMALL].cpu_seconds is not None


@pytest.mark.parametrize(("value", "half"), [(4096, 2048), (65535, 32767), (8205, 4103), (112, 56), (24, 8), (7, 3)])
def test_half_of_an_integer_keeps_what_kernels_choose_by(value, half):
    assert halved(value) == half


TEXT = "a = b = 7\nd, h = 16, 32\nk = (3, 3)\nl = [8] * 4\ns = (3, 240)\nx = a * 2\né = 'ü'; q = 5\n"


def test_other_values_are_written_into_the_text():
    text = with_integers(TEXT, {"a": 1, "h": 9, "l[*]": 2, "s[1]": 5, "q": 123})
    context: dict = {}
    exec(text, context)
    found = [context[name] for name in ("a", "b", "d", "h", "k", "l", "s", "x", "q")]
    assert found == [1, 1, 16, 9, (3, 3), [2, 2, 2, 2], (3, 5), 2, 123]
    with pytest.raises(ValueError, match="assigns no such integer"):
        with_integers(TEXT, {"x": 1})


# a program's text -> whether its numbers could make more than fits anywhere
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
    assert (most_bytes(text) > sizes.SURELY_FITS) is worth


# ---- the recorded sizes ----


def test_all_250_problems_are_recorded_with_numbers_alone():
    known = recorded()
    levels = [slug.partition("_")[0] for slug in known.tasks]
    assert [levels.count(f"level{level}") for level in (1, 2, 3)] == [100, 100, 50]
    for slug, found in known.tasks.items():
        assert set(found.sizes) == {OFFICIAL, CHECK, SMALL} and not found.sizes[OFFICIAL].values, slug
        assert found.sizes[SMALL].cpu_seconds is not None, f"{slug}: the small size was not tried"
        held = [found.sizes[name].costs.held for name in (OFFICIAL, CHECK, SMALL)]
        assert held == sorted(held, reverse=True), slug
        # VGG's parameters are its size, and level1_40 states its own.
        assert held[1] <= 512 << 20 or slug in ("level1_40", "level3_11", "level3_12"), (slug, held)


def test_what_task_toml_states_is_what_was_recorded():
    task = load_task(1, 40, kernelbench=None)
    for name, values in stated(task).items():
        assert recorded().tasks["level1_40"].sizes[name].values == values, "run: kbsub measure sizes level1_40 --again"


@pytest.mark.kernelbench
@pytest.mark.parametrize("slug", ["level1_19", "level2_62", "level2_11", "level3_43"])
def test_a_recorded_size_is_what_the_reference_takes(kernelbench, slug):
    known = recorded().tasks[slug]
    level, number = map(int, slug.removeprefix("level").split("_"))
    task = load_task(level, number, kernelbench=kernelbench.path)
    assert task.sha256 == known.sha256
    for name in (OFFICIAL, CHECK):
        assert costs_of(task.at(name, known.sizes[name].values)).held == known.sizes[name].costs.held


# ---- which size a stage takes ----

GB, MB = 10**9, 10**6


def known_sizes(*touched):
    made = [Size(values={"n": at}, costs=Costs(inputs=count)) for at, count in enumerate(touched)]
    return TaskSizes(sha256="", sizes=dict(zip((OFFICIAL, CHECK, SMALL), made, strict=False)))


# (bytes of official, check, small; bytes there; device; stage; hosted; --size) -> (size, whether it is refused)
CHOSEN = {
    "a small task is judged as it is": ((MB,), GB, "cpu", "stress", False, "", OFFICIAL, False),
    "hundreds of calls on a CPU": ((800 * MB, 400 * MB, MB), 64 * GB, "cpu", "stress", False, "", SMALL, False),
    "a dozen calls on a CPU": ((800 * MB, 400 * MB, MB), 64 * GB, "cpu", "identity", False, "", OFFICIAL, False),
    "the local check, too": ((8 * GB, 400 * MB, MB), 64 * GB, "cpu", "official", False, "", CHECK, False),
    "threads of kernels on a CPU": ((800 * MB, 400 * MB, MB), 64 * GB, "cpu", "identity", True, "", SMALL, False),
    "official on a GPU": (
        (8 * GB, 400 * MB, MB),
        64 * GB,
        "cuda",
        "official",
        False,
        SMALL,
        OFFICIAL,
        False,
    ),
    "it does not fit": ((80 * GB, 400 * MB, MB), 64 * GB, "cuda", "official", False, "", OFFICIAL, True),
    "hundreds of calls on a GPU": ((8 * GB, 400 * MB, MB), 64 * GB, "cuda", "stress", False, "", CHECK, False),
    "a dozen calls on a GPU": ((8 * GB, 400 * MB, MB), 64 * GB, "cuda", "identity", False, "", OFFICIAL, False),
    "a small GPU": ((8 * GB, 400 * MB, MB), GB, "cuda", "guards", False, "", SMALL, False),
    "asked for": ((8 * GB, 400 * MB, MB), 64 * GB, "cuda", "stress", False, SMALL, SMALL, False),
    "asked for and too large": ((8 * GB, 400 * MB, MB), GB, "cpu", "stress", False, OFFICIAL, OFFICIAL, True),
    "nothing fits": ((8 * GB, 4 * GB, 2 * GB), GB, "cpu", "stress", False, "", SMALL, True),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_size_of_a_stage(monkeypatch, tiny, name):
    touched, there, device, stage, hosted, asked, expected, refused = CHOSEN[name]
    monkeypatch.setattr(sizes, "_there", lambda device: there)
    task = load_local_task(tiny)
    choice = RunSizes(task, device, known_sizes(*touched), asked).of(KINDS[stage], hosted=hosted)
    assert (choice.name, bool(choice.refused)) == (expected, refused), choice


@pytest.mark.parametrize(("precision", "refused"), [("fp32", True), ("bf16", False)])
def test_half_precision_takes_half_but_is_drawn_whole(monkeypatch, tiny, precision, refused):
    task = load_local_task(tiny, precision)
    known = TaskSizes(sha256="", sizes={OFFICIAL: Size(costs=Costs(inputs=600, outputs=400))})
    monkeypatch.setattr(sizes, "_there", lambda device: 999)
    assert bool(RunSizes(task, "cpu", known).of(KINDS["official"]).refused) is refused
    monkeypatch.setattr(sizes, "_there", lambda device: 599)
    assert RunSizes(task, "cpu", known).of(KINDS["official"]).refused


def test_a_small_task_asks_no_child(monkeypatch, tiny):
    monkeypatch.setattr(sizes, "run_isolated", lambda *given, **more: pytest.fail("a child was asked"))
    task = load_local_task(tiny)
    found = sizes_for(task, str(tiny), None, "cpu")
    assert [found.of(kind).name for kind in KINDS.values()] == [OFFICIAL] * len(KINDS)


@pytest.mark.parametrize("ended", [Status.TIMEOUT, Status.CRASHED, Status.RUNTIME_ERROR])
def test_where_the_sizes_cannot_be_had_the_run_goes_on(tmp_path, monkeypatch, ended):
    monkeypatch.setattr(sizes, "run_isolated", lambda *given, **more: Outcome(ended, None, "", "", 0.1))
    monkeypatch.setattr(sizes, "memory_limit_bytes", lambda: 1)
    task = local(tmp_path, task_text() + f"# {ended}\n")
    assert not sizes_for(task, str(tmp_path / "task.py"), None, "cpu").of(KINDS["stress"]).refused


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
    monkeypatch.setattr(sizes, "memory_limit_bytes", lambda: 8_000_000_000)
    sizes._derived.cache_clear()
    return tmp_path


def test_kbsub_eval_says_it_and_runs_nothing(huge, monkeypatch):
    asked = []
    ask = sizes.run_isolated
    monkeypatch.setattr(sizes, "run_isolated", lambda *given, **more: asked.append(given[0]) or ask(*given, **more))
    out = huge / "out.json"
    names = [str(huge / "one.py"), str(huge / "two.py")]
    only = ["--only", "official,identity,stress", "--device", "cpu"]
    done = CliRunner().invoke(app, ["eval", *names, "--task", str(huge / "huge.py"), "--out", str(out), *only])
    rows = json.loads(out.read_text())["candidates"]
    ends = {end["status"] for row in rows.values() for end in row["stages"].values()}
    assert ends == {"NOT_RUN"} and done.exit_code == 0, done.output
    words = rows["two"]["reason"]
    assert "huge is too large for here: 6.4 GB of inputs and 6.4 GB of outputs in fp32" in words
    assert "this machine can give 8.0 GB" in words and "Run it on a machine with more memory" in words
    assert asked == [sizes.TARGET], "once a run, not once a row"


def test_kbsub_gate_cannot_certify_it(huge):
    arguments = [str(huge / "one.py"), "--task", str(huge / "huge.py"), "--require", "official", "--device", "cpu"]
    done = CliRunner().invoke(app, ["gate", *arguments])
    assert done.exit_code == 3 and "too large for here" in done.output, done.output


def test_a_row_of_a_batch_is_not_run_either(huge, monkeypatch):
    task = load_local_task(huge / "huge.py")
    monkeypatch.setattr(jobs, "resolve_task", lambda text, **more: task)
    jobs.task_of.cache_clear()
    known = TaskSizes(sha256="", sizes={OFFICIAL: Size(costs=Costs(inputs=GB4, outputs=GB4))})
    monkeypatch.setattr(sizes, "_derived", lambda *given: known)
    runs = huge / "runs"
    runs.mkdir()
    (runs / "level_1_problem_19_sample_0_kernel.py").write_text(CANDIDATE)
    ran = []
    batch = prepare(runs, jobs.Settings(device="cpu"))
    (todo,) = batch.jobs
    row = jobs.judge(batch.job(todo), isolate=lambda *given, **more: ran.append(given))
    jobs.task_of.cache_clear()
    assert row["status"] == "NOT_RUN" and "too large for here" in row["message"] and not ran


def test_the_row_says_the_size_and_an_unknown_one_is_refused(tmp_path):
    text = task_text("return [torch.rand(rows, 64)]", integers="rows = 1 << 16\nrows = 65536")
    (tmp_path / "task.py").write_text(text)
    (tmp_path / "one.py").write_text(CANDIDATE)
    out = tmp_path / "out.json"
    call = ["eval", str(tmp_path / "one.py"), "--task", str(tmp_path / "task.py"), "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, [*call, "--only", "official", "--size", "small"])
    size = json.loads(out.read_text())["candidates"]["one"]["stages"]["official"]["size"]
    assert size["name"] == SMALL and size["values"]["rows"] < 65536 and size["why"] == "--size small", done.output
    assert CliRunner().invoke(app, [*call, "--size", "tiny"]).exit_code == 2
