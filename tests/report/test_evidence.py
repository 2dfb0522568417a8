"""The table of the other evidence: each record in words, what is missing said, what has changed since marked."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.commands.measure import programs
from kbsub.eval.report.evidence import evidence_table
from kbsub.eval.report.papers import remade
from kbsub.eval.results.model import ResultError, write_json_atomic
from support.stored_result import content, with_files

FILES = {  # file below the root -> its text
    "tests/twins/zeros.py": "# zeros\n",
    "tests/twins/replay.py": "# replay\n",
    "submissions/level1_40/a.py": "# a\n",
    "submissions/level1_40/b.py": "# b\n",
    "tests/cell_programs/a.py": "# a in a cell\n",
    "tests/cell_programs/b.py": "# b in a cell\n",
}


def sha256(file: str) -> str:
    return hashlib.sha256(FILES[file].encode()).hexdigest()


def twin(name: str, *, passes: bool, caught: bool = True, holds: bool = True) -> dict[str, Any]:
    digest = sha256(f"tests/twins/{name}.py")
    return {"sha256": digest, "passes_upstream": passes, "caught": caught, "label_holds": holds}


def clean(*names: str, state: str = "clean") -> dict[str, Any]:
    return {f"level1_40/{name}.py": {"fp32": {"state": state}} for name in names}


def records() -> dict[str, Any]:
    kernels = {"a": ["k1", "k2"], "b": ["k3"], "not_run": ["k4"]}
    digests = {name: sha256(f"submissions/level1_40/{name}.py") for name in "ab"}
    return {
        "twins": {"twins": {"zeros": twin("zeros", passes=False), "replay": twin("replay", passes=True)}},
        "sanitizer": {
            "verdict": "clean",
            "planted": {"memcheck": {"found": True}, "racecheck": {"found": True}},
            "files": {
                f"level1_40/{name}.py": {"sha256": digests.get(name, "0" * 64), "kernels": each}
                for name, each in kernels.items()
            },
            "runs": {"none": clean("a", "b"), "memcheck": clean("a", "b"), "racecheck": clean("a", "b")},
        },
        "sweep": {
            "grid": {"rows": [1, 3], "widths": [4, 8], "shapes": 4},
            "candidates": {f"level1_40/{name}.py": {"sha256": digests[name]} for name in "ab"},
            "summary": {
                "pairs": 3,
                "right": 9,
                "refused": 2,
                "declared_failure": 1,
                "wrong": 0,
                "driver_error": 0,
                "other_error": 0,
                "not_run": 0,
                "native_bits": {"compared": 4, "equal": 4},
            },
        },
        "wall_time": {
            "candidate": {"file": "submissions/level1_40/a.py", "sha256": digests["a"]},
            "warm_up": {"kbsub": {}},
            "seconds": {"kbsub": [9.0], "script": [32.0]},
            "median_s": {"kbsub": 9.0, "script": 32.0},
        },
        "cell": {
            "cell": "namespaces",
            "programs": {
                "a": {
                    "sha256": sha256("tests/cell_programs/a.py"),
                    "correct": True,
                    "median_ms": {"inside": 0.29, "outside": 0.288},
                    **{"ratio": 1.007, "low": 1.0, "high": 1.01, "rounds": 8},
                },
                "b": {"sha256": sha256("tests/cell_programs/b.py"), "correct": False},
            },
        },
        "batch": {"what": "Twelve?", "measured": None, "why": "no second GPU", "command": "kbsub eval RUNS --gpus 2"},
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    write(tmp_path, records())
    return tmp_path


def write(root: Path, found: dict[str, Any]) -> None:
    folder = root / "results" / "h200"
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in found.items():
        (folder / f"{name}.json").write_text(json.dumps({"schema": 1, **record}))


def outcomes(root: Path) -> dict[str, str]:
    table = evidence_table(root / "results" / "h200", root)
    return {cells[0].strip("`").removeprefix("results/h200/"): cells[2] for cells in table.rows}


def test_each_record_in_words(root: Path) -> None:
    assert outcomes(root) == {
        "twins.json": "2 of 2 caught by what is named for it; 1 of them pass upstream's check; 2 of 2 labels (passes "
        "upstream or not) hold",
        "sanitizer.json": "clean: 4 of 4 runs, 3 kernels of 2 files under memcheck and racecheck; 2 of 2 planted "
        "faults found",
        "sweep.json": "3 files and dtypes x 4 shapes: 9 right, 2 refused in the file's own words, 1 declared failures, "
        "**0 wrong, 0 errors**; native's own bits at 4 of 4 shapes where they are promised",
        "wall_time.json": "`kbsub` 9.0 s and `script` 32.0 s (one run each, after one uncounted; the script also times "
        "eager and torch.compile)",
        "cell.json": "namespaces: `a` 0.29 ms inside, 0.288 outside: 1.007 (1.000 to 1.010, 8 rounds) and `b` **not "
        "correct 5/5**",
        "batch.json": "**not measured**: no second GPU",
    }
    assert evidence_table(root / "results" / "h200", root).notes == []


def test_what_did_not_hold_is_not_counted(root: Path) -> None:
    found = records()
    found["twins"]["twins"]["replay"] = twin("replay", passes=True, caught=False, holds=False)
    found["sanitizer"] |= {"verdict": "errors", "planted": {"memcheck": {"found": False}}}
    found["sanitizer"]["runs"]["racecheck"] = clean("a", "b", state="errors")
    found["sweep"]["summary"] |= {
        "wrong": 1,
        "driver_error": 2,
        "not_run": 3,
        "native_bits": {"compared": 4, "equal": 3},
    }
    found["batch"]["measured"] = {"one_gpu_s": 100.0, "two_gpus_s": 55.0}
    write(root, found)
    words = outcomes(root)
    assert words["twins.json"].startswith("1 of 2 caught") and "1 of 2 labels" in words["twins.json"]
    assert words["sanitizer.json"].startswith("errors: 2 of 4 runs") and "0 of 1 planted" in words["sanitizer.json"]
    assert "**1 wrong, 5 errors**; native's own bits at 3 of 4 shapes" in words["sweep.json"]
    assert words["batch.json"] == "55 s on two, 100 s on one: 0.55"


# the file that changes (or goes) -> the records that were measured on it
CHANGES = [
    ("tests/twins/zeros.py", ["twins"]),
    ("submissions/level1_40/a.py", ["sanitizer", "sweep", "wall_time"]),
    ("submissions/level1_40/b.py", ["sanitizer", "sweep"]),
    ("tests/cell_programs/a.py", ["cell"]),
]


@pytest.mark.parametrize(("file", "marked"), CHANGES)
@pytest.mark.parametrize("gone", [False, True])
def test_a_record_of_another_version_is_marked(root: Path, file: str, marked: list[str], gone: bool) -> None:
    (root / file).unlink() if gone else (root / file).write_text("# mended\n")
    table = evidence_table(root / "results" / "h200", root)
    assert [cells[0] for cells in table.rows if "†" in cells[0]] == [f"`results/h200/{name}.json`†" for name in marked]
    assert len(table.notes) == len(marked)
    for note, name in zip(table.notes, marked, strict=True):
        assert f"an earlier version of {file} (sha256 {sha256(file)[:8]}…)" in note
        assert f"`kbsub measure {name}" in note and f"--out results/h200/{name}.json` on a GPU" in note


def test_a_record_that_is_not_there_has_no_row(root: Path) -> None:
    (root / "results/h200/batch.json").unlink()
    assert "batch.json" not in outcomes(root)


@pytest.mark.parametrize("name", sorted(records()))
@pytest.mark.parametrize("text", ["", "{}", "null", "[]", '{"runs": {"memcheck": {}}, "files": {}}'])
def test_a_broken_record_is_named(root: Path, name: str, text: str) -> None:
    (root / f"results/h200/{name}.json").write_text(text)
    with pytest.raises(ResultError, match=rf"{name}\.json: is no record of this kind"):
        evidence_table(root / "results" / "h200", root)


def test_a_marker_makes_it(root: Path) -> None:
    write_json_atomic(root / "results/h200/level1_40.json", with_files(content(), root / "submissions/level1_40"))
    (root / "README.md").write_text("<!-- report:evidence -->\n<!-- /report -->\n")
    text = remade(root / "README.md", root)
    assert "| record | question | outcome |\n|---|---|---|\n| `results/h200/twins.json` |" in text


def test_each_command_that_is_named_is_a_program(root: Path) -> None:
    for file, _ in CHANGES:
        (root / file).unlink()
    named = re.findall(r"`kbsub measure (\w+)", "".join(evidence_table(root / "results" / "h200", root).notes))
    assert sorted(named) == ["cell", "sanitizer", "sweep", "twins", "wall_time"] and set(named) <= set(programs())
