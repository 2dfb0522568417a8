"""RemoteModel on a CPU: it changes nothing of an honest candidate, and a dishonest one reaches nothing of the judge."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

import kbsub.submissions
from kbsub.adapters.candidate import load_candidate
from kbsub.adapters.task import Task, load_task
from kbsub.eval.process.cell import Cell, probe
from kbsub.eval.process.isolated import JudgeFailure, Status, run_isolated
from kbsub.eval.remote.model import CandidateRaised, CandidateRefused, RemoteError, Worker, WorkerFailure
from kbsub.eval.remote.probes import Poison
from kbsub.eval.remote.values import ValueProblem
from support.paths import TESTS, child_path

pytestmark = pytest.mark.usefixtures("warm_children")

HERE = TESTS / "support" / "remote_candidates"
START_S = 120
SHAPE = (8,)
CHEATS = {
    "forge_json_dumps": "wrong",
    "forge_env_token": "failed",  # its forged line is a malformed frame, its exit code 0 no answer
    "native_replaced_everywhere": "wrong",
    "layernorm_class_replaced": "wrong",
    "c2_instance_override": "wrong",
    "c4_reference_patched": "wrong",
    "c6_function_mode": "wrong",
    "lazy_everywhere": "wrong",
}


def task(precision: str = "fp32") -> Task:
    return load_task(1, 40, kernelbench=None, precision=precision)


def source(name: str) -> str:
    return (HERE / f"{name}.py").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cells")


def begin(folder: Path, text: str, precision: str = "fp32", **options) -> Worker:
    return Worker.start(text, task(precision), cell=Cell(folder / "cell"), timeout_s=START_S, **options)


@pytest.fixture(scope="module")
def worker(folder):
    with begin(folder, source("honest")) as started:
        yield started


@pytest.fixture
def model(worker):
    made = worker.construct([SHAPE])
    yield made
    made.drop()


def reference(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.ln = torch.nn.LayerNorm(SHAPE)
    torch.manual_seed(3)
    for each in layer.ln.parameters():
        each.data.normal_()
    return layer.to(dtype)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)


# ---- an honest candidate ----


def test_an_output_has_the_bits_of_a_call_in_this_process(model):
    truth, x = reference(), draw(6, 8)
    model.load_state(truth.state_dict())
    assert torch.equal(model(x), truth.ln(x))


def test_so_has_one_in_bf16(folder):
    truth, x = reference(torch.bfloat16), draw(6, 8, dtype=torch.bfloat16)
    with begin(folder, source("honest"), "bf16") as worker:
        model = worker.construct([SHAPE])
        model.load_state(truth.state_dict())
        y = model(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, truth.ln(x))


def test_the_state_comes_back_as_it_was_loaded(model):
    truth = reference()
    assert model.state_forms == {"ln.weight": ("float32", SHAPE, True), "ln.bias": ("float32", SHAPE, True)}
    model.load_state(truth.state_dict())
    found = model.state()
    assert {key: value.tolist() for key, value in found.items()} == {
        key: value.tolist() for key, value in truth.state_dict().items()
    }


def test_bound_parameters_follow_the_judges_memory_with_its_strides_and_alignment(model):
    whole = torch.randn(32)
    model.load_state({"ln.weight": whole[1:17:2], "ln.bias": whole[17:25]}, bind=True)
    x = draw(6, 8)
    assert torch.equal(model(x), torch.nn.functional.layer_norm(x, SHAPE, whole[1:17:2], whole[17:25]))
    _, weight, strides = model.call([x], method="addresses").value
    assert (weight, strides) == (whole[1:].data_ptr() % 256, [2])


def test_tuples_dicts_and_numbers_come_back_as_they_are(model):
    x = draw(6, 8)
    y, mean, rest = model.call([x], method="forward_with_stats").value
    assert torch.equal(y, torch.nn.functional.layer_norm(x, SHAPE)) and torch.equal(mean, x.mean(-1))
    assert torch.equal(rest.pop("rstd"), x.var(-1).rsqrt())
    assert rest == {"n": 8, "half": 0.5, "none": None, "ok": True}


def test_strides_dtypes_layouts_and_empty_outputs_are_told_and_kept(model):
    x = draw(6, 8)
    reply = model.call([x], method="transposed")
    moved, wide, double, sparse, empty = reply.value
    assert moved.stride() == (1, 6) and torch.equal(moved, x)
    assert wide.shape == (3, 6, 8) and wide.stride() == (0, 8, 1) and torch.equal(wide, x.expand(3, 6, 8))
    assert double.dtype == torch.float64 and torch.equal(double, x.double())
    assert torch.equal(sparse, x) and empty.shape == (0, 8)
    assert [each.copied for each in reply.tensors] == [False, False, False, True, False]
    assert [each.layout for each in reply.tensors][3] == "torch.sparse_coo"
    assert [each.aliases_input for each in reply.tensors] == [False, True, False, False, False]


# Inputs whose layout a kernel can see.
LAYOUTS = {
    "contiguous": lambda: draw(6, 8),
    "transposed": lambda: draw(8, 6).t(),
    "expanded": lambda: draw(1, 8).expand(6, 8),
    "one element in": lambda: draw(49)[1:].view(6, 8),
    "overlapping windows": lambda: draw(13).unfold(0, 8, 1),
    "empty": lambda: draw(0, 8),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_input_keeps_its_layout_and_its_alignment(model, name):
    x = LAYOUTS[name]()
    assert torch.equal(model(x), torch.nn.functional.layer_norm(x, SHAPE))
    if x.numel():
        assert model.call([x], method="addresses").value[0] == x.data_ptr() % 256


def test_a_view_of_an_input_is_copied_out_and_said(model):
    x = draw(6, 8)
    reply = model.call([x], method="view_of_input")
    assert torch.equal(reply.value, x[1:]) and reply.tensors[0].aliases_input


def test_an_input_that_was_written_is_seen_and_the_judges_own_is_not_changed(model):
    x, y = draw(6, 8), draw(6, 8)
    reply = model.call([x, y], method="writes_input")
    assert reply.mutated == (1,)
    assert torch.equal(y, x)
    assert model.call([x, y], method="writes_input").mutated == (1,)
    assert model.call([x]).mutated == ()


def test_grad_mode_is_the_callers(model):
    assert model.call([draw(1)], method="grad_mode").value is False
    assert model.call([draw(1)], method="grad_mode", grad=True).value is True


def test_attributes_are_set_by_path_and_missing_ones_said(model):
    x = draw(6, 8)
    assert model.set_attribute("ln.eps", 0.5) and not model.set_attribute("ln.epsilon", 0.5)
    assert not model.set_attribute("norm.eps", 0.5)
    assert torch.equal(model(x), torch.nn.functional.layer_norm(x, SHAPE, eps=0.5))
    assert model.has("forward_with_stats") and not model.has("backward")


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_what_was_captured_is_replayed_on_new_contents_at_the_same_place(model, shift):
    """Also when the new tensor of the judge's is aligned otherwise than the captured one."""
    model.capture([draw(6, 8)])
    x = (draw(48 + shift) * 3)[shift:].view(6, 8)
    assert torch.equal(model.replay([x]).value, torch.nn.functional.layer_norm(x, SHAPE))


def test_another_shape_cannot_be_replayed(model):
    model.capture([draw(6, 8)])
    with pytest.raises(ValueProblem, match="captured"):
        model.replay([draw(5, 8)])


def test_two_instances_have_states_of_their_own(worker):
    one, other, x = worker.construct([SHAPE]), worker.construct([SHAPE]), draw(6, 8)
    one.load_state(reference().state_dict())
    assert torch.equal(other(x), torch.nn.functional.layer_norm(x, SHAPE))
    assert torch.equal(one(x), reference().ln(x))


def test_the_seed_before_the_constructor_is_upstreams(folder):
    text = "import torch\nclass ModelNew(torch.nn.Linear):\n    def __init__(self, s): super().__init__(4, 4)\n"
    with begin(folder, text) as worker:
        found = worker.construct([SHAPE], seed=42).state()["weight"]
    torch.manual_seed(42)
    assert torch.equal(found, torch.nn.Linear(4, 4).weight)


def test_a_tensor_that_cannot_cross_is_the_judges_own_error(model):
    with pytest.raises(ValueProblem, match="sparse"):
        model(draw(6, 8).to_sparse())


# ---- errors of the candidate ----


def test_a_refusal_is_a_value_error(model):
    with pytest.raises(ValueError, match=r"\(6, 8\), must be of \| 8 dimensions") as caught:
        model.call([draw(6, 8)], method="refuses")
    assert isinstance(caught.value, CandidateRefused)


def test_an_errors_text_is_one_printable_bounded_line(model):
    with pytest.raises(CandidateRaised) as caught:
        model.call([draw(6, 8)], method="errs")
    error = caught.value
    assert (error.status, error.type_name) == (Status.RUNTIME_ERROR, "RuntimeError")
    assert error.text.isprintable() and len(error.text) <= 4000 and "no" in error.text


# The method of honest.py, and the status of its end; the worker lives on.
RAISED = {"no_memory": Status.OUT_OF_MEMORY, "leaves": Status.CRASHED, "strange": Status.RUNTIME_ERROR}
RAISED |= {"deep": Status.RUNTIME_ERROR, "does_not_exist": Status.RUNTIME_ERROR}


@pytest.mark.parametrize("name", RAISED)
def test_what_is_raised_has_a_status_and_the_worker_lives_on(model, name):
    with pytest.raises(RemoteError) as caught:
        model.call([draw(6, 8)], method=name)
    assert caught.value.status is RAISED[name]
    assert model.has("ln")


@pytest.mark.parametrize(
    ("text", "word"), [("class ModelOld: pass", "no ModelNew"), ("def", "line 1"), ("1/0", "ZeroDivision")]
)
def test_a_file_that_does_not_load_is_a_compile_error(folder, text, word):
    with pytest.raises(CandidateRaised, match=word) as caught:
        begin(folder, text)
    assert caught.value.status is Status.COMPILE_ERROR


# ---- a process that does not answer ----

# The way of ill.py, the status of the row, a word of its message.
ILL = {
    "hangs": (Status.TIMEOUT, "TIMEOUT"),
    "exits": (Status.CRASHED, "exit code 0"),
    "segfault": (Status.CRASHED, "SIGSEGV"),
    "aborts": (Status.CRASHED, "SIGABRT"),
    "killed": (Status.OUT_OF_MEMORY, "SIGKILL"),
    "rubbish": (Status.CRASHED, "malformed"),
    "huge": (Status.CRASHED, "malformed"),
    "no frame at all": (Status.CRASHED, "exit code 0"),
    "floods": (Status.CRASHED, "exit code 3"),
    "lying shape": (Status.CRASHED, "ends at byte 19200 of 192"),
    "lying strides": (Status.CRASHED, "ends at byte"),
    "negative offset": (Status.CRASHED, "negative"),
    "endless shape": (Status.CRASHED, "elements"),
    "unknown dtype": (Status.CRASHED, "element type"),
    "truncated file": (Status.CRASHED, "of 100"),
    "unsealed file": (Status.CRASHED, "sealed"),
    "a pipe": (Status.CRASHED, "no memory file"),
    "no file": (Status.CRASHED, "0 descriptors"),
    "another block": (Status.CRASHED, "never came"),
    "three files": (Status.CRASHED, "3 descriptors"),
}


@pytest.mark.parametrize("way", ILL)
def test_whatever_a_worker_does_instead_of_answering_is_the_rows_status(folder, way):
    with open(os.devnull, "wb") as nowhere, begin(folder, source("ill"), output=nowhere.fileno()) as worker:
        model = worker.construct([SHAPE])
        started = time.monotonic()
        with pytest.raises(WorkerFailure) as caught:
            model.call([draw(6, 8), way], timeout_s=20 if way != "hangs" else 1)
        assert time.monotonic() - started < 40
        assert (caught.value.status, ILL[way][1] in caught.value.message) == (ILL[way][0], True), caught.value
        assert isinstance(caught.value, JudgeFailure)
        assert worker.child.poll() is not None, "the worker must be gone"
        with pytest.raises(WorkerFailure):
            model(draw(6, 8))


def test_the_judges_memory_is_nowhere_in_the_workers(folder, cold_children):
    """The truth that the judge computes has a mark; whoever owns the worker's process searches all of its memory."""
    if probe().level == "unconfined":
        pytest.skip("cell: unconfined, the parent's memory can be opened")
    mark, other = 1234567.5, 7654321.25
    truth = torch.full((64,), mark)
    with begin(folder, source("ill")) as worker:
        model = worker.construct([SHAPE])
        control = model.call([torch.full((8, 8), other), other], method="find").value
        assert control[0] > 0, "the search does not even find what was sent"
        found, opened = model.call([draw(6, 8), mark], method="find").value
        assert (found, opened) == (0, 0), "(places in the worker's memory, other processes' memory that opened)"
    assert truth.sum() == 64 * mark


@pytest.mark.slow
@pytest.mark.parametrize("level", ["namespaces", "landlock"])
@pytest.mark.parametrize("dies", [False, True], ids=["judge is ended at its timeout", "judge dies"])
def test_worker_and_its_children_end_with_the_judge(tmp_path, level, dies, cold_children):
    if probe(level).level != level:
        pytest.skip(f"cell: this machine has no {level}")
    mark = f"kbsub-nested-{os.getpid()}-{level}-{dies}"
    events: list[dict] = []
    outcome = run_isolated(
        "support.remote_targets:hang",
        {"folder": str(tmp_path / "cell"), "level": level, "mark": mark, "dies": dies},
        timeout_s=60 if dies else 20,
        on_progress=events.append,
        env=child_path(),
    )
    assert outcome.status is (Status.CRASHED if dies else Status.TIMEOUT), outcome
    assert events == [{"stage": "asked"}], "the worker was not even up"
    deadline = time.monotonic() + 15
    while left := [entry for entry in Path("/proc").glob("[0-9]*") if mark in command_of(entry)]:
        assert time.monotonic() < deadline, f"left behind: {[command_of(entry) for entry in left]}"
        time.sleep(0.05)


def command_of(entry: Path) -> str:
    try:
        return (entry / "cmdline").read_text(errors="replace")
    except OSError:
        return ""


# ---- dishonest candidates ----


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_gives_a_wrong_answer_to_a_judge_elsewhere(folder, name):
    before = (torch.nn.LayerNorm.forward, torch.native_layer_norm, __import__("json").dumps)
    truth, x = reference(), draw(6, 8)
    outcome = "failed"
    try:
        with begin(folder, source(name)) as worker:
            model = worker.construct([SHAPE])
            model.load_state(truth.state_dict())
            y = model.call([x], poison=Poison()).value
            outcome = "true" if torch.allclose(y, truth.ln(x)) else "wrong"
    except WorkerFailure as failure:
        assert failure.status is not Status.OK
    assert outcome == CHEATS[name]
    assert (torch.nn.LayerNorm.forward, torch.native_layer_norm, __import__("json").dumps) == before


# ---- CUDA source, executed on the CPU ----


def test_a_cuda_source_executes_in_the_cell_with_the_bits_it_has_in_process(tmp_path, cold_children):
    from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, HostUnavailable, adopt
    from kbsub.eval.host_executor.build import cache_folder, require_host

    try:
        require_host()
    except HostUnavailable as error:
        pytest.skip(f"host executor: {error}")
    text = (Path(next(iter(kbsub.submissions.__path__))) / "level1_40" / "reference_order.py").read_text()
    modules, x, shape = task().modules(), draw(3, 4, 8, 8), (4, 8, 8)
    load_candidate(text, task(), modules=modules)
    adopt(modules.context, SMALL_LIMITS, HostExecutor(workers=1))
    with torch.no_grad():
        expected = modules.context["ModelNew"](shape)(x)
    options = {"hosted": "SMALL_LIMITS", "workers": 1, "host_cache": str(cache_folder())}
    with Worker.start(text, task(), cell=Cell(tmp_path / "cell"), **options) as worker:
        assert torch.equal(worker.construct([shape])(x), expected)
