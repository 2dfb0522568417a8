"""Joins what a benchmark run found out into a result file. Knows the keys of docs/result.schema.json; imports no torch.

`bench.runs.<run>` keeps what belongs to the run as a whole: protocol, environment, and for each scene the order of
every round, the bytes it moves and the quality of the machine. Each timing names its run, because only samples of one
run are paired; `baselines.<name>.earlier.<run>.<scene>` keeps the baseline of an older run while a candidate's timings
are of that run. Nothing here touches a row's `status` or `official`: they are upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kbsub.adapters.environment import project_commit
from kbsub.adapters.task import Task
from kbsub.eval.bench.baselines import BASELINES
from kbsub.eval.bench.floors import memory_floor_ms
from kbsub.eval.bench.parent import BenchRecord
from kbsub.eval.bench.plan import SceneSpec
from kbsub.eval.process.isolated import Status
from kbsub.eval.results.model import Baseline, Candidate, Result, TaskFacts, row_key, update_result
from kbsub.eval.results.record import Environment
from kbsub.eval.results.timing import (
    OFFICIAL,
    BenchOutcome,
    BenchRun,
    BenchRuns,
    EqualOutputs,
    Floors,
    ProtocolRecord,
    SceneRecord,
    ShapeRow,
    Timing,
    timings_by_shape,
)


def store(path: Path, record: BenchRecord, task: Task) -> Result | None:
    """Join the record into the result file at `path`; None when the child never said where it runs.

    Raises ResultError when the file is about another task or GPU, or cannot be written (the old file is then still
    whole).
    """
    if record.environment is None:
        return None
    environment = Environment.model_validate({**record.environment, "project_commit": project_commit()})
    facts = TaskFacts(level=task.level, problem_id=task.problem_id, sha256=task.sha256, provenance=task.provenance)
    new = Result(environment=environment, task=facts, floors=_floors(record))
    return update_result(path, new, lambda result: _join(result, record))


def _floors(record: BenchRecord) -> Floors:
    """The floors of the task's own shape at fp32; other scenes keep theirs in bench.runs.

    Nothing from a run without that shape: copy, chain and bytes of the file are of one run.
    """
    official = record.scenes.get(f"{OFFICIAL}@fp32")
    floors: dict[str, Any] = dict(record.floors) if official is not None else {}
    if official is not None and "copy_gb_s" in floors:
        floors["bytes"] = official["bytes"]
        floors["memory_ms"] = memory_floor_ms(official["bytes"], floors["copy_gb_s"])
        twice = official["bytes"] + official["input_bytes"]
        floors["memory_two_reads_ms"] = memory_floor_ms(twice, floors["copy_gb_s"])
    return Floors.model_validate(floors)


def _join(result: Result, record: BenchRecord) -> None:
    before = {key: baseline.model_copy(deep=True) for key, baseline in result.baselines.items()}
    for scene in record.plan.scenes:
        for name, row in record.rows(scene).items():
            if row.get("missing"):
                continue  # nothing was found out about it yet: what is stored stays as it is
            if name in BASELINES:
                _join_baseline(result, scene, name, row, record.run)
            else:
                _join_candidate(result, record, scene, name, row)
    keep_pairs(result, before)
    bench = result.bench or BenchRuns()
    runs = {**bench.runs, record.run: _run_block(record, result.environment)}
    used = _runs_in_use(result) | {record.run}
    result.bench = bench.model_copy(update={"runs": {run: block for run, block in runs.items() if run in used}})


def _run_block(record: BenchRecord, environment: Environment) -> BenchRun:
    scenes = {}
    for key, event in record.scenes.items():
        kept = ("bytes", "input_bytes", "series", "quality", "upstream_methods")
        scene = {name: event[name] for name in kept}
        if "copy_gb_s" in record.floors:
            scene["memory_floor_ms"] = memory_floor_ms(event["bytes"], record.floors["copy_gb_s"])
        scenes[key] = SceneRecord.model_validate(scene)
    return BenchRun(
        protocol=ProtocolRecord(**asdict(record.plan.protocol)),
        methods=record.plan.methods,
        environment=environment.model_copy(deep=True),
        floors=Floors.model_validate(record.floors),
        scenes=scenes,
        skipped=record.skipped,
        notes=record.notes,
        **({"confined": record.confined} if record.confined else {}),
    )


def _timings(row: Mapping[str, Any], run: str) -> dict[str, Timing]:
    return {method: Timing.model_validate({**stats, "run": run}) for method, stats in row.get("timing", {}).items()}


def _outcome(row: Mapping[str, Any], notes: list[str], run: str) -> BenchOutcome:
    """How timing ended: never merged into the row's own status."""
    outcome: dict[str, Any] = {"status": row["status"], "run": run}
    for key in ("reason", "verified"):
        if row.get(key):
            outcome[key] = row[key]
    if notes:
        outcome["notes"] = notes
    return BenchOutcome.model_validate(outcome)


def _join_baseline(result: Result, scene: SceneSpec, name: str, row: Mapping[str, Any], run: str) -> None:
    key = row_key(name, scene.precision)
    baseline = result.baselines.get(key) or Baseline()
    if scene.key == OFFICIAL:
        baseline.timing = _replaced(baseline.timing, row, run)
        baseline.bench = _outcome(row, [], run)
    else:
        baseline.shapes = _with_shape(baseline.shapes, scene, row, run, [])
    result.baselines = {**result.baselines, key: baseline}


def _join_candidate(result: Result, record: BenchRecord, scene: SceneSpec, name: str, row: Mapping[str, Any]) -> None:
    key = row_key(name, scene.precision)
    file = record.plan.candidates[name]
    candidate = result.candidates.get(key)
    if candidate is not None and candidate.sha256 != file.sha256:
        if row["status"] == Status.NOT_RUN.value:
            return  # nothing was measured of the new file: its old row, with the old hash, stays what it is
        candidate = None
    if candidate is None:
        if row["status"] == Status.NOT_RUN.value:
            return
        reason = "no official verdict yet"
        candidate = Candidate(
            sha256=file.sha256, contract=file.contract, precision=scene.precision, status=Status.NOT_RUN, reason=reason
        )
    notes = scene.notes.get(name, [])
    if scene.key == OFFICIAL:
        candidate.timing = _replaced(candidate.timing or {}, row, record.run) or None
        candidate.bench = _outcome(row, notes, record.run)
    else:
        candidate.shapes = _with_shape(candidate.shapes, scene, row, record.run, notes)
    result.candidates = {**result.candidates, key: candidate}


def _replaced(old: Mapping[str, Timing], row: Mapping[str, Any], run: str) -> dict[str, Timing]:
    """Old timings with this run's put in. A program that failed loses the old ones: they no longer stand."""
    if row["status"] in (Status.OK.value, Status.NOT_RUN.value):
        return {**old, **_timings(row, run)}
    return {}


def _with_shape(
    shapes: Mapping[str, ShapeRow] | None, scene: SceneSpec, row: Mapping[str, Any], run: str, notes: list[str]
) -> dict[str, ShapeRow]:
    """The shapes table with this scene's entry; what others stored in the entry stays."""
    entry = (shapes or {})[scene.key].model_copy() if scene.key in (shapes or {}) else ShapeRow()
    if row["status"] != Status.NOT_RUN.value or entry.status is None:
        entry.status = Status(row["status"])
        entry.clear("reason")
        if row.get("reason"):
            entry.reason = row["reason"]
    entry.timing = _replaced(entry.timing or {}, row, run)
    verified = row.get("verified")
    if verified and entry.bit_identity is None:
        entry.bit_identity = EqualOutputs(identical=verified["bit_identical"], total=verified["outputs"], by="bench")
    entry.bench = _outcome(row, notes, run)
    return {**(shapes or {}), scene.key: entry}


def keep_pairs(result: Result, before: Mapping[str, Baseline]) -> None:
    """Keep the baselines' replaced timings that stored candidates were timed beside, under `earlier.<run>.<shape>`.

    Only samples of one run are paired: without them, timing one candidate again would leave every other one without
    the eager that it ran with. `before`: the baselines as they were.
    """
    for key, old in before.items():
        precision = key.partition("@")[2] or "fp32"
        wanted = {
            (run, scene, method)
            for row in result.candidates.values()
            if row.precision == precision
            for run, scene, method, _ in _timings_of(row)
        }
        wanted -= {(run, scene, method) for run, scene, method, _ in _timings_of(result.baselines[key])}
        kept: dict[str, dict[str, dict[str, Timing]]] = {}
        for run, scene, method, timing in [*_earlier(old), *_timings_of(old)]:
            if (run, scene, method) in wanted:
                kept.setdefault(run, {}).setdefault(scene, {})[method] = timing
        if kept:
            result.baselines[key].earlier = kept
        else:
            result.baselines[key].clear("earlier")


def _timings_of(row: Baseline | Candidate) -> Iterator[tuple[str, str, str, Timing]]:
    """(run, shape, method, timing) of every timing of a row that names its run."""
    for shape, timings in timings_by_shape(row).items():
        for method, timing in timings.items():
            if timing.run is not None:
                yield timing.run, shape, method, timing


def _earlier(row: Baseline) -> Iterator[tuple[str, str, str, Timing]]:
    """The same of what a baseline keeps of older runs."""
    for run, shapes in (row.earlier or {}).items():
        for shape, timings in shapes.items():
            for method, timing in timings.items():
                yield run, shape, method, timing


def _runs_in_use(result: Result) -> set[str]:
    """The runs that some timing still refers to."""
    rows: list[Baseline | Candidate] = [*result.baselines.values(), *result.candidates.values()]
    return {run for row in rows for run, *_ in _timings_of(row)}
