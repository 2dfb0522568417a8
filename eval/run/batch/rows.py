"""The row files of a batch: their form, what they hold against a candidate, and upstream's summary made of them.

Whoever wrote a row file, it must not end the batch: one that is no row counts as not there. Runs nothing, no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kbsub.eval.process.isolated import Status
from kbsub.eval.results.model import StageEnd, write_json_atomic
from kbsub.eval.run.batch.samples import ROWS_FOLDER
from kbsub.eval.run.stage_values import stage_problem
from kbsub.eval.verdicts.kind import VerdictKind
from kbsub.eval.verdicts.register import KINDS, NOT_FAILED, OFFICIAL

SCHEMA = 2
SUMMARY = "eval_results.json"
ROW_LIMIT = 64 << 20  # bytes; a larger file is no row of ours
_FORM: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("status", "message", "sha256", "run", "precision"), str),
    **dict.fromkeys(("level", "problem_id", "sample_id"), int),
    **dict.fromkeys(("protocol", "stages"), dict),
    "seconds": (int, float),
}


def row_path(folder: Path, stem: str) -> Path:
    return folder / ROWS_FOLDER / f"{stem}.json"


def read_row(path: Path) -> dict[str, Any] | None:
    """The row in the file; None where there is none."""
    try:
        if not path.is_file() or path.stat().st_size > ROW_LIMIT:
            return None
        row = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and row.get("schema") == SCHEMA and _is_whole(row) else None


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether all that is read of a finished row has its form."""
    if not all(isinstance(row.get(name), kind) for name, kind in _FORM.items()):
        return False
    if row["status"] not in {status.value for status in Status} or not isinstance(row["protocol"].get("device"), str):
        return False
    said = {name: row[name] for name in ("official", "cpu_check", "timing", "reference") if row.get(name) is not None}
    fields = {"sha256": row["sha256"], "contract": None, "precision": row["precision"], "status": row["status"]}
    try:
        for end in row["stages"].values():
            StageEnd.model_validate(end)
    except ValidationError:
        return False
    others = ((kind, row[kind.key]) for kind in named(row) if kind.name != OFFICIAL)
    return stage_problem({}, KINDS[OFFICIAL], said) is None and all(
        isinstance(found, dict) and stage_problem(fields, kind, found) is None for kind, found in others
    )


def named(row: Mapping[str, Any]) -> Iterator[VerdictKind]:
    """The kinds of which a row holds a record."""
    return (kind for kind in KINDS.values() if row.get(kind.key) is not None)


def problems_of(row: Mapping[str, Any]) -> list[str]:
    """What is held against a row, one sentence each: stages that ended badly, failed cases, findings."""
    found = []
    for name, end in row["stages"].items():
        if Status(end["status"]) not in NOT_FAILED:
            found.append(f"{name}: {end['status']} {end.get('message') or ''}".rstrip())
    for kind in named(row):
        if kind.name != OFFICIAL:
            found += [f"{kind.name}: {words}" for words in kind.problems(kind.record.model_validate(row[kind.key]))]
    return found


def summary_name(folder: Path) -> str:
    """`eval_results.json`, or `kbsub_eval_results.json` where upstream's own script wrote the first."""
    ours = f"kbsub_{SUMMARY}"
    theirs = (folder / SUMMARY).exists() and not (folder / ROWS_FOLDER).is_dir()
    return ours if theirs or (folder / ours).exists() else SUMMARY


def summary_paths(folder: Path, name: str, groups: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Path]:
    """Where the summary of each (run, level) goes: into the run's own folder, and of several levels each its own.

    Upstream's file is keyed by problem alone.
    """
    paths, groups = {}, sorted(set(groups))
    for run, level in groups:
        path = folder / run / name
        alone = sum(other == run for other, _ in groups) == 1
        paths[run, level] = path if alone else path.with_name(f"{path.stem}_level_{level}.json")
    return paths


def write_summary(paths: Mapping[tuple[str, int], Path], rows: Iterable[dict[str, Any]]) -> list[Path]:
    """Upstream's `eval_results.json`, every sample, from the rows that upstream judged; nothing else goes in."""
    tables: dict[Path, dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        entry = official_entry(row)
        path = paths.get((row["run"], row["level"]))
        if entry is not None and path is not None:
            tables.setdefault(path, {}).setdefault(row["problem_id"], []).append(entry)
    for path, table in tables.items():
        ordered = {
            str(problem): sorted(table[problem], key=lambda each: int(each["sample_id"])) for problem in sorted(table)
        }
        write_json_atomic(path, ordered)
    return list(tables)


def official_entry(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """One entry of upstream's summary; None for a row that says nothing official (NOT_RUN, a local CPU check).

    A row whose judge timed out, crashed or came back without an object reads as upstream's script writes it: not
    compiled, not correct, the reason under metadata.error.
    """
    if row["status"] == Status.NOT_RUN.value or row.get("cpu_check") is not None:
        return None
    official = row.get("official")
    if official is None and row["protocol"]["device"] == "cpu":  # a failure, too, is upstream's to say
        return None
    if official is None or official.get("compiled") is None:
        metadata = {"error": f"{row['status']}: {row['message']}"}
        empty = {"compiled": False, "correctness": False, "metadata": metadata, "runtime": -1.0, "runtime_stats": {}}
        return {"sample_id": row["sample_id"], **empty}
    return {
        "sample_id": row["sample_id"],
        "compiled": official["compiled"],
        "correctness": official["correctness"],
        "metadata": official["metadata"],
        "runtime": official.get("runtime", -1.0),
        "runtime_stats": official.get("runtime_stats", {}),
    }
