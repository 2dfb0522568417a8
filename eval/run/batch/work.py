"""A batch, resumable at any point: what is finished, what is to do, and each row kept the moment it is there.

One row file a sample (`kbsub_rows/...json`), written atomically and with a key for each of its verdicts, so that an
interruption costs the rows in flight and nothing else; and upstream's `eval_results.json` made anew from the rows.
Where the rows are run (here, one after another, or on a cluster) is a function that is passed in. No torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import one_line
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.batch.job import Job, Machine, Settings, stands
from kbsub.eval.run.batch.rows import SUMMARY, read_row, row_path, summary_name, summary_paths, write_summary
from kbsub.eval.run.batch.samples import BatchError, Found, Sample, find_samples

LOCK = "kbsub_batch.lock"
HOLDER = "kbsub_batch.holder.json"  # who holds it, for the words of a refusal
# The summary is written again when this many times its own last cost has gone by: it must not cost a large batch
# more than a twentieth of its time.
SUMMARY_SHARE = 20.0


@dataclass(frozen=True)
class Todo:
    """A sample that is not finished, and the stages that it lacks. Its source is read when its turn comes."""

    sample: Sample
    stages: tuple[str, ...]

    @property
    def stem(self) -> str:
        return self.sample.stem


@dataclass
class Batch:
    """A folder of rows, what is finished there and what is to do. unwritable: stem -> why its row cannot be kept."""

    folder: Path
    settings: Settings
    summary: str = SUMMARY
    found: Found = field(default_factory=Found)
    finished: list[str] = field(default_factory=list)
    jobs: list[Todo] = field(default_factory=list)
    unwritable: dict[str, str] = field(default_factory=dict)
    waited_s: float = 0.0  # in which no row could be judged because its build was not done
    built: int = 0

    def job(self, todo: Todo) -> Job:
        """The job of one sample, with its text as it is now."""
        sample = todo.sample
        source, problem = sample.read()
        digest = hashlib.sha256(source.encode()).hexdigest()
        row = read_row(row_path(self.folder, sample.stem)) or {}
        stages = todo.stages
        if row and row["sha256"] != digest:
            row, stages = {}, self.settings.stages
        return Job(
            stem=sample.stem,
            task=sample.task,
            level=sample.level,
            problem_id=sample.problem_id,
            sample_id=sample.sample_id,
            source=source,
            settings=self.settings,
            stages=stages,
            problem=problem,
            run=sample.run,
            row=row,
        )

    def paths(self) -> dict[tuple[str, int], Path]:
        return summary_paths(self.folder, self.summary, ((each.run, each.level) for each in self.found.samples))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row of the batch that is there, one at a time."""
        for sample in self.found.samples:
            if (row := read_row(row_path(self.folder, sample.stem))) is not None:
                yield row


class Rows(Mapping[str, dict[str, Any]]):
    """The rows of a batch by stem, read when they are asked for: ten thousand need not be in memory."""

    def __init__(self, batch: Batch, stems: Iterable[str]) -> None:
        self._folder, self._stems = batch.folder, dict.fromkeys(stems)

    def __getitem__(self, stem: str) -> dict[str, Any]:
        row = read_row(row_path(self._folder, stem)) if stem in self._stems else None
        if row is None:
            raise KeyError(stem)
        return row

    def __iter__(self) -> Iterator[str]:
        return iter(self._stems)

    def __len__(self) -> int:
        return len(self._stems)


class Run(Protocol):
    """Where rows are judged: hands the jobs out as it likes, and each back with its row."""

    def __call__(self, batch: Batch) -> Iterable[tuple[Job, dict[str, Any]]]: ...


def prepare(
    folder: Path,
    settings: Settings,
    *,
    found: Found | None = None,
    retry: Collection[str] = (),
    machines: frozenset[Machine] = frozenset(),
) -> Batch:
    """What is there to do: finished verdicts of these very sources under this very protocol are kept.

    folder: where the rows lie. found: the samples, by default those of the folder. retry: statuses of which a row or
    stage is judged again. machines: what a verdict must have been given on (kbsub.eval.run.batch.job.stands).
    """
    batch = Batch(folder, settings, summary_name(folder), found or find_samples(folder))
    for sample in batch.found.samples:
        path = row_path(folder, sample.stem)
        row = read_row(path)
        if row is None and path.exists() and not path.is_file():
            batch.unwritable[sample.stem] = f"{path}: is no regular file, and is not replaced; move it away"
            continue
        missing = settings.stages
        if row is not None:
            source, _ = sample.read()
            digest = hashlib.sha256(source.encode()).hexdigest()
            missing = tuple(
                stage
                for stage in settings.stages
                if not stands(row, stage, digest, settings, machines) or row["stages"][stage]["status"] in retry
            )
        if missing:
            batch.jobs.append(Todo(sample, missing))
        else:
            batch.finished.append(sample.stem)
    return batch


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Nobody else judges this folder meanwhile. BatchError where somebody does: two would do all the work twice.

    The lock is the system's: it ends with the process that holds it, however that ends. The holder's name beside it
    is for people, and is believed only while the lock is held.
    """
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise BatchError(
            f"{folder}: another kbsub eval is at work on it{_holder(folder)}; its rows are kept as they come. Wait for "
            "it, or end it (Ctrl-C, or kill) and run this command again: it goes on after the finished rows"
        ) from None
    try:
        holder = {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        with contextlib.suppress(OSError):  # it is words for others; a full disk is said when a row is written
            write_json_atomic(folder / HOLDER, holder)
        yield
    finally:
        with contextlib.suppress(OSError):
            (folder / HOLDER).unlink()
        lock.release()


def _holder(folder: Path) -> str:
    """ " (process 7 on host, since ...)" of whoever holds the folder; "" where it does not say."""
    try:
        said = json.loads((folder / HOLDER).read_text("utf-8")[:1000])
        words = f"(process {said['process']} on {said['host']}, since {said['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f" {one_line(words)}"


def evaluate(
    batch: Batch, run: Run, on_row: Callable[[str, dict[str, Any]], None] = lambda stem, row: None
) -> Mapping[str, dict[str, Any]]:
    """Run what is to do and keep each row the moment it is finished; returns every row of the folder, by stem.

    Raises BatchError when a row cannot be written (a full disk): the rows before it are kept, whole.
    """
    stems = dict.fromkeys(batch.finished)
    total = len(batch.finished) + len(batch.jobs)
    summary = _Summary(batch)
    try:
        if batch.summary != SUMMARY:  # the mark that upstream's own summary is not ours to write, before any row
            write_json_atomic(batch.folder / batch.summary, {})
        if batch.finished:
            summary.write()
        try:
            for job, row in run(batch):
                write_json_atomic(row_path(batch.folder, job.stem), row)
                stems[job.stem] = None
                summary.write_in_time()
                on_row(job.stem, row)
        finally:
            summary.write()
    except OSError as error:
        raise BatchError(
            f"{batch.folder}: cannot write: {error}. {len(stems)} of {total} rows are finished and kept; free some "
            "space and run the same command again: it goes on after them"
        ) from error
    return Rows(batch, stems)


class _Summary:
    """Upstream's summary, remade as often as its cost allows."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.cost, self.last = batch, 0.0, 0.0

    def write(self) -> None:
        began = time.monotonic()
        write_summary(self.batch.paths(), self.batch.rows())
        self.last = time.monotonic()
        self.cost = self.last - began

    def write_in_time(self) -> None:
        if time.monotonic() - self.last >= SUMMARY_SHARE * self.cost:
            self.write()


def retried(text: str) -> tuple[str, ...]:
    """ "TIMEOUT,CRASHED" as statuses. BatchError for a word that is none."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    known = [status.value for status in Status]
    if unknown := [name for name in names if name not in known]:
        raise BatchError(f"--retry {','.join(unknown)}: no such status; there are {', '.join(known)}")
    return names
