"""The official row is upstream's object, word for word; nothing of this project decides it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import types
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

from kbsub.adapters import environment, evaluator
from kbsub.adapters.task import load_local_task, load_task
from kbsub.eval.bench.floors import memory_floor_ms
from kbsub.eval.process.isolated import JudgeFailure, Outcome, Status, run_isolated
from kbsub.eval.report.terminal import flags, speedup
from kbsub.eval.run import runner
from kbsub.eval.run.runner import Row, record_outcome
from kbsub.eval.verdicts.official import judge as official
from kbsub.eval.verdicts.register import KINDS
from support.paths import child_path

REFERENCE = """
import time
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        time.sleep(0.002)
        return x * 2


def get_inputs():
    return [torch.rand(4, 5)]


def get_init_inputs():
    return []
"""

FORWARD = "import time, torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        {}\n"
CONSTRUCTOR = "import torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        {}\n"

# name, source, status of the row, words of its reason, what upstream said (compiled, correctness)
THROUGH_UPSTREAM = [
    ("correct", FORWARD.format("return x + x"), Status.OK, "", (True, True)),
    ("slow", FORWARD.format("time.sleep(0.002); return x + x"), Status.OK, "", (True, True)),
    ("wrong value", FORWARD.format("return x * 2.01"), Status.INCORRECT_NUMERICAL, "(0 / 5)", (True, False)),
    ("wrong shape", FORWARD.format("return x[0]"), Status.INCORRECT_SHAPE, "[5]", (True, False)),
    ("raises in forward", FORWARD.format("raise ValueError('no')"), Status.RUNTIME_ERROR, "no", (True, False)),
    ("memory", FORWARD.format("raise torch.OutOfMemoryError('256 MiB')"), Status.OUT_OF_MEMORY, "256", (True, False)),
    ("syntax", "class ModelNew(:\n", Status.COMPILE_ERROR, "line 1", (False, False)),
    ("no class", "x = 1\n", Status.COMPILE_ERROR, "no ModelNew", (False, False)),
    ("import", "import no_such_module\n", Status.COMPILE_ERROR, "no_such_module", (False, False)),
    # Both scripts pass a build folder, whose two lines come first.
    ("future", "from __future__ import annotations\nModelNew = 1\n", Status.COMPILE_ERROR, "line 1", (False, False)),
    ("runtime error", CONSTRUCTOR.format("raise RuntimeError('no')"), Status.RUNTIME_ERROR, "no", (True, False)),
    # The two ways upstream gives no verdict at all.
    ("none", "raise ValueError('a clock')\n", Status.COMPILE_ERROR, "returned None", (None, None)),
    ("escapes", CONSTRUCTOR.format("raise ValueError('no')"), Status.RUNTIME_ERROR, "escaped upstream", None),
]


@pytest.fixture(scope="module")
def through_upstream(kernelbench: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every source above through the real evaluator on idle CUDA (official_targets.py), in one child."""
    task = tmp_path_factory.mktemp("task") / "task.py"
    task.write_text(REFERENCE)
    payload = {
        "task": str(task),
        "precision": "fp32",
        "device": "cpu:0",  # not "cpu": upstream's path, on CPU tensors
        "kernelbench": str(kernelbench.path),
        "sources": {name: source for name, source, *_ in THROUGH_UPSTREAM},
        "hide": ["openai", "litellm", "dotenv"],
    }
    target = "support.official_targets:judge_all"
    outcome = run_isolated(target, payload, timeout_s=120, env=child_path())
    assert outcome.value is not None, f"{outcome.message}\n{outcome.log}"
    return outcome.value


@pytest.mark.kernelbench
@pytest.mark.parametrize(
    ("name", "source", "status", "words", "said"), THROUGH_UPSTREAM, ids=[row[0] for row in THROUGH_UPSTREAM]
)
def test_upstreams_answer_becomes_the_row(
    through_upstream: Any, name: str, source: str, status: Status, words: str, said: Any
) -> None:
    found = through_upstream[name]
    verdict = found["failure"] or [found["value"]["verdict"]["status"], found["value"]["verdict"]["reason"] or ""]
    assert verdict[0] == status.value, found
    assert words in verdict[1], verdict
    block = found["value"]["official"]
    assert (block and (block["compiled"], block["correctness"])) == said


def test_every_stage_of_a_row_judges_the_text_that_its_sha256_is_of(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("first = 1\n")
    judged: list[str] = []

    def fake(target: str, payload: Any, **_: Any) -> Outcome:
        judged.append(payload["candidate_source"])
        file.write_text("second = 2\n")  # somebody saves the file while its first stage is running
        return Outcome(Status.OK, {}, "", "", 0.0)

    monkeypatch.setattr(runner, "run_isolated", fake)
    task = load_task(1, 40, kernelbench=None)
    plan = runner.Plan(task, "level1_40", (file,), ("official", "identity"), "fp32", "cpu", None, 9.0)
    row = Row(file, "mine", {})
    for name in plan.stages:
        runner.run_stage(plan, row, KINDS[name], lambda event: None)
    assert judged == ["first = 1\n"] * 2
    assert row.fields["sha256"] == hashlib.sha256(b"first = 1\n").hexdigest()


@pytest.mark.kernelbench
def test_protocol_of_the_call(through_upstream: Any) -> None:
    """5 correctness trials and 100 timed ones of candidate and reference, seen in upstream's own answer."""
    value = through_upstream["correct"]["value"]
    assert value["official"]["trials"] == "(5 / 5)"
    assert value["timing"]["cuda_event"]["trials"] == 100
    assert value["reference"]["cuda_event"]["trials"] == 100


@pytest.mark.kernelbench
def test_trials_are_announced_with_their_seeds(through_upstream: Any) -> None:
    events = through_upstream["correct"]["events"]
    trials = [(event["index"], event["seed"]) for event in events if event["stage"] == "trial"]
    assert trials == [(1, 734796314), (2, 576165995), (3, 2197670066), (4, 839703249), (5, 2584932063)]
    assert [event["stage"] for event in events if event["stage"].endswith("timing")] == ["timing", "reference timing"]


def test_nothing_is_written_between_timed_trials() -> None:
    """Upstream prints a line a timed trial; all of them come through, in order, but only once the trials are over."""
    stream, events = io.StringIO(), list[dict[str, Any]]()
    with redirect_stdout(evaluator._Listener(stream, events.append)):
        print("[Eval] Measuring Performance as Sample is Correct")
        print("Trial 1: 0.29 ms")
        print("Trial 2: 0.3 ms")
        assert stream.getvalue().splitlines() == ["[Eval] Measuring Performance as Sample is Correct"]
        print("[Eval] Performance Stats: {}")
    said = stream.getvalue().splitlines()
    assert said[1:] == ["Trial 1: 0.29 ms", "Trial 2: 0.3 ms", "[Eval] Performance Stats: {}"]
    assert events == [{"stage": "timing"}]


@pytest.mark.kernelbench
def test_ten_times_flag_is_upstreams_word(through_upstream: Any) -> None:
    """The reference sleeps 2 ms: a candidate that does not is over 10x, one that does too is not."""
    assert flags(through_upstream["correct"]["value"]) == ["over 10x (upstream's word)"]
    assert flags(through_upstream["slow"]["value"]) == []


@pytest.mark.kernelbench
def test_stand_ins_are_recorded(through_upstream: Any) -> None:
    assert through_upstream["correct"]["value"]["environment"]["stand_ins"] == ["dotenv", "litellm", "openai"]


@pytest.mark.kernelbench
def test_all_of_it_is_json(through_upstream: Any) -> None:
    """Metadata of a constructor's RuntimeError holds the exception object; upstream's own conversion made it text."""
    assert isinstance(through_upstream["runtime error"]["value"]["official"]["metadata"]["runtime_error"], str)
    json.dumps(through_upstream)


def answer(**fields: Any) -> types.SimpleNamespace:
    """An object as upstream's function returns it."""
    defaults = {"compiled": True, "correctness": True, "metadata": {"correctness_trials": "(5 / 5)"}}
    timing = {"runtime": -1.0, "runtime_stats": {}, "ref_runtime": -1.0, "ref_runtime_stats": {}}
    return types.SimpleNamespace(**{**defaults, **timing, **fields})


def row_for(returned: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Row:
    """The row when upstream's function is replaced by one that returns (or raises) `returned`."""

    def eval_kernel_against_ref(**options: Any) -> Any:
        if isinstance(returned, BaseException):
            raise returned
        return returned

    module = types.SimpleNamespace(
        eval_kernel_against_ref=eval_kernel_against_ref, check_metadata_serializable_all_types=lambda metadata: metadata
    )
    monkeypatch.setattr(evaluator, "import_upstream", lambda folder: evaluator.Upstream(module, ()))  # type: ignore[arg-type]
    monkeypatch.setattr(environment, "facts", lambda device, stand_ins=(): {"gpu": "stand-in"})
    monkeypatch.setattr(official, "memory_floor", lambda task, device: {"memory_ms": 0.2})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "task.py").write_text(REFERENCE)
    payload = {"task": str(tmp_path / "task.py"), "precision": "fp32", "device": "cuda", "kernelbench": str(tmp_path)}
    # A candidate that is right: whatever the row says comes from the replaced function.
    payload["candidate_source"] = FORWARD.format("return x * 2")
    row = Row(tmp_path / "x.py", "x", {"stages": {}, "status": "NOT_RUN"})
    from kbsub.eval.process.isolated import Outcome

    try:
        outcome = Outcome(Status.OK, official.judge(payload, lambda event: None), "", "", 1.0)
    except JudgeFailure as failure:
        outcome = Outcome(failure.status, failure.value, failure.message, "", 1.0)
    record_outcome(row, KINDS["official"], outcome)
    return row


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("correctness", [True, False])
def test_compiled_and_correctness_come_from_the_returned_object_only(
    compiled: bool, correctness: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    returned = answer(compiled=compiled, correctness=correctness)
    row = row_for(returned, monkeypatch, tmp_path)
    block = row.fields["official"]
    assert (block["compiled"], block["correctness"]) == (compiled, correctness)
    assert row.failed is not (compiled and correctness)


def test_none_is_no_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = row_for(None, monkeypatch, tmp_path)
    assert (row.fields["official"]["correctness"], row.status, row.failed) == (None, Status.COMPILE_ERROR, True)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("CUDA error: an illegal memory access was encountered"), Status.RUNTIME_ERROR),
        (RuntimeError("CUDA out of memory"), Status.OUT_OF_MEMORY),
        (AssertionError("CUDA is not available"), Status.RUNTIME_ERROR),
    ],
)
def test_escaped_exception_is_no_verdict(
    error: Exception, status: Status, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = row_for(error, monkeypatch, tmp_path)
    assert (row.fields["official"], row.status) == (None, status)
    assert row.environment == {"gpu": "stand-in"}, "the machine's facts are kept all the same"


def test_failure_while_timed_keeps_upstreams_true(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    metadata = {"correctness_trials": "(5 / 5)", "error_during_performance": "RuntimeError: no"}
    row = row_for(answer(metadata=metadata), monkeypatch, tmp_path)
    assert (row.fields["official"]["correctness"], row.status) == (True, Status.RUNTIME_ERROR)
    assert speedup(row.fields) is None


def test_speedup_is_reference_over_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stats = {"mean": 0.315, "std": 0.01, "min": 0.3, "max": 0.4, "num_trials": 100, "device": "cuda:0"}
    timed = answer(runtime=0.315, runtime_stats=stats, ref_runtime=8.09, ref_runtime_stats={**stats, "mean": 8.09})
    row = row_for(timed, monkeypatch, tmp_path)
    assert speedup(row.fields) == pytest.approx(25.68, abs=0.01)
    assert row.fields["timing"]["cuda_event"] == {
        "mean_ms": 0.315,
        "std_ms": 0.01,
        "min_ms": 0.3,
        "max_ms": 0.4,
        "trials": 100,
    }


def test_official_stage_needs_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = {"task": "level1_40", "precision": "fp32", "device": "cuda", "kernelbench": None, "candidate_source": ""}
    with pytest.raises(JudgeFailure, match="kbsub fetch") as caught:
        official.judge(payload, lambda event: None)
    assert caught.value.status is Status.NOT_RUN


def test_other_stages_never_touch_the_status() -> None:
    from kbsub.eval.process.isolated import Outcome

    row = Row(Path("x.py"), "x", {"stages": {}, "status": "OK", "reason": None, "official": {"correctness": True}})
    for name in ("identity", "stress", "oracle", "guards"):
        record_outcome(row, KINDS[name], Outcome(Status.OK, {"failed": 9, "identical": 0, "clean": False}, "", "", 1.0))
        record_outcome(row, KINDS[name], Outcome(Status.CRASHED, None, "died", "", 1.0))
    assert (row.fields["status"], row.fields["official"]) == ("OK", {"correctness": True})
    assert row.failed, "the exit code sees a crashed stage all the same"


def test_bytes_of_the_official_task() -> None:
    """x, y, gamma and beta of level1_40, from the meta device: 2 * 268,435,456 + 2 * 16,777,216 bytes."""
    assert official.bytes_moved(load_task(1, 40, kernelbench=None), "meta") == 570_425_344
    assert official.bytes_moved(load_task(1, 40, kernelbench=None, precision="bf16"), "meta") == 285_212_672


def test_bytes_are_the_same_from_a_device_as_from_meta() -> None:
    """The GPU's rows take the shapes from a real call there; the CPU stands for it here."""
    source = load_task(1, 40, kernelbench=None).source.replace("(16, 64, 256, 256)", "(3, 2, 5, 4)")
    small = dataclasses.replace(load_task(1, 40, kernelbench=None), source=source)
    assert official.bytes_moved(small, "cpu") == official.bytes_moved(small, "meta") == 4 * 2 * (3 * 40 + 40)


def test_floor_without_a_measurement_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Any) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(official, "copy_bandwidth", broken)
    (tmp_path / "task.py").write_text(REFERENCE)
    floors = official.memory_floor(load_local_task(tmp_path / "task.py"), "cuda")
    assert "memory_ms" not in floors and "illegal memory access" in floors["memory_absent"]


def test_floor_of_the_numbers_in_the_papers() -> None:
    """570 MB at 4,160 GB/s is 0.137 ms: one read, one write (design notes, one H200)."""
    assert memory_floor_ms(570_425_344, 4160.0) == pytest.approx(0.137, abs=0.0005)
