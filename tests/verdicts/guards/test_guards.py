"""Every bad twin is caught by the guard named for it, and by nothing else when that guard is off; the honest are clean.

All runs are small and in forked processes of their own: twins patch clocks, seeds and descriptors of the process. What
needs the real processes and their cells is in test_processes.py.
"""

from __future__ import annotations

import json
import sys
from functools import lru_cache
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kbsub.eval.tasks.declarations import read_declarations
from kbsub.eval.verdicts.guards.rig import NOTHING_KNOWN
from kbsub.eval.verdicts.guards.run import REGISTER
from support.small_reference import REFERENCE
from support.warm import run_forked

TARGET = "kbsub.eval.verdicts.guards:judge"
TASK = f"local:{TESTS / 'support' / 'small_layer_norm_task' / 'reference.py'}"
EVERY_TWIN = tomllib.loads((TESTS / "twins" / "twins.toml").read_text("utf-8"))
TWINS = {name: label for name, label in EVERY_TWIN.items() if "guard" in label}  # others: tests/measure/test_twins.py
ON_CPU = [name for name, label in TWINS.items() if label.get("needs") != "cuda"]
LADDER = ROOT / "submissions" / "level1_40"
# (file, whether it is meant to be right): a rung declared to fail the official check does what a guard looks for.
RUNGS = [(LADDER / f"{s}.py", each.expect.official == "pass") for s, each in read_declarations(LADDER).items()]
MEASURED = ROOT / "results" / "h200" / "twins.json"
CALLS = 12  # past upstream's 5 + 3 calls before the timed ones

NATIVE = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
"""
# What honest files do that a careless guard would call a fault.
HONEST = {
    "native": NATIVE,
    "writes_to_the_cache": NATIVE
    + """
import os, pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
draft = tempfile.NamedTemporaryFile(dir=folder, delete=False)
with draft:
    draft.write(b"cubin")
os.replace(draft.name, folder / "entry")
(folder / "log.txt").write_text("built")
""",
    "clears_its_own_folder": NATIVE  # rmtree names files relative to a folder that it has open
    + """
import pathlib, shutil, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
(folder / "object.o").write_text("built")
shutil.rmtree(folder)
""",
    "defines_records": NATIVE
    + """
import collections, dataclasses, functools, os, tempfile, typing

descriptor, name = tempfile.mkstemp()
os.write(descriptor, b"its own")
with os.fdopen(os.dup(descriptor), "a") as file:
    file.write("still its own")
os.close(descriptor)

class Limits(typing.NamedTuple):
    index: int

@dataclasses.dataclass(frozen=True)
class Geometry:
    grid: int

Old = collections.namedtuple("Old", "a b")
limits = functools.lru_cache(maxsize=None)(Limits)(0)
print("a candidate may print", Geometry(1), Old(1, 2), limits)
""",
    "imports_for_the_first_time": "import sys\nsys.path.insert(0, '.')\nimport fresh_module_of_test_guards\n" + NATIVE,
    "draws_its_weights": NATIVE.replace("super().__init__()", "super().__init__()\n        torch.rand(3)"),
    "two_step": NATIVE.replace(
        "return self.ln(x)",
        "z = torch.nn.functional.layer_norm(x, self.ln.normalized_shape, None, None, self.ln.eps)\n"
        "        return z * self.ln.weight + self.ln.bias",
    ),
}


@lru_cache(maxsize=None)
def judged(source: str, disabled: tuple[str, ...] = (), folder: str = "", task: str = TASK) -> dict:
    payload = {
        "candidate_source": source,
        "task": task,
        "device": "cpu",
        "guards_disabled": disabled,
        "guards_calls": CALLS,
    }
    return run_forked(TARGET, payload, folder)


UNASKED = tuple(name for name in REGISTER if name not in ("parameters_ignored", "parameters_mutated"))


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The working folder of the forked processes: a twin writes a file where it stands."""
    folder = tmp_path_factory.mktemp("nowhere")
    (folder / "fresh_module_of_test_guards.py").write_text("VALUE = 1\n")  # its import writes a .pyc here
    return str(folder)


def source_of(twin: str) -> str:
    return (TESTS / "twins" / f"{twin}.py").read_text("utf-8")


def guards_of(verdict: dict) -> set[str]:
    return {finding["guard"] for finding in verdict["findings"]}


@pytest.mark.parametrize("twin", ON_CPU)
def test_a_twin_is_caught_by_the_guard_named_for_it_alone(twin: str, nowhere: str) -> None:
    named = TWINS[twin]["guard"]
    others = tuple(sorted(set(REGISTER) - {named}))
    verdict = judged(source_of(twin), others, nowhere)
    assert guards_of(verdict) == {named}, f"{twin}: only {named} was on, it said: {verdict}"


@pytest.mark.parametrize("twin", ON_CPU)
def test_with_its_guard_disabled_a_twin_is_not_caught_by_name(twin: str, nowhere: str) -> None:
    named = TWINS[twin]["guard"]
    other_half = {name for name, entry in REGISTER.items() if entry.inside is not REGISTER[named].inside}
    verdict = judged(source_of(twin), tuple(sorted({named} | other_half)), nowhere)
    assert named not in guards_of(verdict), f"{twin}: {named} was disabled and still speaks: {verdict['findings']}"
    assert {"guard": named, "reason": "disabled"} in verdict["not_checked"]


@pytest.mark.slow  # the tests above and below, once more, to say one number
def test_the_mutation_score_is_complete(nowhere: str) -> None:
    """Every twin caught, every honest candidate clean, in one number."""
    missed = []
    for twin in ON_CPU:
        others = tuple(sorted(set(REGISTER) - {TWINS[twin]["guard"]}))
        if not judged(source_of(twin), others, nowhere)["findings"]:
            missed.append(twin)
    accused = {name: judged(text, (), nowhere)["findings"] for name, text in HONEST.items()}
    accused = {name: findings for name, findings in accused.items() if findings}
    score = f"{len(ON_CPU) - len(missed)}/{len(ON_CPU)} twins caught, {len(accused)}/{len(HONEST)} honest ones accused"
    assert not missed and not accused, f"{score}; missed: {missed}; accused: {accused}"


@pytest.mark.parametrize("name", HONEST)
def test_honest_habits_are_clean(name: str, nowhere: str) -> None:
    verdict = judged(HONEST[name], (), nowhere)
    assert verdict["clean"], f"{name}: {verdict['findings']}"


def test_a_file_removed_through_an_open_folder_is_named(nowhere: str) -> None:
    kept = Path(nowhere) / "kept"
    kept.mkdir()
    (kept / "row.json").write_text("{}")
    # A worker would take it away first: here it is in no cell, where nothing could.
    inside = "if not sys.argv[0].endswith('remote.worker'):\n"
    remove = "    os.remove('row.json', dir_fd=os.open('kept', os.O_RDONLY))\n"
    verdict = judged(f"{NATIVE}\nimport os, sys\n{inside}{remove}", (), nowhere)
    assert guards_of(verdict) == {"result_written"}
    assert f"{Path('kept', 'row.json')} os.remove" in verdict["findings"][0]["message"], verdict["findings"]


@pytest.mark.parametrize("path", [path for path, honest in RUNGS if honest], ids=lambda path: path.stem)
def test_every_candidate_of_the_ladder_is_clean(path: Path, nowhere: str) -> None:
    """CUDA files through the host executor. Nothing but what a CPU or the file's kind rules out stays unchecked."""
    verdict = judged(path.read_text("utf-8"), (), nowhere)
    assert verdict["clean"], f"{path.name}: {verdict['findings']}"
    reasons = {entry["guard"] for entry in verdict["not_checked"]}
    assert reasons <= {"side_stream_not_joined", "native_layer_norm_called"}, verdict["not_checked"]


@pytest.mark.parametrize("path", [path for path, honest in RUNGS if not honest], ids=lambda path: path.stem)
def test_a_rung_that_is_declared_to_fail_is_caught(path: Path, nowhere: str) -> None:
    verdict = judged(path.read_text("utf-8"), (), nowhere)
    assert not verdict["clean"], f"{path.name}: declared to fail the official check, and no guard says anything"


def test_the_table_of_twins_is_the_folder() -> None:
    assert set(EVERY_TWIN) == {file.stem for file in (TESTS / "twins").glob("*.py")}


def test_every_guard_has_a_twin() -> None:
    assert {label["guard"] for label in TWINS.values()} == set(REGISTER)


@pytest.mark.parametrize("twin", TWINS)
def test_a_twin_is_short(twin: str) -> None:
    lines = source_of(twin).count("\n")
    assert lines < 60, f"{twin}.py has {lines} lines; a twin is one fault and nothing else"


@pytest.mark.skipif(not MEASURED.exists(), reason="results/h200/twins.json: not measured yet (eval/measure/twins.py)")
@pytest.mark.parametrize("twin", TWINS)
def test_the_label_of_a_twin_is_what_was_measured(twin: str) -> None:
    row = json.loads(MEASURED.read_text("utf-8"))["twins"][twin]
    measured = "pass" if row["passes_upstream"] else "fail"
    assert TWINS[twin]["official"] == measured, (
        f"{twin}: twins.toml says {TWINS[twin]['official']}, measured {measured}"
    )
    assert row["caught"], f"{twin}: on the GPU, {row['guard']} did not catch it: {row['guards']}"


# ---- what a guard must not do: guess ----

TASKS = {
    "dropout": (
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n        return torch.nn.functional.dropout(x, 0.5, True)\n"
    ),
    "linear": (
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, n):\n        super().__init__()\n        self.layer = torch.nn.Linear(n, n)\n"
        "    def forward(self, x):\n        return self.layer(x)\n"
    ),
}
INPUTS = {"dropout": ("torch.rand(8, 8)", ""), "linear": ("torch.rand(8, 16)", "16")}


@pytest.mark.parametrize("name", TASKS)
def test_an_honest_candidate_of_another_task_is_clean(name: str, tmp_path: Path) -> None:
    """Layer-norm questions are not asked of it, and a task that draws random numbers lets its candidate draw, too."""
    inputs, init = INPUTS[name]
    functions = f"def get_inputs():\n    return [{inputs}]\n\ndef get_init_inputs():\n    return [{init}]\n"
    task = tmp_path / "task.py"
    task.write_text("import torch\n\n" + TASKS[name] + "\n" + functions)
    candidate = "import torch\n\n" + TASKS[name].replace("class Model", "class ModelNew")
    verdict = judged(candidate, (), str(tmp_path), f"local:{task}")
    assert verdict["clean"], verdict["findings"]
    assert "eps_dropped" in {entry["guard"] for entry in verdict["not_checked"]}


ASKED_OF_THE_OPERATOR = (
    "hard_coded_statistics",
    "eps_dropped",
    "unbiased_variance",
    "cancelling_variance",
    "half_inside",
)


@pytest.mark.parametrize("declared", ["", 'operator = "layer_norm"\n'])
def test_faults_are_those_of_the_declared_operator(declared: str, tmp_path: Path) -> None:
    """The same Model, with and without a declaration: without one nothing is guessed from it."""
    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "task.toml").write_text(declared + 'reference = "reference.py"\n')
    source = source_of("eps_dropped").replace("len(self.ln.normalized_shape)", "1")
    verdict = judged(source, (), str(tmp_path), f"local:{tmp_path / 'reference.py'}")
    not_asked = {entry["guard"]: entry["reason"] for entry in verdict["not_checked"]}
    if declared:
        assert guards_of(verdict) == {"eps_dropped"} and not set(ASKED_OF_THE_OPERATOR) & set(not_asked)
    else:
        assert verdict["clean"], verdict["findings"]
        assert {not_asked.get(name) for name in ASKED_OF_THE_OPERATOR} == {NOTHING_KNOWN}


def test_a_model_that_is_not_its_declared_operator_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "reference.py").write_text(REFERENCE.replace("LayerNorm(n)", "Linear(n, n)"))
    (tmp_path / "task.toml").write_text('operator = "layer_norm"\nreference = "reference.py"\n')
    with pytest.raises(RuntimeError, match='declares operator = "layer_norm", but its Model is not one LayerNorm'):
        judged(NATIVE, (), str(tmp_path), f"local:{tmp_path / 'reference.py'}")


def test_a_candidate_that_refuses_the_input_is_not_run(nowhere: str) -> None:
    refusing = NATIVE.replace("return self.ln(x)", "raise ValueError('x: must be on a CUDA device')")
    with pytest.raises(RuntimeError, match="refuses the task's own input here: x: must be on a CUDA device"):
        judged(refusing, (), nowhere)


def test_an_output_of_another_shape_ends_the_run(nowhere: str) -> None:
    with pytest.raises(RuntimeError, match=r"the output's shape is \(6, 4, 8\), the reference's is \(6, 4, 8, 8\)"):
        judged(NATIVE.replace("self.ln(x)", "self.ln(x)[..., 0]"), (), nowhere)


def test_a_refused_probe_is_not_checked_rather_than_clean(nowhere: str) -> None:
    wide_only = NATIVE.replace(
        "return", "if x.shape[-3:].numel() < 8:\n            raise ValueError('N: at least 8')\n        return"
    )
    verdict = judged(wide_only, (), nowhere)
    assert {"guard": "unbiased_variance", "reason": "the candidate refuses the probe: N: at least 8"} in verdict[
        "not_checked"
    ]


def test_an_output_that_is_nan_by_itself_is_no_other_fault(nowhere: str) -> None:
    """Wrong, and for the official check to say: it is written, every call is alike, and no stream is left."""
    verdict = judged(NATIVE.replace("return self.ln(x)", "return self.ln(x) * float('nan')"), (), nowhere)
    behaviour = {name for name, entry in REGISTER.items() if entry.family == "behaviour"}
    assert not guards_of(verdict) & behaviour, verdict["findings"]


def test_the_record_says_whose_word_each_guard_is(nowhere: str) -> None:
    verdict = judged(NATIVE, (), nowhere)
    inside = {name for name, entry in REGISTER.items() if entry.family == "isolation"}
    assert set(verdict["checked_inside"]) == inside & set(verdict["checked"]) and verdict["checked_inside"]
    assert verdict["confined"]["level"] in ("namespaces", "landlock", "unconfined")
    for twin, is_inside in (("eps_dropped", False), ("thread_started", True)):
        (finding,) = judged(source_of(twin), (), nowhere)["findings"]
        assert finding["inside"] is is_inside, finding


# A key made of a sample of x misses a change of one element; a shape, an address and a version are no key either.
MEMO = NATIVE.replace(
    "return self.ln(x)",
    """
        key = (x.data_ptr(), x.shape, x.flatten()[::25].tolist())
        if getattr(self, "key", None) != key or (ONLY_TIMED and not torch.is_grad_enabled()):
            self.key, self.answer = key, self.ln(x).detach()
        return self.answer.clone()""",
)


@pytest.mark.parametrize(
    ("only_timed", "named"),
    [
        (False, {"cached_by_pointer", "cached_in_timed_trials", "parameters_ignored"}),
        (True, {"cached_in_timed_trials"}),
    ],
)
def test_a_memo_under_a_sample_of_the_contents_is_caught(only_timed: bool, named: set, nowhere: str) -> None:
    verdict = judged(MEMO.replace("ONLY_TIMED", str(only_timed)), (), nowhere)
    assert guards_of(verdict) == named, verdict["findings"]


# The task's LayerNorm, its parameters under other names; `{}`: what it does with them.
RENAMED = """
import torch

class Inner(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(shape)

class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        {init}
        self.shape = tuple(shape)

    def forward(self, x):
        gamma, beta = {gamma}, {beta}
        {does}
        return torch.nn.functional.layer_norm(x, self.shape, gamma, beta)
"""
NAMES = {
    "wrapped": ("self.inner = Inner(shape)", "self.inner.ln.weight", "self.inner.ln.bias"),
    "renamed, beta first": (
        "self.beta = torch.nn.Parameter(torch.zeros(shape)); self.gamma = torch.nn.Parameter(torch.ones(shape))",
        "self.gamma",
        "self.beta",
    ),
}


@pytest.mark.parametrize("names", NAMES)
def test_parameters_of_other_names_are_set_and_watched(names: str, nowhere: str) -> None:
    """Not by key alone: a file may call them anything, and what it does with them is asked all the same."""
    init, gamma, beta = NAMES[names]
    for does, found in (
        ("pass", set()),
        ("gamma, beta = None, None", {"parameters_ignored"}),
        ("beta.data.add_(1e-6)", {"parameters_mutated"}),
    ):
        verdict = judged(RENAMED.format(init=init, gamma=gamma, beta=beta, does=does), UNASKED, nowhere)
        assert guards_of(verdict) == found, (does, verdict["findings"])
        assert {"parameters_ignored", "parameters_mutated"} <= set(verdict["checked"]), verdict["not_checked"]


def test_an_answer_that_is_rounding_alone_is_no_finding_and_a_wrong_one_is(nowhere: str, tmp_path: Path) -> None:
    """The mean of a normalised tensor is zero: fp32 gives 1e-8, which is all of its rms off (level 2, problem 23)."""
    model = NATIVE.replace("return self.ln(x)", "return self.ln(x).mean((1, 2))")
    task = tmp_path / "mean.py"
    task.write_text(
        model.replace("ModelNew", "Model")
        + "def get_inputs():\n    return [torch.rand(6, 16, 24)]\ndef get_init_inputs():\n    return [(16, 24)]\n"
    )
    unasked = tuple(name for name in REGISTER if name != "cached_in_timed_trials")
    timed = model.replace("return", "return torch.is_grad_enabled() * 1e-3 +")
    for source, found in ((model, set()), (timed, {"cached_in_timed_trials"})):
        verdict = judged(source, unasked, nowhere, str(task))
        assert guards_of(verdict) == found and "cached_in_timed_trials" in verdict["checked"], verdict


def test_parameters_that_are_not_known_must_stay_and_are_not_said_to_act(nowhere: str) -> None:
    init = "self.packed = torch.nn.Parameter(torch.ones(3))"
    source = RENAMED.format(init=init, gamma="None", beta="None", does="self.packed.data.add_(1e-6)")
    verdict = judged(source, UNASKED, nowhere)
    assert guards_of(verdict) == {"parameters_mutated"}, verdict["findings"]
    (left,) = [each["reason"] for each in verdict["not_checked"] if each["guard"] == "parameters_ignored"]
    assert "its parameters cannot be set" in left


FIRST_INSTANCE = NATIVE.replace(
    "self.ln =", "ModelNew.built = getattr(ModelNew, 'built', 0) + 1\n        self.ln ="
).replace(
    "return self.ln(x)",
    """
        first = ModelNew.built == 1 and torch.is_grad_enabled()
        return torch.zeros_like(x) if first else self.ln(x)""",
)


def test_the_first_instance_of_a_process_is_asked_what_upstream_times(nowhere: str) -> None:
    verdict = judged(FIRST_INSTANCE, (), nowhere)
    assert guards_of(verdict) == {"changes_on_call_n", "cached_in_timed_trials"}, verdict["findings"]


def test_what_is_not_answered_where_the_guards_are_is_a_finding(nowhere: str) -> None:
    """A file that refuses its judges: it answers in a worker, and not in the process of the guards of isolation."""
    refusing = NATIVE.replace(
        "return self.ln(x)",
        """
        if not sys.argv[0].endswith("remote.worker"):
            raise ValueError("x: this layout is not supported")
        return self.ln(x)""",
    )
    (finding,) = judged("import sys\n" + refusing, (), nowhere)["findings"]
    assert finding["guard"] == "changes_on_call_n" and finding["inside"]
    assert "this layout is not supported" in finding["message"], finding


def test_an_unknown_guard_cannot_be_disabled(nowhere: str) -> None:
    with pytest.raises(RuntimeError, match="no guard is called typo"):
        judged(NATIVE, ("typo",), nowhere)


# What a GPU makes different: streams, its allocator, its profiler. eval/measure/twins.py runs all twins, full size.
ON_GPU = ["side_stream", "uninitialised_output", "cached_by_pointer", "ring_of_outputs", "borrowed_native"]


@pytest.mark.gpu
@pytest.mark.parametrize("twin", ON_GPU)
def test_a_twin_is_caught_on_a_gpu(twin: str, nowhere: str) -> None:
    payload = {"candidate_source": source_of(twin), "task": TASK, "device": "cuda", "guards_calls": CALLS}
    verdict = run_forked(TARGET, payload, nowhere)
    assert TWINS[twin]["guard"] in guards_of(verdict), f"{twin}: {verdict}"
