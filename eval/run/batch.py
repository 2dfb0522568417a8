"""A KernelBench run folder judged as a batch: every `level_L_problem_P_sample_S_kernel.py`, resumable at any point.

One row file a sample (`kbsub_rows/...json`), written atomically when the row is finished and keyed by the source's hash
and the protocol, so that an interruption costs the rows in flight and nothing else; and upstream's `eval_results.json`
made anew from the rows after each. Where the rows are run (here, one after another, or on a cluster) is a function that
is passed in. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kbsub.adapters.pin import PIN
from kbsub.adapters.source import SourceError, read_limited
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.blindspots import known as known_blind_spots
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.machine_facts import gpu_index, gpu_uuid
from kbsub.eval.run.stage_values import stage_problem
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.verdicts.register import KINDS, OFFICIAL

SCHEMA = 1
NAME = re.compile(r"level_(\d+)_problem_(\d+)_sample_(\d+)_kernel\.py")
ROWS_FOLDER = "kbsub_rows"
SUMMARY = "eval_results.json"
TARGET = "kbsub.eval.verdicts.official.judge:judge"
_FORM: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("key", "status", "message"), str),
    **dict.fromkeys(("level", "problem_id", "sample_id"), int),
    "protocol": dict,
    "seconds": (int, float),
}


class BatchError(Exception):
    """The batch cannot go on; the message says what is kept and what to do."""


@dataclass(frozen=True)
class Sample:
    """One file of the run folder, as its name says."""

    path: Path
    level: int
    problem_id: int
    sample_id: int

    @property
    def task(self) -> str:
        return f"level{self.level}_{self.problem_id}"

    @property
    def stem(self) -> str:
        return self.path.stem.removesuffix("_kernel")


@dataclass(frozen=True)
class Settings:
    """How each row is judged: the protocol. Two rows of other settings are never taken for each other.

    `kernelbench` is a folder on the machine that judges; where it is not there, that machine's own checkout is used.
    `cell`: a level of kbsub.eval.process.cell, which every machine must have; None: the best that each has.
    """

    precision: str = "fp32"
    device: str = "cuda"
    timeout_s: float = 300.0
    kernelbench: str | None = None
    target: str = TARGET
    cell: str | None = None

    def protocol(self) -> dict[str, Any]:
        """What decides the verdict, for the row's key: not the timeout, nor where the checkout lies, nor the cell."""
        return {"target": self.target, "precision": self.precision, "device": self.device.split(":")[0], "pin": PIN}


@dataclass(frozen=True)
class Job:
    """One sample with its source: everything another process or machine needs."""

    stem: str
    task: str
    level: int
    problem_id: int
    sample_id: int
    source: str
    key: str
    settings: Settings
    problem: str | None = None  # why the source cannot be judged at all


@dataclass
class Batch:
    """A run folder, what is finished there and what is to do."""

    folder: Path
    settings: Settings
    summary: str = SUMMARY
    levels: tuple[int, ...] = ()  # of the samples, judged or not
    finished: dict[str, dict[str, Any]] = field(default_factory=dict)  # sample stem -> row
    jobs: list[Job] = field(default_factory=list)


Run = Callable[[Sequence[Job]], Iterable[tuple[Job, dict[str, Any]]]]


def find_samples(folder: Path) -> list[Sample]:
    """Every sample file of the folder, by level, problem and sample. BatchError when there is none."""
    found = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match and path.is_file():
            found.append(Sample(path, *map(int, match.groups())))
    if not found:
        raise BatchError(f"{folder}: holds no level_L_problem_P_sample_S_kernel.py; write one with: kbsub export")
    return sorted(found, key=lambda s: (s.level, s.problem_id, s.sample_id))


def row_key(source: str, settings: Settings) -> str:
    text = json.dumps([hashlib.sha256(source.encode()).hexdigest(), settings.protocol()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def prepare(folder: Path, settings: Settings) -> Batch:
    """What is there to do: finished rows of these very sources under this very protocol are kept.

    A row that was NOT_RUN (no GPU, no checkout) is tried again; a row file that cannot be read counts as not there.
    """
    samples = find_samples(folder)
    batch = Batch(folder, settings, summary_name(folder), tuple(sorted({sample.level for sample in samples})))
    for sample in samples:
        try:
            source, problem = read_limited(sample.path).decode("utf-8", "replace"), None
        except SourceError as error:
            source, problem = "", str(error)
        job = Job(
            stem=sample.stem,
            task=sample.task,
            level=sample.level,
            problem_id=sample.problem_id,
            sample_id=sample.sample_id,
            source=source,
            key=row_key(source, settings),
            settings=settings,
            problem=problem,
        )
        row = read_row(row_path(folder, job.stem))
        if row is not None and row.get("key") == job.key and row.get("status") != Status.NOT_RUN.value:
            batch.finished[job.stem] = row
        else:
            batch.jobs.append(job)
    return batch


def row_path(folder: Path, stem: str) -> Path:
    return folder / ROWS_FOLDER / f"{stem}.json"


def read_row(path: Path) -> dict[str, Any] | None:
    try:
        row = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) and row.get("schema") == SCHEMA and _is_whole(row) else None


def _is_whole(row: dict[str, Any]) -> bool:
    """Whether all that is read of a finished row has its form: whoever wrote the file, it must not end the batch."""
    said = {name: row[name] for name in ("official", "cpu_check") if row.get(name) is not None}
    return (
        all(isinstance(row.get(name), kind) for name, kind in _FORM.items())
        and row["status"] in {status.value for status in Status}
        and isinstance(row["protocol"].get("device"), str)
        and stage_problem({}, KINDS[OFFICIAL], said) is None
    )


def judge(job: Job, isolate: Callable[..., Outcome] = run_isolated) -> dict[str, Any]:
    """The row of one job, judged here in its own cell. Whatever the candidate does, a row comes back."""
    if job.problem is not None:
        return row_of(job, Outcome(Status.COMPILE_ERROR, None, job.problem, "", 0.0))
    payload = _payload(job)
    problem = _too_large(job, payload["kernelbench"])
    if problem:
        outcome = Outcome(Status.NOT_RUN, None, problem, "", 0.0)
    else:
        cell = replace(cell_of([sha256_of(job)], job.task, payload["kernelbench"]), level=job.settings.cell)
        outcome = isolate(job.settings.target, payload, timeout_s=job.settings.timeout_s, cell=cell)
    # Asked here, in the process whose environment the judge had: a worker of a cluster sees one GPU of several.
    return {**row_of(job, outcome), "gpu_uuid": gpu_uuid(gpu_index(job.settings.device))}


def _too_large(job: Job, kernelbench: str | None) -> str | None:
    """Why this machine cannot hold the job's task; None where it can, or where the judge is to say what is wrong."""
    from kbsub.adapters.task import OFFICIAL_SIZE, TaskError, resolve_task
    from kbsub.eval.run.sizes import sizes_for

    checkout = Path(kernelbench) if kernelbench else None
    try:
        task = resolve_task(job.task, kernelbench=checkout, precision=job.settings.precision)
    except TaskError:
        return None
    return (
        sizes_for(task, job.task, kernelbench, job.settings.device, OFFICIAL_SIZE).of(KINDS[OFFICIAL]).refused or None
    )


def _payload(job: Job) -> dict[str, Any]:
    """The stage contract of kbsub eval; the checkout is this machine's own where the given one is not there."""
    kernelbench = job.settings.kernelbench
    if kernelbench is not None and not Path(kernelbench).is_dir():
        from kbsub.adapters.checkout import CheckoutError, find_checkout

        try:
            kernelbench = str(find_checkout().path)
        except CheckoutError:
            kernelbench = None  # the judge then says NOT_RUN, with the mending command
    return {
        "candidate": f"{job.stem}_kernel.py",
        "candidate_source": job.source,
        "stem": job.stem,
        "task": job.task,
        "precision": job.settings.precision,
        "kernelbench": kernelbench,
        "device": job.settings.device,
        "declaration": {},
        "timeout_s": job.settings.timeout_s,
    }


def row_of(job: Job, outcome: Outcome) -> dict[str, Any]:
    """A finished row: upstream's words under `official`, and how the judge ended."""
    value = dict(outcome.value or {})
    if problem := stage_problem({}, KINDS[OFFICIAL], value):
        value, words = {}, f"the official judge returned a malformed value: {problem}"
        outcome = replace(outcome, status=Status.RUNTIME_ERROR, value=None, message=words)
    verdict = value.get("verdict") or {}
    status = outcome.status.value if outcome.status is not Status.OK else str(verdict.get("status", Status.OK.value))
    return {
        "schema": SCHEMA,
        "key": job.key,
        "protocol": job.settings.protocol(),
        "level": job.level,
        "problem_id": job.problem_id,
        "sample_id": job.sample_id,
        "sha256": sha256_of(job),
        "status": status,
        "message": outcome.message or verdict.get("reason") or "",
        "official": value.get("official"),
        "blind_spots": known_blind_spots(job.task, f"kernelbench@{PIN}", job.settings.precision),
        "cpu_check": value.get("cpu_check"),
        "environment": value.get("environment"),
        "seconds": round(outcome.seconds, 3),
        "confined": outcome.confined,  # null where no line of the candidate ran
    }


def sha256_of(job: Job) -> str:
    return hashlib.sha256(job.source.encode()).hexdigest()


def run_here(jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    """One after another on this machine: timings never share its GPU."""
    for job in jobs:
        yield job, judge(job)


def evaluate(
    batch: Batch, run: Run = run_here, on_row: Callable[[dict[str, Any]], None] = lambda row: None
) -> dict[str, dict[str, Any]]:
    """Run what is to do and keep each row the moment it is finished; returns every row of the folder, by stem.

    Raises BatchError when a row cannot be written (a full disk): the rows before it are kept, whole.
    """
    rows = dict(batch.finished)
    total = len(rows) + len(batch.jobs)
    try:
        if batch.summary != SUMMARY:  # the mark that upstream's own summary is not ours to write, before any row
            write_json_atomic(batch.folder / batch.summary, {})
        write_summary(batch, rows.values())
        for job, row in run(batch.jobs):
            write_json_atomic(row_path(batch.folder, job.stem), row)
            rows[job.stem] = row
            write_summary(batch, rows.values())
            on_row(row)
    except OSError as error:
        raise BatchError(
            f"{batch.folder}: cannot write: {error}. {len(rows)} of {total} rows are finished and kept; free some "
            "space and run the same command again: it goes on after them"
        ) from error
    return rows


def summary_name(folder: Path) -> str:
    """`eval_results.json`, or `kbsub_eval_results.json` where upstream's own script wrote the first."""
    ours = f"kbsub_{SUMMARY}"
    theirs = (folder / SUMMARY).exists() and not (folder / ROWS_FOLDER).is_dir()
    return ours if theirs or (folder / ours).exists() else SUMMARY


def summary_paths(batch: Batch) -> dict[int, Path]:
    """Where each level's summary goes. Upstream's file is keyed by problem alone, so of several levels each has one."""
    path = batch.folder / batch.summary
    if len(batch.levels) == 1:
        return {batch.levels[0]: path}
    return {level: path.with_name(f"{path.stem}_level_{level}.json") for level in batch.levels}


def write_summary(batch: Batch, rows: Iterable[dict[str, Any]]) -> list[Path]:
    """Upstream's `eval_results.json`, every sample, from the rows that upstream judged; nothing else goes in."""
    judged = [row for row in rows if official_entry(row) is not None]
    written = []
    for level, path in summary_paths(batch).items():
        table: dict[str, list[dict[str, Any]]] = {}
        for row in sorted(judged, key=lambda r: (r["problem_id"], r["sample_id"])):
            entry = official_entry(row)
            if row["level"] == level and entry is not None:
                table.setdefault(str(row["problem_id"]), []).append(entry)
        if table:
            write_json_atomic(path, table)
            written.append(path)
    return written


def official_entry(row: dict[str, Any]) -> dict[str, Any] | None:
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
