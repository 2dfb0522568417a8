"""The register of timing methods: what each says of itself, and that a new one is one file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from kbsub.eval.bench.methods.register import cold_words, compared_keys, help_words, methods, named, part_of_all
from support.paths import ROOT
from support.small_reference import REFERENCE

# name, part of all, upstream's, cold, compared, its key on a CPU; in the order in which they run
PROMISED = [
    ("graph_replay", True, False, False, True, "cpu_rehearsal"),
    ("cold_replay", False, False, True, False, "cold_cpu_rehearsal"),
    ("cuda_event", True, True, True, True, None),  # cold and compared: upstream flushes the L2, its evaluator uses it
    ("do_bench", True, True, False, False, None),
    ("do_bench_impl", True, True, False, False, None),
    ("host_time", True, True, False, False, None),
]


def test_what_the_methods_say_of_themselves():
    said = [
        (name, each.in_all, each.upstream, bool(each.cold), each.compared, each.key(on_gpu=False))
        for name, each in methods().items()
    ]
    assert said == PROMISED


def test_lists_come_from_the_register():
    assert part_of_all() == [name for name, in_all, *_ in PROMISED if in_all]
    assert compared_keys() == ["graph_replay", "cpu_rehearsal", "cuda_event"]
    assert list(cold_words()) == ["cold_replay", "cuda_event"]
    assert all(f"{name} ({each.title})" in help_words() for name, each in methods().items())


@pytest.mark.parametrize("change", [{"name": "cuda_event"}, {"name": "new", "rehearsal": "cpu_rehearsal"}])
def test_two_methods_never_write_to_one_key(change):
    found = list(methods().values())
    with pytest.raises(ValueError, match="two of them write to"):
        named([*found, replace(found[0], **{"rehearsal": None, **change})])


def test_the_register_needs_no_torch():
    code = (
        "import sys; from kbsub.eval.bench.methods import register as r; r.methods(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


NEW_METHOD = '''"""The host's clock around single calls."""

import statistics
import time

from kbsub.eval.bench.methods.method import Measured, TimingMethod
from kbsub.eval.bench.timing import Series


def measure(run):
    samples = {name: [] for name in run.programs}
    for index in range(run.protocol.rounds):
        for name, program in list(run.programs.items()):
            def sample():
                run.scene.load(index)
                start = time.perf_counter()
                program.call(*run.scene.captured_arguments())
                return (time.perf_counter() - start) * 1e3
            kept, value = run.attempt(name, "wall clock of", sample)
            if kept:
                samples[name].append(value)
    series = Series(samples, list(samples))
    return Measured(series, lambda _, values: {
        "median_ms": statistics.median(values), "samples_ms": values, "relative_iqr": 0.0})


METHODS = (TimingMethod("wall_clock", "the host's clock", measure, rehearsal="wall_clock_rehearsal"),)
'''


def test_a_timing_method_is_one_file(tmp_path):
    """Added to a copy of the tree, it is in the help, runs, is stored under its key and has its column."""
    package = tmp_path / "tree" / "kbsub"
    for top in ("adapters", "eval", "submissions"):
        shutil.copytree(ROOT / top, package / top, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "KERNELBENCH_COMMIT", package.parent)
    shutil.copy(ROOT / "KERNELBENCH_COMMIT", package / "adapters")
    before = {file: file.read_bytes() for file in package.rglob("*") if file.is_file()}
    (package / "eval" / "bench" / "methods" / "wall_clock.py").write_text(NEW_METHOD)
    touched = [file for file in package.rglob("*") if file.is_file() and before.get(file) != file.read_bytes()]
    assert len(touched) == 1, "a timing method is one file: its registration stands in it"

    (tmp_path / "reference.py").write_text(REFERENCE)
    (tmp_path / "mine.py").write_text(REFERENCE.replace("class Model(", "class ModelNew("))
    out = tmp_path / "out.json"
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"}

    def kbsub(*call: str) -> str:
        command = [sys.executable, "-m", "kbsub.eval.cli", *call]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "wall_clock" in kbsub("bench", "--help")
    call = ["bench", "mine.py", "--task", "reference.py", "--device", "cpu", "--allow-unverified", "--out", str(out)]
    kbsub(*call, "--methods", "graph_replay,cold_replay,wall_clock", "--rounds", "9", "--baselines", "eager")
    header = out.with_name("out_timing.md").read_text().split("| program (ms)")[1].splitlines()[0]
    assert "| wall_clock_rehearsal |" in header, "its column in the table"
    for side, name in (("candidates", "mine"), ("baselines", "eager")):
        timing = json.loads(out.read_text())[side][name]["timing"]
        assert set(timing) == {"cpu_rehearsal", "cold_cpu_rehearsal", "wall_clock_rehearsal"}
        assert len(timing["wall_clock_rehearsal"]["samples_ms"]) == 9 and timing["wall_clock_rehearsal"]["run"]
