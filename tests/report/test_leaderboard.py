"""`kbsub compare`, `kbsub baseline` and the result schema, from stored numbers alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbsub.eval.bench.baseline_files import BaselinePlan, add_entry, measure_all
from kbsub.eval.bench.baselines import BASELINES
from kbsub.eval.cli import app
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.report import leaderboard as compare
from kbsub.eval.report import schema
from kbsub.eval.results.model import Result, write_json_atomic
from support.paths import ROOT
from support.stored_result import content, with_files


def other(**environment: str) -> dict:
    changed = copy.deepcopy(content())
    changed["environment"].update(environment)
    return changed


def both(second: dict) -> compare.Table:
    return compare.side_by_side([Result.model_validate(content()), Result.model_validate(second)], ["a.json", "b.json"])


# what differs between the files -> what the note must say
DIFFERENT = [
    ({"gpu": "NVIDIA A100"}, "different GPUs"),
    ({"torch": "2.13"}, "different software versions"),
    ({"gpu": "NVIDIA A100", "torch": "2.13"}, "different GPUs and software versions"),
    ({}, "different runs"),
]


@pytest.mark.parametrize(("environment", "words"), DIFFERENT)
def test_columns_are_never_ranked_without_saying_so(environment, words):
    table = both(other(**environment))
    assert f"not ranked against each other: they are of {words}" in table.notes[0]


def test_each_column_compares_with_its_own_eager():
    table = both(other(gpu="NVIDIA A100"))
    (cells,) = [row for row in table.rows if row[0] == "`exact`"]
    assert cells[2].endswith("FASTER") and cells[4] == cells[2]


def test_another_source_under_the_same_name_is_said():
    second = other(gpu="NVIDIA A100")
    second["candidates"]["exact"]["sha256"] = "d" * 64
    assert any("Not the same source in every file: exact" in note for note in both(second).notes)


def test_one_file_marks_what_is_another_version_here(tmp_path, monkeypatch):
    """And says nothing of a candidate without a file, nor where this installation has no candidates at all."""
    folder = tmp_path / "level1_40"
    result = Result.model_validate(with_files(content(), folder))
    path = tmp_path / "stored.json"
    monkeypatch.setattr(compare, "submissions_folder", lambda task: tmp_path / task)
    assert "†" not in "".join(table.markdown() for table in compare.tables_of(result, path))
    (folder / "exact.py").write_text("# mended\n")
    (folder / "near.py").unlink()
    texts = [table.markdown() for table in compare.tables_of(result, path)]
    assert all("`exact`†" in text and "--task level1_40 --out " in text for text in texts), texts
    assert "`near`†" not in "".join(texts)
    monkeypatch.setattr(compare, "submissions_folder", lambda task: None)
    assert "†" not in "".join(table.markdown() for table in compare.tables_of(result, path))


def test_files_of_different_tasks_are_refused():
    second = other()
    second["task"]["problem_id"] = 36
    with pytest.raises(ValueError, match=r"a\.json, b\.json: results of different tasks"):
        both(second)


def test_compare_command_writes_pages_and_pictures(tmp_path):
    for name, stored in (("a", content()), ("b", other(gpu="NVIDIA A100"))):
        write_json_atomic(tmp_path / f"{name}.json", stored)
    call = [
        "compare",
        "--from",
        str(tmp_path / "a.json"),
        "--from",
        str(tmp_path / "b.json"),
        "--out",
        str(tmp_path / "o"),
    ]
    outcome = CliRunner().invoke(app, call)
    assert outcome.exit_code == 0, outcome.output
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert {"side_by_side.md", "a_h200_timing.md", "a_h200_time.png", "a_h200_error.png", "b_a100_time.png"} <= names


def test_compare_refuses_an_unknown_schema(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({**content(), "schema": 7}))
    outcome = CliRunner().invoke(app, ["compare", str(tmp_path / "a.json")])
    assert outcome.exit_code == 2 and "schema 7, this version reads schema 1" in outcome.output


# ---- baseline files ----

STATS = {"mean": 8.1, "std": 0.1, "min": 8.0, "max": 8.3, "num_trials": 100, "hardware": "H200", "device": "cuda:0"}


def plan(folder: Path, **changes) -> BaselinePlan:
    names = tuple(name for name, baseline in BASELINES.items() if baseline.upstream_file)
    facts = {"tasks": ("level1_40",), "baselines": names, "precision": "fp32", "trials": 100, "kernelbench": folder}
    return BaselinePlan(**{**facts, "device": "cuda:0", "timeout_s": 9.0, "folder": folder, **changes})


def answer(target, payload, *, timeout_s):
    assert target == "kbsub.eval.bench.baselines:measure"
    if payload["baseline"] == "compile_max_autotune":
        return Outcome(Status.TIMEOUT, None, "TIMEOUT after 9 s", "", 9.0)
    return Outcome(Status.OK, {"name": "40_LayerNorm.py", "level": 1, "stats": STATS}, "", "", 1.0)


def test_files_have_upstreams_names_and_nesting(tmp_path):
    failed = measure_all(plan(tmp_path), isolate=answer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "baseline_time_torch.json",
        "baseline_time_torch_compile_cudagraphs.json",
        "baseline_time_torch_compile_inductor_default.json",
        "baseline_time_torch_compile_inductor_max-autotune-no-cudagraphs.json",
        "baseline_time_torch_compile_inductor_reduce-overhead.json",
    ]
    assert [words.split(":")[0] for words in failed] == ["level1_40 torch.compile max-autotune fp32"]
    stored = json.loads((tmp_path / "baseline_time_torch.json").read_text())
    assert stored["level1"]["40_LayerNorm.py"] == {**STATS, "precision": "fp32"} and set(stored) >= {"level2", "level3"}


def test_other_problems_of_a_file_stay_and_another_precision_is_refused(tmp_path):
    path = tmp_path / "baseline_time_torch.json"
    add_entry(path, 1, "36_RMSNorm_.py", {"mean": 1.0, "precision": "fp32"})
    add_entry(path, 1, "40_LayerNorm.py", {"mean": 8.1, "precision": "fp32"})
    assert sorted(json.loads(path.read_text())["level1"]) == ["36_RMSNorm_.py", "40_LayerNorm.py"]
    with pytest.raises(ValueError, match=r"is fp32, this is bf16; write to another --out"):
        add_entry(path, 1, "40_LayerNorm.py", {"mean": 8.1, "precision": "bf16"})


@pytest.mark.kernelbench
def test_upstream_reads_the_baseline_file(kernelbench, tmp_path):
    from kbsub.adapters.evaluator import import_upstream

    timing = import_upstream(kernelbench.path).module.timing
    from kernelbench.dataset import construct_kernelbench_dataset

    path = tmp_path / "baseline_time_torch.json"
    add_entry(path, 1, "40_LayerNorm.py", {**STATS, "precision": "fp32"})
    dataset = construct_kernelbench_dataset(1)
    assert timing.fetch_baseline_time("level1", 40, dataset, str(path))["mean"] == 8.1


# ---- schema ----


def test_the_committed_schema_is_the_models_own():
    root = ROOT
    assert schema.is_current(root / schema.FILE), "run: make report"


def test_a_schema_without_a_key_is_out_of_date(tmp_path):
    stored = schema.schema()
    del stored["$defs"]["Candidate"]["properties"]["sha256"]
    (tmp_path / "schema.json").write_text(json.dumps(stored))
    assert not schema.is_current(tmp_path / "schema.json")


def test_the_schema_pins_the_number_that_readers_accept():
    assert schema.schema()["properties"]["schema"]["const"] == 1 and "schema" in schema.schema()["required"]
