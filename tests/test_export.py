"""`kbsub export`: names, bytes, the mapping, and which candidate is sample 0."""

from __future__ import annotations

import json

import pytest

from kbsub.eval.export import MAPPING_FILE, Best, Entry, ExportError, best_of, choose_entries, export

SOURCES = {"slow": b"# slow\r\n", "fast": b"# fast \xc3\xa9\n", "wrong": b"# wrong\n", "stale": b"# stale\n"}
CONTRACTS = {"slow": "tolerance", "fast": "bit-identical", "wrong": "control", "stale": "tolerance"}
BEST = Best("fast", "a test says so")


@pytest.fixture
def kernelbench_like(tmp_path):
    for level, problem in ((1, "40_LayerNorm.py"), (2, "7_Other.py")):
        file = tmp_path / "KernelBench" / f"level{level}" / problem
        file.parent.mkdir(parents=True)
        file.write_text("")
    return tmp_path


@pytest.fixture
def entries(tmp_path):
    return [Entry(tmp_path / f"{stem}.py", source, CONTRACTS[stem], stem) for stem, source in SOURCES.items()]


@pytest.mark.parametrize("task", [(1, 40), (2, 7)])
def test_files_have_upstreams_names_and_the_candidates_bytes(kernelbench_like, entries, task):
    folder, new = export(entries, kernelbench_like, "run", task, best=BEST)
    level, problem = task
    names = [f"level_{level}_problem_{problem}_sample_{k}_kernel.py" for k in range(4)]
    order = ["fast", "slow", "wrong", "stale"]
    assert new and folder == kernelbench_like / "runs" / "run"
    assert {file.name for file in folder.iterdir()} == {*names, MAPPING_FILE}
    assert [(folder / name).read_bytes() for name in names] == [SOURCES[stem] for stem in order]
    mapping = json.loads((folder / MAPPING_FILE).read_text())
    assert [(s["sample_id"], s["file"], s["candidate"]) for s in mapping["samples"]] == list(
        zip(range(4), names, order, strict=True)
    )


def test_the_same_export_again_changes_nothing_and_another_is_refused(kernelbench_like, entries):
    folder, _ = export(entries, kernelbench_like, "run", (1, 40), best=BEST)
    (folder / "eval_results.json").write_text("{}")  # upstream has been here
    assert export(entries, kernelbench_like, "run", (1, 40), best=BEST) == (folder, False)
    with pytest.raises(ExportError, match="fresh --run-name"):
        export(entries[:3], kernelbench_like, "run", (1, 40), best=BEST)
    assert len(list(folder.glob("*_kernel.py"))) == 4 and (folder / "eval_results.json").exists()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "a b"])
def test_a_run_name_that_is_no_plain_folder_name_is_refused(kernelbench_like, entries, name):
    with pytest.raises(ExportError, match="run name"):
        export(entries, kernelbench_like, name, (1, 40), best=BEST)


def test_a_problem_that_is_not_there_is_refused(kernelbench_like, entries):
    with pytest.raises(ExportError, match="no problem 4 in KernelBench/level1"):
        export(entries, kernelbench_like, "run", (1, 4), best=BEST)


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
    [(["three"], r"three: neither .*there: one, two"), (["one", "one"], "two files of one name would share")],
)
def test_a_name_that_cannot_be_is_refused(tmp_path, names, said):
    with pytest.raises(ExportError, match=said):
        choose_entries(names, write_task_folder(tmp_path / "level1_40"))


@pytest.mark.kernelbench
def test_the_command_writes_what_upstreams_reader_finds(kernelbench, tmp_path, monkeypatch):
    """Through the CLI into a copy of the checkout, read back by the function of upstream's script."""
    import ast
    import os
    import shutil

    from typer.testing import CliRunner

    from kbsub.eval.cli import app

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
