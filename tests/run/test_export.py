"""`kbsub export`: names, bytes, the mapping, and which candidate is sample 0."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kbsub.adapters.task import Task, TaskError
from kbsub.eval.cli import app
from kbsub.eval.run.export import (
    MAPPING_FILE,
    REFERENCE_FILE,
    Best,
    Entry,
    ExportError,
    best_of,
    choose_entries,
    export,
    runs_folder,
)

SOURCES = {"slow": b"# slow\r\n", "fast": b"# fast \xc3\xa9\n", "wrong": b"# wrong\n", "stale": b"# stale\n"}
CONTRACTS = {"slow": "tolerance", "fast": "bit-identical", "wrong": "control", "stale": "tolerance"}
BEST = Best("fast", "a test says so")
LAYER_NORM = Task(1, 40, "40_LayerNorm.py", "", "0" * 64, "kernelbench@x")
OTHER = Task(2, 7, "7_Other.py", "", "0" * 64, "kernelbench@x")
OWN = Task(0, 0, "mine.py", "# the program\n", "0" * 64, "local")


@pytest.fixture
def entries(tmp_path):
    return [Entry(tmp_path / f"{stem}.py", source, CONTRACTS[stem], stem) for stem, source in SOURCES.items()]


@pytest.mark.parametrize("task", [LAYER_NORM, OTHER])
def test_files_have_upstreams_names_and_the_candidates_bytes(tmp_path, entries, task):
    folder, new = export(entries, tmp_path, "run", task, best=BEST)
    level, problem = task.level, task.problem_id
    names = [f"level_{level}_problem_{problem}_sample_{k}_kernel.py" for k in range(4)]
    order = ["fast", "slow", "wrong", "stale"]
    assert new and folder == tmp_path / "run"
    assert {file.name for file in folder.iterdir()} == {*names, MAPPING_FILE}
    assert [(folder / name).read_bytes() for name in names] == [SOURCES[stem] for stem in order]
    mapping = json.loads((folder / MAPPING_FILE).read_text())
    assert [(s["sample_id"], s["file"], s["candidate"]) for s in mapping["samples"]] == list(
        zip(range(4), names, order, strict=True)
    )


def test_the_same_export_again_changes_nothing_and_another_is_refused(tmp_path, entries):
    folder, _ = export(entries, tmp_path, "run", LAYER_NORM, best=BEST)
    (folder / "eval_results.json").write_text("{}")  # upstream has been here
    assert export(entries, tmp_path, "run", LAYER_NORM, best=BEST) == (folder, False)
    with pytest.raises(ExportError, match="fresh --run-name"):
        export(entries[:3], tmp_path, "run", LAYER_NORM, best=BEST)
    assert len(list(folder.glob("*_kernel.py"))) == 4 and (folder / "eval_results.json").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b"])
def test_a_run_name_that_is_no_plain_folder_name_is_refused(tmp_path, entries, name):
    with pytest.raises(ExportError, match="run name"):
        export(entries, tmp_path, name, LAYER_NORM, best=BEST)


def test_a_local_task_is_taken_with_its_program(tmp_path, entries):
    folder, _ = export(entries, tmp_path, "run", OWN, best=BEST)
    assert (folder / REFERENCE_FILE).read_text() == OWN.source
    assert (folder / "level_0_problem_0_sample_0_kernel.py").read_bytes() == SOURCES["fast"]
    assert export(entries, tmp_path, "run", OWN, best=BEST) == (folder, False)


def test_a_run_folder_goes_where_a_person_sees_it(tmp_path):
    checkout, to = tmp_path / "kb", tmp_path / "there"
    assert runs_folder(None, None).as_posix() == "runs"
    assert runs_folder(None, checkout) == checkout / "runs"
    assert runs_folder(to, checkout) == to


def row(entry: Entry, mean: float, correctness: bool = True, **other) -> dict:
    return {
        "sha256": entry.sha256,
        "official": {"correctness": correctness},
        "timing": {"cuda_event": {"mean_ms": mean}},
        **other,
    }


def test_the_best_is_the_fastest_correct_one_of_the_same_source_that_is_no_control(entries):
    slow, fast, wrong, stale = entries
    rows = {
        "slow": row(slow, 4.0),
        "fast": row(fast, 0.3),
        "wrong": row(wrong, 0.1),  # a control
        "stale": row(stale, 0.2, sha256="0" * 64),  # measured on another text
    }
    assert best_of(entries, {"h200/level1_40.json": {"candidates": rows}}) == Best(
        "fast", "0.3 ms (cuda_event) in h200/level1_40.json"
    )
    rows["fast"] = row(fast, 0.3, correctness=False)
    assert best_of(entries, {"x": {"candidates": rows}}).stem == "slow"
    assert best_of(entries, {"x": {"candidates": {}}}) is None
    assert best_of(entries, {"x": {"candidates": {"slow@bf16": row(slow, 1.0)}}}, "bf16").stem == "slow"


def write_task_folder(folder):
    folder.mkdir()
    (folder / "one.py").write_text("1")
    (folder / "two.py").write_text("2")
    (folder / "candidates.toml").write_text(
        '[one]\ntitle = "One"\nprecision = ["fp32", "fp16"]\ncontract = "tolerance"\n'
        '[two]\ntitle = "Two"\nprecision = ["fp32"]\ncontract = "control"\n'
    )
    return folder


def test_candidates_are_named_by_stem_or_path_or_not_at_all(tmp_path):
    folder = write_task_folder(tmp_path / "level1_40")
    loose = tmp_path / "loose.py"
    loose.write_text("3")
    assert [(e.stem, e.contract) for e in choose_entries([], folder)] == [("one", "tolerance"), ("two", "control")]
    assert [e.stem for e in choose_entries([], folder, "fp16")] == ["one"]
    got = choose_entries(["two", str(loose), "one.py"], folder)
    assert [(e.stem, e.contract) for e in got] == [("two", "control"), ("loose", None), ("one", "tolerance")]


@pytest.mark.parametrize(
    "names, said",
    [
        (["three"], r"three: no such candidate file.*there: one, two"),
        (["one", "one"], "one.py: two files of one name would share a row"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, names, said):
    with pytest.raises(TaskError, match=said):
        choose_entries(names, write_task_folder(tmp_path / "level1_40"))


@pytest.mark.kernelbench
def test_the_command_writes_what_upstreams_reader_finds(kernelbench, tmp_path, monkeypatch):
    """Through the CLI into a copy of the checkout, read back by the function of upstream's script."""
    import ast
    import os
    import shutil

    copy = tmp_path / "kb"
    shutil.copytree(kernelbench.path, copy, symlinks=True)
    done = CliRunner().invoke(app, ["export", "--kernelbench", str(copy), "--run-name", "run", "--best", "split_flat"])
    assert done.exit_code == 0, done.output
    # eval_from_generations.py imports modal at its top: take the one function out of it, unchanged.
    tree = ast.parse((copy / "scripts/eval_from_generations.py").read_text())
    (reader,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "fetch_kernel_from_disk"]
    scope = {"os": os, "read_file": lambda path: open(path).read()}
    exec(compile(ast.Module([reader], []), "upstream", "exec"), scope)
    mapping = json.loads((copy / "runs/run" / MAPPING_FILE).read_text())
    assert mapping["samples"][0]["candidate"] == "split_flat"
    for sample in mapping["samples"]:
        text = scope["fetch_kernel_from_disk"](str(copy / "runs/run"), 1, 40, sample["sample_id"])
        assert text is not None and "class ModelNew" in text, sample
    assert scope["fetch_kernel_from_disk"](str(copy / "runs/run"), 1, 40, len(mapping["samples"])) is None


GOOD = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.relu(x)\n"
OWN_TASK = GOOD.replace("ModelNew", "Model") + (
    "def get_inputs():\n    return [torch.rand(4)]\ndef get_init_inputs():\n    return []\n"
)
REFUSED = {
    "syntax.py": ("class ModelNew(:\n", "line 1: invalid syntax"),
    "no_model.py": ("x = 1\n", "defines no ModelNew"),
    "falls_back.py": (GOOD + "try:\n    x = 1\nexcept ValueError:\n    x = 2\n", "static checker: Contains try-except"),
    "lazy.py": (GOOD.replace("x)\n", "torch.Tensor._make_subclass(torch.Tensor, x))\n"), "static checker: "),
}


@pytest.mark.kernelbench
@pytest.mark.parametrize("name", REFUSED)
def test_what_upstream_would_refuse_is_not_written_unless_told(kernelbench, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text, words = REFUSED[name]
    (tmp_path / name).write_text(text)
    (tmp_path / "good.py").write_text(GOOD)
    call = ["export", name, "good.py", "--task", "level1_19", "--run-name", "run"]
    refused = CliRunner().invoke(app, call)
    assert refused.exit_code == 1, refused.output
    assert name in refused.output and words in " ".join(refused.output.split())
    assert not (tmp_path / "runs").exists()
    told = CliRunner().invoke(app, [*call, "--refused-too"])
    assert told.exit_code == 0 and f"upstream would refuse: {name}" in told.output
    assert len(list((tmp_path / "runs" / "run").glob("level_1_problem_19_sample_*_kernel.py"))) == 2


@pytest.mark.kernelbench
def test_a_precision_that_a_file_is_not_declared_for_is_refused(kernelbench, tmp_path):
    call = ["export", "reference_order", "--run-name", "run", "--to", str(tmp_path), "--precision", "bf16"]
    outcome = CliRunner().invoke(app, call)
    assert outcome.exit_code == 1, outcome.output
    assert "reference_order.py: candidates.toml declares it for fp32" in " ".join(outcome.output.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.kernelbench
def test_a_file_of_a_local_task_goes_where_it_is_sent(kernelbench, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "own.py").write_text(OWN_TASK)
    done = CliRunner().invoke(app, ["export", "good.py", "--task", "own.py", "--to", "there", "--run-name", "run"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "there" / "run" / REFERENCE_FILE).read_text() == OWN_TASK
    mapping = json.loads((tmp_path / "there" / "run" / MAPPING_FILE).read_text())
    assert mapping["task"]["provenance"] == "local"


@pytest.mark.kernelbench
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["good.py", "--task", "level1_19"], "--run-name"),
        (["good.py", "--task", "level1_999", "--run-name", "run"], "ids: 1 to 100"),
        (["good.py", "--task", "none.py", "--run-name", "run"], "cannot be read as a reference program"),
        (["good.py", "--task", "level1_19", "--run-name", "a/b"], "it names a folder"),
        (["none.py", "--task", "level1_19", "--run-name", "run"], "no such candidate file"),
        (["good.py", "--task", "level1_19", "--run-name", "run", "--best", "other"], "not among the exported"),
        (["good.py", "--task", "level1_19", "--run-name", "good.py", "--to", "."], "is a file"),
        (["good.py", "--task", "level1_19", "--run-name", "run", "--to", "good.py"], "--to"),
        (["good.py", "--task", "level1_19", "--run-name", "run", "--precision", "fp8"], "fp32, fp16, bf16"),
        (["good.py", "--task", "level1_19", "--run-name", "run", "--results", "none.json"], "not a result file"),
    ],
)
def test_a_wrong_call_is_exit_2(kernelbench, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.py").write_text(GOOD)
    outcome = CliRunner().invoke(app, ["export", *arguments])
    assert outcome.exit_code == 2, outcome.output
    assert words in " ".join(outcome.output.split())
