"""`kbsub measure sweep` on the CPU: each way a candidate can answer a shape has its outcome, and no shape is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kbsub.submissions
from kbsub.adapters.task import load_task
from kbsub.eval.cli import app
from kbsub.eval.measure import sweep
from kbsub.eval.measure.children import sweep_child
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.tasks.grid import GridShape

pytestmark = pytest.mark.usefixtures("warm_children")

HEAD = """
import os
import torch


class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)

    def forward(self, x):
        rows, width = x.shape
        y = self.ln(x)
"""
LAYER_NORM = (GridShape.model_validate({"inputs": [["rows", "width"]], "init": [["width"]]}),)
GRID = sweep.Grid("test", (1, 3), (4, 100, 129), 300)  # 3x129 is left out
SHAPES = {"1x4", "3x4", "1x100", "3x100", "1x129"}

# stand-in -> its forward after y = the right answer, {shape: outcome} where that is not "right", words in those rows.
STAND_INS = {
    "right": ("return y", {}, ""),
    "refuses": (
        "if width % 4:\n            raise ValueError(f'x: rows of {width}, must be a multiple of 4')\n        return y",
        {"1x129": "refused"},
        "x: rows of 129, must be a multiple of 4",
    ),
    "wrong_at_100": (
        "y[-1, -1] += 0.5 * (width == 100)\n        return y",
        {"1x100": "wrong", "3x100": "wrong"},
        "1 of",
    ),
    "nan_at_100": ("return y * float('nan') if width == 100 else y", {"1x100": "wrong", "3x100": "wrong"}, "nan"),
    "narrow": ("return y[:, :3]", dict.fromkeys(SHAPES, "wrong"), "3), torch.float32, 'cpu'), must be"),
    "raises": (
        "if rows == 3:\n            raise RuntimeError('no\\nway')\n        return y",
        {"3x4": "other_error", "3x100": "other_error"},
        "RuntimeError: no way",
    ),
    "driver": (
        "if width == 129:\n            raise RuntimeError('CUDA error: invalid argument')\n        return y",
        {"1x129": "driver_error"},
        "CUDA error: invalid argument",
    ),
    "dies": (
        "if width == 100:\n            os._exit(3)\n        return y",
        {"1x100": "other_error", "3x100": "other_error"},
        "CRASHED: the process ended with exit code 3 in shape",
    ),
}


def entry(body: str, **declared: Any) -> sweep.SweptFile:
    row = {"title": "stand-in", "precision": ("fp32",), "contract": "tolerance", **declared}
    declaration = sweep.Declaration.model_validate(row)
    text = f"{HEAD}        {body}\n"
    return sweep.SweptFile("level1_40", "stand_in", "fp32", declaration, text, "0" * 64, LAYER_NORM)


def swept(made: sweep.SweptFile, grid: sweep.Grid = GRID) -> sweep.SweptFile:
    sweep.measure(made, grid, "cpu", 100, lambda *_: None)
    return made


@pytest.mark.parametrize("name", STAND_INS)
def test_each_shape_has_its_outcome(name: str) -> None:
    body, others, words = STAND_INS[name]
    rows = swept(entry(body)).rows
    assert {shape: row["outcome"] for shape, row in rows.items()} == {**dict.fromkeys(SHAPES, "right"), **others}
    for shape in others:
        assert words in rows[shape]["text"], shape
    assert all(0 <= rows[shape]["share"] < 0.5 for shape in SHAPES - set(others))


def test_a_child_that_died_is_begun_again_behind_that_shape() -> None:
    made = swept(entry(STAND_INS["dies"][0]))
    assert made.restarts == 2 and list(made.rows) == ["1x4", "3x4", "1x100", "3x100", "1x129"]


def test_only_the_files_own_words_are_a_refusal() -> None:
    """json raises a ValueError of its own; so does the host executor for a launch that a device would refuse."""
    rows = swept(entry("import json; return json.loads('{')")).rows
    assert {row["outcome"] for row in rows.values()} == {"other_error"}


def test_a_launch_that_the_host_executor_refuses_is_no_refusal_of_the_file() -> None:
    source = (Path(next(iter(kbsub.submissions.__path__))) / "level1_40" / "split_flat.py").read_text("utf-8")
    made = entry("")
    made.source = source.replace("block=(THREADS,)", "block=(8 * THREADS,)", 1)
    assert made.source != source
    rows = swept(made, sweep.Grid("test", (2,), (4, 8), 100)).rows
    assert {row["outcome"] for row in rows.values()} == {"driver_error"}
    assert "2048 threads" in rows["2x4"]["text"]


def test_a_control_that_is_wrong_is_a_declared_failure_and_its_errors_are_not() -> None:
    body = "if rows == 3:\n            raise RuntimeError('no')\n        return 2 * y"
    record = sweep.entry_record(swept(entry(body, contract="control")))
    assert record["counts"] == {"declared_failure": 3, "other_error": 2} and sweep.has_fault(record)
    assert list(record["declared_failures"]) == ["1x4", "1x100", "1x129"]


# How far beyond the tolerance it is declared to be in fp32 -> what becomes of an error of 1.5 tolerances, and of a NaN.
@pytest.mark.parametrize(
    ("declared", "body", "outcome"),
    [
        ({}, "return y + 1.5e-4 * (1 + y.abs())", "wrong"),
        ({"fp32": 2.1}, "return y + 1.5e-4 * (1 + y.abs())", "declared_failure"),
        ({"bf16": 2.1}, "return y + 1.5e-4 * (1 + y.abs())", "wrong"),
        ({"fp32": 1.4}, "return y + 1.5e-4 * (1 + y.abs())", "wrong"),
        ({"fp32": 2.1}, "return y * float('nan')", "wrong"),
        ({"fp32": 2.1}, "return y[:, :3]", "wrong"),
    ],
)
def test_a_declared_distance_excuses_no_more_than_it_says(declared: Any, body: str, outcome: str) -> None:
    rows = swept(entry(body, expect={"beyond_float64": declared}), sweep.Grid("test", (2,), (4, 8), 100)).rows
    assert {row["outcome"] for row in rows.values()} == {outcome}


@pytest.mark.parametrize("rows_in_a_chunk", [1, 2, 100])
def test_chunks_see_every_row(monkeypatch: pytest.MonkeyPatch, rows_in_a_chunk: int) -> None:
    monkeypatch.setattr(sweep_child, "CHUNK_ELEMENTS", 10 * rows_in_a_chunk)
    task = load_task(1, 40, kernelbench=None)
    most, cpu = LAYER_NORM[0].at(7, 10), torch.device("cpu")
    question = sweep_child.SweptShape(most, task, task.modules(), cpu, {"contract": "tolerance"})
    for row in range(5):
        output = question.answer.y[:5].float()
        output[row, 3] += 1.0
        found = question.ask(lambda x, output=output: output, 5)
        assert found["outcome"] == "wrong" and found["text"].startswith(f"[{row}, 3] is "), row
        assert "1 of 50 elements beyond 0.0001" in found["text"]


@pytest.mark.parametrize("workers", [1, 3])
def test_several_at_a_time_are_all_handed_out(workers: int) -> None:
    entries = [entry("return y") for _ in range(5)]
    done: list[sweep.SweptFile] = []
    assert {id(each) for each in sweep.measure_all(entries, workers, done.append)} == {id(each) for each in entries}
    assert len(done) == 5


# An error that the tolerance forgives, and the bound of accurate files does not.
@pytest.mark.parametrize(("accurate", "outcome"), [(False, "right"), (True, "wrong")])
def test_accurate_files_are_held_to_their_own_bound(accurate: bool, outcome: str) -> None:
    rows = swept(entry("return y * (1 + 2e-6)", accurate=accurate)).rows
    assert {row["outcome"] for row in rows.values()} == {outcome}
    assert ("bound" in rows["1x4"]) is accurate


@pytest.mark.parametrize(("body", "first"), [("return y", False), ("return x +", True)])
def test_children_that_always_die_are_given_up(body: str, first: bool) -> None:
    """`first`: before any shape, as a file that cannot be loaded does; once is then enough."""
    asked = []

    def run(target: str, payload: Any, *, timeout_s: float, on_progress: Any) -> Outcome:
        asked.append(payload["shapes"])
        if not first:
            on_progress({"stage": "shape", "case": "{}x{}".format(*payload["shapes"][0][1:])})
        return Outcome(Status.CRASHED, None, "died", "", 1.0)

    made = entry(body)
    grid = sweep.Grid("test", tuple(range(1, 41)), (4,), 1000)
    sweep.measure(made, grid, "cpu", 100, lambda *_: None, run=run)
    outcomes = [row["outcome"] for row in made.rows.values()]
    assert len(asked) == (1 if first else sweep.MOST_RESTARTS + 1)
    assert len(outcomes) == 40 and outcomes.count("not_run") == (40 if first else 40 - sweep.MOST_RESTARTS - 1)
    assert sweep.has_fault(sweep.entry_record(made))


def test_a_child_that_says_nothing_of_a_shape_does_not_loop() -> None:
    made = entry("return y")
    sweep.measure(made, GRID, "cpu", 100, lambda *_: None, run=lambda *_, **__: Outcome(Status.OK, {}, "", "", 1.0))
    assert {row["outcome"] for row in made.rows.values()} == {"not_run"}


def test_the_full_grid_is_as_asked() -> None:
    grid = sweep.GRIDS["full"]
    assert (len(grid.rows), len(grid.widths)) == (28, 41)
    assert len(set(grid.rows)) == 28 and len(set(grid.widths)) == 41 and len(grid.shapes()) >= 1000
    assert {1, 65537} <= set(grid.rows) and {8196, 10000, 12288, 16384, 4194304} <= set(grid.widths)
    assert max(rows * width for rows, width in grid.shapes()) <= 600_000_000


def test_every_declared_dtype_of_a_folder_with_a_grid_is_an_entry() -> None:
    entries = sweep.entries_of([])
    folders = {table.parent.name for root in kbsub.submissions.__path__ for table in Path(root).glob("*/task.toml")}
    assert {each.folder for each in entries} == folders, "a task without a [[grid]] is in no sweep"
    assert {each.stem for each in sweep.entries_of(["level1_38/traced"])} == {"traced"}
    pairs = {(each.file, each.precision) for each in entries}
    declared = {(each.file, precision) for each in entries for precision in each.declaration.precision}
    assert len(entries) == len(pairs) and pairs == declared
    with pytest.raises(sweep.SweepError, match="nobody: no candidate of that name"):
        sweep.entries_of(["nobody"])


# ---- the record ----

ROWS = [
    {"shape": "1x4", "outcome": "right", "share": 0.1234567, "bits": True},
    {"shape": "3x4", "outcome": "right", "share": 0.2, "bits": False},
    {"shape": "1x7", "outcome": "refused", "text": "x: rows of 7, must be a multiple of 4"},
    {"shape": "1x9", "outcome": "refused", "text": "x: rows of 9, must be a multiple of 4"},
    {"shape": "1x8", "outcome": "wrong", "share": 3.0, "text": "far"},
]


def test_the_record_keeps_margins_refusals_and_faults() -> None:
    made = entry("return y")
    made.rows = {row["shape"]: row for row in ROWS}
    record = sweep.entry_record(made)
    assert record["counts"] == {"right": 2, "refused": 2, "wrong": 1}
    assert record["share_by_width"] == {"4": 0.2}
    assert record["native_bits"] == {"compared": 2, "equal": 1} and record["other_bits"] == ["3x4"]
    assert record["refused"] == [{"text": "x: rows of 7, must be a multiple of 4", "shapes": ["1x7", "1x9"]}]
    assert record["faults"] == [ROWS[-1]]


@pytest.mark.parametrize(("rows", "fault"), [(ROWS[:1], False), (ROWS[:2], True), (ROWS[2:4], False), (ROWS[4:], True)])
def test_what_is_a_fault(rows: list[Any], fault: bool) -> None:
    made = entry("return y")
    made.rows = {row["shape"]: row for row in rows}
    assert sweep.has_fault(sweep.entry_record(made)) is fault


def stored(tmp_path: Path, *entries: sweep.SweptFile) -> tuple[dict[str, Any], Path]:
    content, out = sweep.blank(GRID, {"gpu": "G", "torch": "2"}), tmp_path / "sweep.json"
    for each in entries:
        each.rows = {"1x4": ROWS[0]}
        sweep.put(content, each, out)
    return content, out


@pytest.mark.parametrize(("resume", "kept"), [(True, {"fp32", "fp16"}), (False, {"fp16"})])
def test_what_is_finished_is_kept(tmp_path: Path, resume: bool, kept: set[str]) -> None:
    now, half = entry("return y"), entry("return y")
    half.precision = "fp16"
    content, out = stored(tmp_path, now, half)
    again = sweep.joined(out.read_text(), {**content, "candidates": {}}, [now], resume)
    assert set(again["candidates"]["level1_40/stand_in.py"]["precisions"]) == kept


def test_what_was_measured_of_another_file_is_measured_again(tmp_path: Path) -> None:
    now = entry("return y")
    content, out = stored(tmp_path, now)
    now.sha256 = "1" * 64
    assert sweep.joined(out.read_text(), {**content, "candidates": {}}, [now], resume=True)["candidates"] == {}


OTHERS = [
    ({"grid": {}}, "made with another grid"),
    ({"environment": {"gpu": "H", "torch": "3"}}, "made with another gpu, torch"),
]


@pytest.mark.parametrize(("change", "words"), OTHERS)
def test_a_record_of_another_machine_or_grid_is_not_joined(tmp_path: Path, change: Any, words: str) -> None:
    content, _ = stored(tmp_path, entry("return y"))
    with pytest.raises(sweep.SweepError, match=words):
        sweep.joined(json.dumps({**content, **change}), content, [], resume=True)


# ---- the command ----


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["measure", "sweep", *arguments])


def test_the_command_sweeps_a_cuda_candidate_on_the_host_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "sweep.json"
    asked = ["reference_order", "f16_f32", "--device", "cpu", "--grid", "small", "--out", str(out)]
    done = call(*asked)
    assert done.exit_code == 0, done.output
    content = json.loads(out.read_text())
    shapes = content["grid"]["shapes"]
    counts = content["candidates"]["level1_40/reference_order.py"]["precisions"]["fp32"]["counts"]
    assert (
        counts == {"right": counts["right"], "refused": 12} and sum(counts.values()) == shapes
    )  # widths 1, 7, 33, 129
    assert content["summary"]["pairs"] == 2 and content["summary"]["wrong"] == 0
    assert content["environment"]["torch"]
    again = call(*asked, "--resume")
    assert again.exit_code == 0 and "reference_order.py" not in again.output


WRONG_CALLS = [
    (["--device", "gpu"], 2, "write cuda, cuda:<index> or cpu"),
    (["--device", "cpu", "--grid", "huge"], 2, "known are full, small"),
    (["nobody", "--device", "cpu"], 2, "no candidate of that name"),
]


@pytest.mark.parametrize(("arguments", "code", "words"), WRONG_CALLS)
def test_a_wrong_call_is_said_in_words(arguments: list[str], code: int, words: str) -> None:
    done = call(*arguments)
    assert done.exit_code == code and words in done.output


def test_a_fault_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = entry(STAND_INS["wrong_at_100"][0])
    monkeypatch.setattr(sweep, "entries_of", lambda names: [wrong])
    monkeypatch.setitem(sweep.GRIDS, "small", GRID)
    done = call("--device", "cpu", "--grid", "small", "--out", str(tmp_path / "sweep.json"))
    assert done.exit_code == 1 and "1x100 wrong" in done.output and "1 with faults" in done.output
