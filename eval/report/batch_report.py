"""What a person sees of a batch: the progress bar with the time left, a line a row, the last words; and its record.

Knows rows and a console; runs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import one_line, shown_name
from kbsub.eval.run.batch import Batch, summary_paths

SHOWN_FAILURES = 20


def record(
    batch: Batch, rows: Mapping[str, Mapping[str, Any]], where: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """Wall time of this invocation in seconds, and by GPU (its uuid, or "no GPU") the rows that were judged there."""
    judged = [rows[job.stem] for job in batch.jobs if job.stem in rows]
    gpus = Counter(str(row.get("gpu_uuid") or "no GPU") for row in judged)
    statuses = Counter(str(row["status"]) for row in judged)
    facts = {"rows": len(rows), "judged_now": len(judged), "seconds": round(seconds, 2), **where}
    facts["judge_seconds"] = round(sum(float(row["seconds"]) for row in judged), 2)
    return {**facts, "rows_by_gpu": dict(gpus), "statuses": dict(statuses), "protocol": batch.settings.protocol()}


def total(batch: Batch) -> int:
    return len(batch.finished) + len(batch.jobs)


def progress(console: Any) -> Any:
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


def row_words(row: Mapping[str, Any]) -> str:
    official = row.get("official") or {}
    if row["status"] == Status.OK.value and official:
        spots = f"; {row['blind_spots']}" if row.get("blind_spots") else ""
        return f"OK, {official.get('trials')}, {official.get('runtime')} ms ({row['seconds']:.1f} s){spots}"
    return f"{row['status']} {row['message']} ({row['seconds']:.1f} s)"


def last_words(batch: Batch, rows: Mapping[str, Mapping[str, Any]], console: Any) -> int:
    failed = {n: r for n, r in rows.items() if r["status"] not in (Status.OK.value, Status.NOT_RUN.value)}
    judged = [row for row in rows.values() if row.get("official") is not None]
    for name, row in list(failed.items())[:SHOWN_FAILURES]:
        console.print(one_line(f"{name}: {row_words(row)}"), highlight=False, markup=False, soft_wrap=True)
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
