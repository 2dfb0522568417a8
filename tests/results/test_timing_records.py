"""Committed result files: every key that `kbsub bench` writes is a field, and reading and writing changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from kbsub.eval.results.model import read_result, write_json_atomic
from kbsub.eval.results.record import Record
from kbsub.eval.results.timing import Timing, timings_by_shape
from kbsub.eval.verdicts.register import KINDS
from support.paths import ROOT

KEYS = {"candidates", "baselines"}
TASKS = sorted(path for path in (ROOT / "results").glob("*/*.json") if KEYS <= set(json.loads(path.read_text())))
VERDICTS = {kind.key for kind in KINDS.values()}


def unlisted(value: Any, where: str = "") -> Iterator[str]:
    """Every key of a record that is no field of it; the verdicts' own keys are fields of registered records."""
    if isinstance(value, BaseModel):
        yield from (f"{where}.{key}" for key in value.model_extra or {} if key not in VERDICTS)
        for key in type(value).model_fields:
            yield from unlisted(getattr(value, key), f"{where}.{key}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from unlisted(item, f"{where}[{key}]")


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.stem)
def test_a_committed_file_is_written_as_it_was_read(path, tmp_path):
    result = read_result(path)
    write_json_atomic(tmp_path / "again.json", result)
    assert json.loads((tmp_path / "again.json").read_text()) == json.loads(path.read_text())
    assert not list(unlisted(result))


def test_there_are_committed_files_with_every_kind_of_timing():
    assert {path.stem for path in TASKS} >= {"level1_40", "local_layernorm_tokens"}
    results = [read_result(path) for path in TASKS]
    rows = [row for result in results for row in (*result.baselines.values(), *result.candidates.values())]
    methods = {method for row in rows for found in timings_by_shape(row).values() for method in found}
    assert methods == {"graph_replay", "cold_replay", "cuda_event", "do_bench", "do_bench_impl", "host_time"}
    assert any(row.earlier for result in results for row in result.baselines.values())
    assert all(result.bench is not None and result.bench.runs for result in results)


def test_a_key_of_somebody_else_is_kept():
    """A newer version may write more: an older one that reads and writes the file loses nothing."""
    block = {"median_ms": 1.0, "seen_by": {"who": 1}}
    assert Timing.model_validate(block).model_dump(mode="json") == block


def test_a_cleared_key_is_absent_and_null_stays_null():
    class Row(Record):
        run: str | None = None
        flags: list[str] | None = None

    row = Row.model_validate({"run": "1", "flags": None})
    row.clear("run")
    assert row.model_dump() == {"flags": None}
