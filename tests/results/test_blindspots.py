"""What a record of blind spots says: severities, worst first, and the words for the row of a verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kbsub.eval.report.blindspot_tables import blindspots_table, counts_table, reason
from kbsub.eval.report.papers import Request, section
from kbsub.eval.results.blindspots import (
    FOLDER,
    MEANING,
    SEVERITIES,
    BlindSpots,
    file_name,
    in_words,
    known,
    read_blindspots,
    write_blindspots,
)
from kbsub.eval.results.model import ResultError
from support.paths import ROOT


def row(name: str, blind: str, passed: bool | None, share: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"name": name, "blind": blind, "words": name, "share": share, "trials": 5, "passed": passed, **more}


def record(*rows: dict[str, Any], **more: Any) -> BlindSpots:
    head = {"task": "level1_37", "name": "37_FrobeniusNorm_.py", "sha256": "s", "provenance": "kernelbench@pin"}
    rest = {"precision": "fp32", "tolerance": 1e-4, "size": "official", "seeds": [1], "another_seed": 2}
    return BlindSpots.model_validate({**head, **rest, "variants": list(rows), **more})


AGAIN, TRUTH = row("reference again", "unstable", True, 0.0), row("truth: float64", "hostile", True, 0.01)


@pytest.mark.parametrize(
    ("rows", "severities", "words"),
    [
        ([AGAIN, TRUTH, row("ones", "vacuous", False)], ["sound"], "none of 1 wrong variants passes"),
        (
            [AGAIN, TRUTH, row("bf16", "precision", True), row("zeros", "vacuous", True)],
            ["vacuous", "precision"],
            "this task also accepts zeros, bf16",
        ),
        (
            [AGAIN, row("truth: float64", "hostile", False, 31.6)],
            ["hostile"],
            "the truth in float64 fails (31.6 tolerances)",
        ),
        (
            [row("reference again", "unstable", False), row("truth: float64", "hostile", False)],
            ["unstable"],
            "its reference fails against itself",
        ),
        ([AGAIN, row("zeros", "vacuous", None)], ["undecided"], "none of 1 wrong variants passes"),
        (
            [row(name, "data", True) for name in ("a", "b", "c", "d")],
            ["data"],
            "this task also accepts a, b, c and 1 more",
        ),
        ([], [], ""),
    ],
)
def test_severities_and_words(rows, severities, words):
    found = record(*rows)
    assert found.severities() == severities
    assert in_words(found) == words


@pytest.mark.parametrize("why", ["time limit", "out of memory"])
def test_what_was_cut_short_is_not_sound(why):
    tried = row("ones", "vacuous", False)
    assert record(AGAIN, TRUTH, tried, not_tried=[{"name": "zeros", "why": why}]).severities() == ["undecided"]
    refused = [{"name": "rows", "why": "the output has one row"}]
    assert record(AGAIN, TRUTH, tried, not_tried=refused).severities() == ["sound"]


def test_another_size_is_said():
    assert in_words(record(row("zeros", "vacuous", True), size="small")).endswith(" (at the small size)")


def test_every_severity_is_explained():
    assert set(MEANING) == set(SEVERITIES)


def test_known_is_of_this_very_task_and_precision(tmp_path):
    folder = tmp_path / "h200" / FOLDER
    folder.mkdir(parents=True)
    text = record(row("zeros", "vacuous", True)).model_dump_json()
    (folder / "level1_37.json").write_text(text, "utf-8")
    folders = [tmp_path / "other", tmp_path / "h200"]
    assert known("level1_37", "kernelbench@pin", folders=folders) == "this task also accepts zeros"
    assert known("level1_37", "kernelbench@pin", "bf16", folders=folders) is None
    assert known("level1_37", "local", folders=folders) is None
    half = record(row("ones", "vacuous", True), precision="bf16")
    write_blindspots(folder / "level1_37@bf16.json", half)
    assert known("level1_37", "kernelbench@pin", "bf16", folders=folders) == "this task also accepts ones"
    assert known("level1_38", "kernelbench@pin", folders=folders) is None
    (folder / "level1_37.json").write_text("{}", "utf-8")
    assert known("level1_37", "kernelbench@pin", folders=folders) is None
    with pytest.raises(ResultError, match=r"level1_37\.json: no record of blind spots"):
        read_blindspots(folder / "level1_37.json")


@pytest.mark.parametrize(
    "rows", [[], [AGAIN, row("zeros", "vacuous", True), row("ones", "vacuous", False, float("inf"))]]
)
def test_what_is_written_is_read(tmp_path, rows):
    path = tmp_path / "level1_37.json"
    found = record(*rows, not_tried=[{"name": "x", "why": "y"}] if rows else [])
    write_blindspots(path, found)
    again = read_blindspots(path)
    assert again.severities() == found.severities()
    assert [(each.name, each.share) for each in again.variants] == [(each.name, each.share) for each in found.variants]
    assert len(path.read_text("utf-8").splitlines()) < 30


def test_tables():
    sound = record(AGAIN, TRUTH, row("ones", "vacuous", False, 3.0), task="level2_3", name="3_Sum_.py")
    blind = record(
        row("zeros", "vacuous", True, 0.434), not_tried=[{"name": "x", "why": "axis 0 is too short for 1/4"}]
    )
    hostile = record(row("truth: float64", "hostile", False, 31.6, failing=[7, 1024], failed_at=1), task="level2_14")
    failed = record(task="level3_48", error="ModuleNotFoundError: No module named 'einops'")
    table = blindspots_table([blind, sound, hostile, failed])
    assert table.rows[0] == ["L1/37 FrobeniusNorm", "vacuous", "zeros (0.43)", "-", "1 (0 fail, 1 not)"]
    assert table.rows[2][3] == "truth: float64 (32 tolerances, 7 of 1024 elements, trial 1)"
    assert table.rows[3][1:3] == ["not tried", "ModuleNotFoundError: No module named 'einops'"]
    assert any("1 parts of an axis that is too short" in note for note in table.notes)
    counts = {cells[0]: cells[2:] for cells in counts_table([blind, sound, hostile, failed]).rows}
    assert counts["vacuous"] == ["1", "0", "0"]
    assert counts["sound"] == ["0", "1", "0"]
    assert counts["not tried"] == ["0", "0", "1"]
    assert counts_table([sound]).notes == ["Sound, every wrong variant fails (1): L2/3 Sum."]


def test_reasons_are_counted_without_their_numbers():
    assert reason("20 of 33 calls are tried") == reason("16 of 20 parameters are tried")


def test_a_paper_shows_the_table(tmp_path):
    folder = tmp_path / "results" / "h200" / FOLDER
    folder.mkdir(parents=True)
    request = Request(tmp_path / "a.md", tmp_path, "blindspots", {})
    assert "No blind spots on h200 are committed yet" in section(request)
    content = json.loads(record(row("zeros", "vacuous", True)).model_dump_json())
    (folder / "level1_37.json").write_text(json.dumps(content), "utf-8")
    assert "| L1/37 FrobeniusNorm | vacuous | zeros (0.5) |" in section(request)
    assert "| vacuous |" in section(Request(tmp_path / "a.md", tmp_path, "blindspots-counts", {}))


def test_committed_records_are_records_of_their_task():
    for path in sorted((ROOT / "results").glob(f"*/{FOLDER}/*.json")):
        found = read_blindspots(path)
        assert path.name == file_name(found.task, found.precision)
        assert found.variants or found.error, path
