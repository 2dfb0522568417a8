"""`kbsub measure referee`: which rows are missing, of what they are made, what is counted. Nothing is measured."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kbsub.eval.measure import referee
from support.paths import TESTS

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11"}
RIGHT = {
    "ended": {"status": "OK", "message": "", "seconds": 1.0},
    "outputs": 9, "wrong": 0, "problems": [], "device": "cuda", "confined": {"level": "namespaces", "lacks": []},
    "precision": "fp32", "tolerance": 1e-4, "ms": 0.5, "low": 0.49, "high": 0.51, "tells_apart": True,
    "samples_ms": {"replay": [0.5, 0.51, 0.52]},
}  # fmt: skip
PARTS = {
    "official": {"ended": {"status": "OK", "message": "", "seconds": 2.0}, "correctness": True, "runtime": 0.0012},
    "guards": {"ended": {"status": "OK", "message": "", "seconds": 2.0}, "findings": []},
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A run of the command over three cheats, whose verdicts are given; [(name, part)] of what was asked."""
    cheats = tmp_path / "cheats"
    (cheats / "deep").mkdir(parents=True)
    (cheats / "zeros.py").write_text("class ModelNew: pass\n")
    (cheats / "slow.py").write_text("class ModelNew: 1\n")
    (cheats / "deep" / "late.py").write_text("class ModelNew: ...\n")
    asked: list[tuple[str, str]] = []

    def part(job, name, gpu, checkout, options, *, alone):
        asked.append((job.name, name if alone else f"{name} beside others"))
        wrong = {"wrong": 9, "problems": ["differs"]} if job.name == "zeros" else {}
        official = {**PARTS["official"], **({"runtime": 0.5} if job.name == "slow" else {})}
        beside = {} if alone else {"alone": False}
        return {**RIGHT, **wrong, **beside} if name == "referee" else {**PARTS, "official": official}[name]

    monkeypatch.setattr(referee, "run_part", part)
    monkeypatch.setattr(referee, "measured_on", lambda device: MACHINE)
    monkeypatch.setattr(referee, "find_checkout", lambda path: argparse.Namespace(path="checkout"))
    out = tmp_path / "out" / "referee.json"
    out.parent.mkdir()

    def again(*words: str):
        asked.clear()
        words = ("--out", str(out), "--cheats", str(cheats), "--twins", str(TESTS / "twins"), "--sections", *words)
        assert referee.main([*words]) == 0
        return sorted(asked), json.loads(out.read_text())

    return again, cheats


def test_a_row_is_measured_once_and_again_when_its_file_has_changed(run):
    again, cheats = run
    asked, found = again("cheats")
    assert set(found["cheats"]) == {"zeros", "deep/late", "slow"}
    each = {"official", "guards", "referee beside others"}
    assert {part for name, part in asked if name == "zeros"} == each
    assert {part for name, part in asked if name == "slow"} == each | {"referee"}  # right: so it is timed, alone
    assert again("cheats")[0] == []
    (cheats / "zeros.py").write_text("class ModelNew:\n    pass\n")
    assert {name for name, _ in again("cheats")[0]} == {"zeros"}


def test_the_summary_names_what_was_accepted(run):
    _, found = run[0]("cheats")
    assert found["cheats"]["zeros"]["verdict"]["answer"] == "fail"
    late = found["cheats"]["deep/late"]["verdict"]
    assert late["answer"] == "fail" and "deceived" in late["words"]  # by upstream's 0.0012 ms
    assert found["summary"]["cheats_accepted"] == {"slow": 0.5}


def test_honest_files_are_held_to_graph_replay(run):
    asked, found = run[0]("honest", "--only", "level1_40/eager", "level1_40/oracle")
    assert set(found["honest"]) == {"level1_40/eager@fp32"} | {f"level1_40/oracle_accurate@{p}" for p in
                                                              ("fp32", "fp16", "bf16")}  # fmt: skip
    assert {part for _, part in asked} == {"referee"}
    verdict = found["honest"]["level1_40/eager@fp32"]["verdict"]
    assert verdict["replay_ms"] == 0.51 and verdict["ratio"] == pytest.approx(0.5 / 0.51)
    assert found["summary"]["beyond_3_percent"] == [] and found["summary"]["from_0.1_ms"] == 4
    assert len(found["summary"]["order"]) == 3
