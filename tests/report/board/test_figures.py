"""pass@k, fast_p and geometric mean against upstream's own scripts on the same rows; what stands beside them."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import sys
import types

import pytest

from kbsub.adapters.evaluator import import_upstream
from kbsub.eval.report.board import diff, figures
from kbsub.eval.report.board.figures import BoardError, board
from support.judged_rows import guards, official, put, source

# n, c, k -> the estimate by counting the ways to choose
PASSES = [(1, 1, 1), (1, 0, 1), (5, 2, 1), (5, 2, 3), (5, 5, 5), (10, 3, 5), (10, 0, 10)]


@pytest.mark.parametrize(("n", "c", "k"), PASSES)
def test_pass_at_k_is_the_chance_that_one_of_k_is_right(n, c, k):
    assert figures.pass_at_k(n, c, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k))


@pytest.fixture
def run(tmp_path):
    """A run of level 1: problem 1 correct and wrong, 2 correct twice, 3 wrong, 4 out of time; and two extra facts."""
    folder = tmp_path / "model"
    put(folder, 1, 1, 0, official(True, 1.0, 2.0), source=source({"batch_size": {"task": "16", "file": "1"}}, False))
    put(folder, 1, 1, 1, official(False))
    put(folder, 1, 2, 0, official(True, 4.0, 2.0), guards=guards("stale_memory"))
    put(folder, 1, 2, 1, official(True, 0.5, 2.0), guards=guards())
    put(folder, 1, 3, 0, official(False), blind_spots="this task also accepts zeros")
    put(folder, 1, 4, 0, None)
    return folder


def test_the_figures_of_a_run(run):
    (one,) = board([run], ks=[1, 2])["runs"]
    assert (one["rows"], one["judged"], one["problems"], one["total"], one["correct"]) == (6, 6, 4, 100, 2)
    assert one["pass@1"] == pytest.approx((0.5 + 1 + 0 + 0) / 4) and one["pass@2"] == pytest.approx((1 + 1) / 4)
    assert one["geometric_mean"] == pytest.approx(1.0) and one["fast_p"]["1.0"] == 0.01
    assert one["fast_p"]["0.0"] == 0.02 and one["fast_p_of_judged"]["0.0"] == 0.5


def test_what_upstream_does_not_say_is_counted_beside(run):
    (one,) = board([run])["runs"]
    counts = {key: one[key] for key in figures.beside([])}
    assert counts == {
        "on_other_inputs": 1,
        "wrong_in_own_namespace": 1,
        "caught_by_guards": 1,
        "refused_by_referee": 0,
        "failed_stress": 0,
        "with_blind_spots": 1,
    }
    assert one["correct"] == 2, "and changes nothing of upstream's figures"


def test_the_figures_of_a_problem_say_who_is_fastest(run, tmp_path):
    put(tmp_path / "other", 1, 2, 0, official(True, 0.1, 2.0))
    problems = {each["problem"]: each for each in board([run, tmp_path / "other"])["problems"]}
    assert (problems[2]["best_run"], problems[2]["best_sample"], problems[2]["rows"]) == ("other", 0, 3)
    assert problems[2]["best_speedup"] == pytest.approx(20.0) and "best_run" not in problems[3]


def test_a_correct_row_without_a_time_is_counted_and_left_out_of_the_mean(tmp_path):
    put(tmp_path / "model", 1, 1, 0, {**official(True), "runtime": -1.0})
    put(tmp_path / "model", 1, 2, 0, official(True, 1.0, 3.0))
    (one,) = board([tmp_path / "model"])["runs"]
    assert (one["correct"], one["untimed"]) == (2, 1) and one["geometric_mean"] == pytest.approx(3.0)


def test_a_folder_without_rows_and_two_of_one_name_are_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BoardError, match="holds no rows; make them with: kbsub eval"):
        board([tmp_path / "empty"])
    with pytest.raises(BoardError, match="two folders are called model"):
        board([run, run])


@pytest.mark.parametrize("text", ["no", "[]", '{"level1": {"1_x.py": {}}}', "{}", '{"level1": 3}'])
def test_a_file_that_is_no_baseline_is_refused(tmp_path, text):
    (tmp_path / "baseline.json").write_text(text)
    with pytest.raises(BoardError, match=r"baseline\.json"):
        figures.read_baseline(tmp_path / "baseline.json")


def upstreams(kernelbench, name):
    """A script of the checkout as a module; what it imports and does not use here is stood in for."""
    import_upstream(kernelbench)
    text = (kernelbench / "scripts" / name).read_text()
    for missing in ("pydra", "tabulate", "modal"):
        if missing not in sys.modules:
            stand_in = types.ModuleType(missing)
            stand_in.__dict__.update(
                Config=object, REQUIRED=None, main=lambda **_: lambda f: f, tabulate=lambda *_, **__: ""
            )
            sys.modules[missing] = stand_in
    space: dict = {"__name__": "upstreams_script", "__file__": name}
    exec(compile(text, name, "exec"), space)
    return space


@pytest.mark.kernelbench
def test_fast_p_and_geometric_mean_are_those_of_upstreams_analysis(kernelbench, tmp_path, monkeypatch):
    random.seed(3)
    root = kernelbench.path if hasattr(kernelbench, "path") else kernelbench
    names = sorted((root / "KernelBench" / "level1").glob("*.py"))
    means = {file.name: {"mean": random.uniform(0.1, 9.0)} for file in names}
    (tmp_path / "baseline.json").write_text(json.dumps({"level1": means}))
    folder = tmp_path / "model"
    entries: dict[str, list] = {}
    for number in range(1, 41):
        for sample in range(2):
            path = put(folder, 1, number, sample, official(random.random() < 0.6, random.uniform(0.1, 9.0)))
            entries.setdefault(str(number), []).append(figures.official_entry(json.loads(path.read_text())))
    (folder / "eval_results.json").write_text(json.dumps(entries))
    before = dict(sys.modules)
    try:
        script = upstreams(root, "benchmark_eval_analysis.py")
        analyse = script["analyze_greedy_eval"]
        dataset = types.SimpleNamespace(
            get_problem_ids=lambda: [int(file.name.split("_")[0]) for file in names],
            get_problem_by_id=lambda number: next(
                types.SimpleNamespace(name=file.name) for file in names if file.name.startswith(f"{number}_")
            ),
        )
        dataset = type("Dataset", (), {**vars(dataset), "__len__": lambda self: len(names)})
        monkeypatch.setitem(analyse.__globals__, "construct_kernelbench_dataset", lambda level: _static(dataset))
        with contextlib.redirect_stdout(io.StringIO()):
            theirs = analyse("model", "h", "b", 1, str(tmp_path / "baseline.json"), str(tmp_path))
    finally:
        for added in set(sys.modules) - set(before):
            if added in ("pydra", "tabulate", "modal"):
                del sys.modules[added]
    (ours,) = board([folder], figures.read_baseline(tmp_path / "baseline.json"))["runs"]
    assert ours["fast_p"] == pytest.approx(theirs["fast_p"]) and any(theirs["fast_p"].values())
    assert ours["geometric_mean"] == pytest.approx(theirs["geo_mean_speedup"])
    counts = (theirs["total_count"], theirs["correct_count"], theirs["compiled_count"])
    assert (ours["total"], ours["correct"], ours["compiled"]) == counts


def _static(space):
    """The class's functions take no self."""
    wrapped = space()
    for name in ("get_problem_ids", "get_problem_by_id"):
        setattr(wrapped, name, space.__dict__[name])
    return wrapped


@pytest.mark.kernelbench
def test_pass_at_k_is_that_of_upstreams_script(kernelbench, tmp_path):
    """Its function, cut out of the script: the script itself imports what only its generation needs."""
    import ast

    import numpy

    root = kernelbench.path if hasattr(kernelbench, "path") else kernelbench
    tree = ast.parse((root / "scripts" / "eval_from_generations.py").read_text())
    wanted = ("calc_pass_at_k", "calculate_pass_at_k")
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert len(tree.body) == 2
    space = {"np": numpy, "json": json, "os": __import__("os")}
    exec(compile(tree, "eval_from_generations.py", "exec"), space)
    folder, random_ = tmp_path / "model", random.Random(5)
    entries: dict[str, list] = {}
    for number in range(1, 15):
        for sample in range(random_.randint(1, 6)):
            path = put(folder, 1, number, sample, official(random_.random() < 0.4))
            entries.setdefault(str(number), []).append(figures.official_entry(json.loads(path.read_text())))
    (folder / "eval_results.json").write_text(json.dumps(entries))
    ks = [1, 2, 3, 5]
    with contextlib.redirect_stdout(io.StringIO()):
        theirs = space["calculate_pass_at_k"](str(folder / "eval_results.json"), ks)
    found = board([folder], ks=ks)
    (ours,) = found["runs"]
    assert {f"avg_pass@{k}": ours[f"pass@{k}"] for k in ks} == pytest.approx(theirs["averages"])
    for each in found["problems"]:
        said = theirs["problems"][str(each["problem"])]
        assert {key: each[key] for key in said if key.startswith("pass@")} == pytest.approx(
            {key: value for key, value in said.items() if key.startswith("pass@")}
        )


# ---- what changed between two runs ----


def test_diff_names_verdicts_and_times_that_changed(run, tmp_path):
    other = tmp_path / "again" / "model"
    put(other, 1, 1, 0, official(True, 1.04, 2.0), source=source({"batch_size": {"task": "16", "file": "1"}}, False))
    put(other, 1, 1, 1, official(True, 1.0, 2.0))
    put(other, 1, 2, 0, official(True, 2.0, 2.0), guards=guards())
    put(other, 1, 2, 1, official(True, 0.5, 2.0), guards=guards())
    put(other, 1, 9, 0, official(True))
    found = diff.diff(run, other)
    name = "level_1_problem_{}_sample_{}".format
    assert set(found["changed"]) == {name(1, 1), name(2, 0)}, "4% is no change of a time"
    assert found["changed"][name(1, 1)]["status"] == ["INCORRECT_NUMERICAL", "OK"]
    assert found["changed"][name(2, 0)] == {"guards": [["stale_memory"], []], "ms": [4.0, 2.0], "speedup": [0.5, 1.0]}
    assert (found["only_before"], found["only_after"], found["same"]) == ([name(3, 0), name(4, 0)], [name(9, 0)], 2)
    assert f"{name(2, 0)}: guards stale_memory -> clean; ms 4 -> 2; speedup 0.50x -> 1.00x" in diff.words(found)


def test_diff_of_a_run_with_itself_is_nothing(run):
    from typer.testing import CliRunner

    from kbsub.eval.cli import app

    done = CliRunner().invoke(app, ["diff", str(run), str(run)])
    assert (done.exit_code, done.output) == (0, "0 changed, 6 the same\n")
