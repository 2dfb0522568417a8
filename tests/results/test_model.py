"""The result file keeps its keys, refuses what it does not know, and a second run loses nothing of the first."""

from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.results.files import replace_atomic
from kbsub.eval.results.model import (
    SCHEMA,
    Result,
    ResultError,
    jsonable,
    merge,
    read_result,
    row_key,
    update_result,
    write_json_atomic,
)

ENVIRONMENT = {
    "gpu": "NVIDIA H200",
    "driver": "580.95.05",
    "cuda": "13.0",
    "torch": "2.11.0+cu130",
    "cupy": "14.2.0",
    "nvrtc": "13.0",
    "python": "3.12.3",
    "kernelbench_commit": "4" * 40,
    "project_commit": None,
    "date": "2026-11-30T12:00:00+00:00",
    "stand_ins": ["openai"],
}
TASK = {"level": 1, "problem_id": 40, "sha256": "a" * 64, "provenance": "kernelbench@4"}


def row(digest: str = "b", status: str = "OK", **more: Any) -> dict[str, Any]:
    return {"sha256": digest * 64, "contract": "control", "precision": "fp32", "status": status, **more}


def result(candidates: dict[str, Any], environment: dict[str, Any] | None = None, **more: Any) -> Result:
    content = {"schema": SCHEMA, "environment": {**ENVIRONMENT, **(environment or {})}, "task": TASK, **more}
    return Result.model_validate({**content, "candidates": candidates})


def dump(model: Any) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True)


OFFICIAL = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {"hardware": "NVIDIA H200"}}


def test_round_trip_keeps_extra_keys_and_nulls(tmp_path: Path) -> None:
    written = result({"x": row(official=OFFICIAL, mine={"a": None}, reason=None)}, extra={"b": [1, None]})
    write_json_atomic(tmp_path / "r.json", written)
    content = json.loads((tmp_path / "r.json").read_text())
    assert content["candidates"]["x"]["mine"] == {"a": None}
    assert content["candidates"]["x"]["reason"] is None
    assert "stress" not in content["candidates"]["x"], "a key without a value is absent, not null"
    assert content["environment"]["project_commit"] is None
    assert read_result(tmp_path / "r.json") == written


def test_listed_keys_survive_in_place(tmp_path: Path) -> None:
    """A table filled after the model was made is written, too (a default that is changed in place counts as set)."""
    made = result({})
    made.candidates["late"] = result({"late": row()}).candidates["late"]
    write_json_atomic(tmp_path / "r.json", made)
    assert list(read_result(tmp_path / "r.json").candidates) == ["late"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "schema None"),
        ('{"schema": 2}', "schema 2, this version reads schema 1"),
        ('{"schema": 1, "task": {}}', "environment"),
    ],
)
def test_reader_refuses(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(ResultError, match=words):
        read_result(tmp_path / "r.json")


def test_non_finite_floats_are_words_and_come_back(tmp_path: Path) -> None:
    timing = {"cuda_event": {"mean_ms": math.nan, "std_ms": math.inf, "min_ms": -math.inf}}
    write_json_atomic(tmp_path / "r.json", result({"x": row(timing=timing, more={"a": [math.nan]})}))
    json.loads((tmp_path / "r.json").read_text(), parse_constant=lambda word: pytest.fail(f"bare {word} in the JSON"))
    assert json.loads((tmp_path / "r.json").read_text())["candidates"]["x"]["more"] == {"a": ["NaN"]}
    block = read_result(tmp_path / "r.json").candidates["x"].timing["cuda_event"]  # type: ignore[index]
    assert block.mean_ms is not None and math.isnan(block.mean_ms)
    assert block.std_ms == math.inf and block.min_ms == -math.inf


def test_a_draft_is_not_taken_for_a_result(tmp_path: Path) -> None:
    """A reader that lists *.json while a result is being written finds finished files only."""
    seen: list[list[str]] = []

    def write(draft: Path) -> None:
        draft.write_text("{")
        seen.append(sorted(path.name for path in tmp_path.glob("*.json")))

    (tmp_path / "old.json").write_text("{}")
    replace_atomic(tmp_path / "new.json", write)
    assert seen == [["old.json"]] and (tmp_path / "new.json").read_text() == "{"


def test_failed_write_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_json_atomic(path, {"old": 1})
    with pytest.raises(TypeError):
        write_json_atomic(path, {"new": object()})
    assert json.loads(path.read_text()) == {"old": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]


def test_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match="MAYBE"):
        result({"x": row(status="MAYBE")})


def test_merge_keeps_rows_and_unmeasured_keys() -> None:
    old = result(
        {
            "x": row(official=OFFICIAL, stress={"passed": 1, "failed": 0, "refused": 0, "skipped": 0, "cases": []}),
            "y": row("c"),
        }
    )
    new = result({"x": row(official={**OFFICIAL, "trials": "(4 / 5)"})}, {"date": "2026-12-01T00:00:00+00:00"})
    merged = dump(merge(old, new))
    assert merged["candidates"]["x"]["official"]["trials"] == "(4 / 5)"
    assert merged["candidates"]["x"]["stress"]["passed"] == 1
    assert merged["candidates"]["y"] == dump(old)["candidates"]["y"], "another date alone is the same environment"


def test_merge_joins_timing_methods() -> None:
    old = result({"x": row(timing={"graph_replay": {"median_ms": 1.0}})})
    new = result({"x": row(timing={"cuda_event": {"mean_ms": 2.0}})})
    assert set(dump(merge(old, new))["candidates"]["x"]["timing"]) == {"graph_replay", "cuda_event"}


def test_merge_replaces_the_row_of_a_changed_file() -> None:
    merged = dump(merge(result({"x": row("b", official=OFFICIAL)}), result({"x": row("d")})))
    assert "official" not in merged["candidates"]["x"], "a verdict on other source text is not this file's"


def test_stage_not_asked_for_keeps_the_old_status() -> None:
    old = result({"x": row(status="INCORRECT_NUMERICAL", official={**OFFICIAL, "correctness": False}, reason="off")})
    new = result(
        {
            "x": row(
                status="NOT_RUN", reason="the official stage was not asked for", guards={"clean": True, "findings": []}
            )
        }
    )
    merged = dump(merge(old, new))["candidates"]["x"]
    assert (merged["status"], merged["reason"], merged["guards"]["clean"]) == ("INCORRECT_NUMERICAL", "off", True)


def test_failed_official_stage_drops_the_old_verdict() -> None:
    old = result({"x": row(official=OFFICIAL)})
    merged = dump(merge(old, result({"x": row(status="TIMEOUT", official=None)})))["candidates"]["x"]
    assert (merged["status"], merged["official"]) == ("TIMEOUT", None)


def test_rows_of_another_environment_carry_it() -> None:
    merged = dump(merge(result({"x": row(), "y": row()}), result({"y": row()}, {"torch": "2.12.0"})))
    assert merged["environment"]["torch"] == "2.12.0"
    assert merged["candidates"]["x"]["environment"]["torch"] == "2.11.0+cu130"
    assert "environment" not in merged["candidates"]["y"]


def test_stand_ins_of_both_runs_are_kept() -> None:
    merged = merge(result({"x": row()}), result({"y": row()}, {"stand_ins": ["dotenv"]}))
    assert merged.environment.stand_ins == ["dotenv", "openai"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"environment": {**ENVIRONMENT, "gpu": "NVIDIA L4"}}, "NVIDIA L4"),
        ({"task": {**TASK, "sha256": "f" * 64}}, "task"),
    ],
)
def test_merge_refuses_another_gpu_or_task(change: dict[str, Any], words: str) -> None:
    other = Result.model_validate({**dump(result({})), **change})
    with pytest.raises(ResultError, match=words):
        merge(result({"x": row()}), other)


def _add_row(path: Path, name: str) -> None:
    update_result(path, result({name: row()}))


def test_concurrent_updates_lose_no_row(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_add_row, args=(path, f"row{number}")) for number in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(read_result(path).candidates) == [f"row{number}" for number in range(8)]


def test_update_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="kbsub eval"):
        update_result(tmp_path / "absent.json")


def test_row_key_and_jsonable() -> None:
    assert (row_key("x", "fp32"), row_key("x", "bf16")) == ("x", "x@bf16")
    assert jsonable({1: (float("nan"), 2.5)}) == {"1": ["NaN", 2.5]}
