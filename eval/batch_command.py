"""What `kbsub eval RUNS_DIR` does with its options: the batch, its progress bar with the time left, its last words."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kbsub.adapters.isolation import Status
from kbsub.adapters.printable import one_line, shown_name
from kbsub.eval.batch import Batch, BatchError, Run, Settings, evaluate, prepare, run_here, summary_paths
from kbsub.eval.result import write_json_atomic

SHOWN_FAILURES = 20
RECORD = "kbsub_batch.json"  # how long the last invocation took, and which GPU judged how many of its rows


def run_folder(
    folder: Path,
    settings: Settings,
    *,
    gpus: int = 1,
    scheduler: str | None = None,
    workers: int | None = None,
    console: Any,
) -> int:
    """Judge every sample of the folder; returns the exit code: 0 no row failed, 1 one did, 130 interrupted.

    gpus > 1, a scheduler's address, or `workers` (CPU worker processes, for machines without a GPU) use
    dask.distributed. Raises BatchError when the batch cannot start or a row cannot be written.
    """
    started = time.monotonic()
    batch = prepare(folder, settings)
    if batch.finished:
        console.print(f"{len(batch.finished)} of {_total(batch)} rows are finished and kept", highlight=False)
    with ExitStack() as stack:
        run = _runner(stack, batch, gpus, scheduler, workers)
        progress = stack.enter_context(_progress(console))
        bar = progress.add_task("", total=_total(batch), completed=len(batch.finished))

        def show(row: Mapping[str, Any]) -> None:
            progress.advance(bar)
            name = f"level_{row['level']}_problem_{row['problem_id']}_sample_{row['sample_id']}"
            progress.console.print(one_line(f"{name}: {_words(row)}"), highlight=False, markup=False, soft_wrap=True)

        try:
            rows = evaluate(batch, run, show)
        except KeyboardInterrupt:
            console.print("interrupted; finished rows are kept, the same command goes on after them", style="yellow")
            return 130
    where = {"gpus": gpus, "scheduler": scheduler, "workers": workers}
    try:
        write_json_atomic(folder / RECORD, _record(batch, rows, where, time.monotonic() - started))
    except OSError as error:  # the rows are written; only the record of how long they took is not
        words = one_line(f"{shown_name(folder / RECORD)}: cannot write: {error}")
        console.print(words, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return _last_words(batch, rows, console)


def _record(
    batch: Batch, rows: Mapping[str, Mapping[str, Any]], where: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Wall time of this invocation in seconds, and by GPU (its uuid, or "no GPU") the rows that were judged there."""
    judged = [rows[job.stem] for job in batch.jobs if job.stem in rows]
    gpus = Counter(str(row.get("gpu_uuid") or "no GPU") for row in judged)
    statuses = Counter(str(row["status"]) for row in judged)
    facts = {"rows": len(rows), "judged_now": len(judged), "seconds": round(seconds, 2), **where}
    facts["judge_seconds"] = round(sum(float(row["seconds"]) for row in judged), 2)
    return {**facts, "rows_by_gpu": dict(gpus), "statuses": dict(statuses), "protocol": batch.settings.protocol()}


def _total(batch: Batch) -> int:
    return len(batch.finished) + len(batch.jobs)


def _runner(stack: ExitStack, batch: Batch, gpus: int, scheduler: str | None, workers: int | None) -> Run:
    if not batch.jobs or (scheduler is None and gpus <= 1 and not workers):
        return run_here
    if scheduler is None and gpus > 1 and ":" in batch.settings.device:
        raise BatchError(
            f"--device {batch.settings.device} names one GPU and --gpus {gpus} asks for several: leave --device away; "
            "which GPUs are used is said with CUDA_VISIBLE_DEVICES"
        )
    from kbsub.eval import cluster

    if scheduler is not None:
        return cluster.run_on(stack.enter_context(cluster.remote_client(scheduler)))  # type: ignore[no-any-return]
    environments = cluster.gpu_environments(range(gpus)) if not workers else [{} for _ in range(workers)]
    return cluster.run_on(stack.enter_context(cluster.local_client(environments)))  # type: ignore[no-any-return]


def _progress(console: Any) -> Any:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _words(row: Mapping[str, Any]) -> str:
    official = row.get("official") or {}
    if row["status"] == Status.OK.value and official:
        return f"OK, {official.get('trials')}, {official.get('runtime')} ms ({row['seconds']:.1f} s)"
    return f"{row['status']} {row['message']} ({row['seconds']:.1f} s)"


def _last_words(batch: Batch, rows: Mapping[str, Mapping[str, Any]], console: Any) -> int:
    failed = {n: r for n, r in rows.items() if r["status"] not in (Status.OK.value, Status.NOT_RUN.value)}
    judged = [row for row in rows.values() if row.get("official") is not None]
    for name, row in list(failed.items())[:SHOWN_FAILURES]:
        console.print(one_line(f"{name}: {_words(row)}"), highlight=False, markup=False, soft_wrap=True)
    if len(failed) > SHOWN_FAILURES:
        console.print(f"... and {len(failed) - SHOWN_FAILURES} more", highlight=False)
    console.print(f"{len(rows)} rows, {len(failed)} failed, {len(judged)} judged by upstream", highlight=False)
    summaries = [path for path in summary_paths(batch).values() if path.exists()]
    if not judged:
        none = "" if summaries else f"; there is no {batch.summary}"
        console.print(f"Nothing official was certified here{none}.", style="bold yellow")
    for path in summaries:
        words = f"summary in upstream's format: {shown_name(path)}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0
