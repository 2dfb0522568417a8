"""What a person sees of a batch: progress with the time left, a line a row, the last words; and its record.

Knows rows and a console; runs nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import one_line, shown_name
from kbsub.eval.run.batch.rows import problems_of
from kbsub.eval.run.batch.work import Batch
from kbsub.eval.verdicts.register import KINDS, OFFICIAL

SHOWN_FAILURES = 20


class Seen:
    """What has been judged in this call, without the rows themselves. todo: how many are to do."""

    def __init__(self, todo: int, before: Collection[str] = ()) -> None:
        self.todo, self.began = todo, time.monotonic()
        self.before = frozenset(before)
        self.stems: set[str] = set()
        self.gpus, self.statuses = Counter[str](), Counter[str]()
        self.judge_seconds = 0.0
        self.phases = Counter[str]()

    def add(self, stem: str, row: Mapping[str, Any]) -> None:
        self.stems.add(stem)
        self.gpus[str(row.get("gpu_uuid") or "no GPU")] += 1
        self.statuses[str(row["status"])] += 1
        self.judge_seconds += float(row.get("seconds_now") or 0.0)
        self.phases.update(row.get("phases_now") or {})

    def waiting(self, batch: Batch, seconds: float) -> dict[str, Any]:
        """How long the judges waited for compilers: for builds that were under way, and inside the official judge.

        official_phases: seconds of the official judges, summed (kbsub.eval.run.phases). share: of `seconds`, the time
        of the whole batch; only where one judge works at a time, since several wait side by side.
        """
        waited = batch.waited_s + self.phases["build"]
        alone = len(self.gpus) <= 1 and seconds > 0
        return {
            "official_phases": {name: round(value, 2) for name, value in self.phases.items()},
            "waited_for_builds_s": round(waited, 2),
            "waited_for_builds_share": round(waited / seconds, 4) if alone else None,
        }

    def left(self) -> str:
        """ "[3 of 60, about 12 min left]", from what the rows until now took; "" after the last."""
        done, spent = len(self.stems), time.monotonic() - self.began
        if not done or done >= self.todo:
            return ""
        seconds = spent / done * (self.todo - done)
        words = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
        return f"[{done} of {self.todo}, about {words} left]"


def record(batch: Batch, seen: Seen, where: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Wall time of this invocation in seconds, and by GPU (its uuid, or "no GPU") the rows that were judged there.

    judge_waited_s: in which no row could be judged because its build was not done; built_ahead: files. The share of
    the time that went into waiting for compilers, there or inside a judge: Seen.waiting.
    """
    facts = {"rows": total(batch), "judged_now": len(seen.stems), "seconds": round(seconds, 2), **where}
    facts |= {"judge_seconds": round(seen.judge_seconds, 2), "judge_waited_s": round(batch.waited_s, 2)}
    facts |= seen.waiting(batch, seconds)
    facts |= {"built_ahead": batch.built, "stages": list(batch.settings.stages)}
    facts |= {"rows_by_gpu": dict(seen.gpus), "statuses": dict(seen.statuses)}
    return {**facts, "protocol": batch.settings.protocol()}


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
    """A row in one line: the official verdict first, then the other stages."""
    official = row.get("official") or {}
    others = [each for each in row["stages"] if each != OFFICIAL]
    if row["status"] == Status.OK.value and official:
        words = f"OK, {official.get('trials')}, {official.get('runtime')} ms"
    elif OFFICIAL in row["stages"] or not others:
        words = f"{row['status']} {row['message']}".rstrip()
    else:
        words = ""
    for name in others:
        end, found = row["stages"][name], row.get(KINDS[name].key) if name in KINDS else None
        good = end["status"] in (Status.OK.value, Status.NOT_CHECKED.value) and found is not None
        said = KINDS[name].brief(KINDS[name].record.model_validate(found)) if good else end.get("message") or ""
        ended = "" if end["status"] == Status.OK.value else f"{end['status']} "
        words += f"{'; ' if words else ''}{name}: {ended}{said}".rstrip()
    spots = f"; {row['blind_spots']}" if row.get("blind_spots") and row["status"] == Status.OK.value else ""
    return f"{words} ({row['seconds']:.1f} s){spots}"


def last_words(batch: Batch, rows: Mapping[str, Mapping[str, Any]], seen: Seen, console: Any) -> int:
    """What is to be known at the end; returns the exit code. A failure whose line was just printed is not repeated."""
    failed = judged = shown = 0
    for stem in rows:
        row = rows[stem]
        judged += row.get("official") is not None
        if not problems_of(row):
            continue
        failed += 1
        if stem not in seen.stems:
            shown += 1
            if shown <= SHOWN_FAILURES:
                words = one_line(f"{stem}: {row_words(row)}")
                console.print(words, highlight=False, markup=False, soft_wrap=True)
    if shown > SHOWN_FAILURES:
        console.print(f"... and {shown - SHOWN_FAILURES} more", highlight=False)
    failed += len(batch.unwritable)
    lost = f", {len(batch.unwritable)} could not be kept" if batch.unwritable else ""
    console.print(f"{len(rows)} rows, {failed} failed, {judged} judged by upstream{lost}", highlight=False)
    if batch.built:
        words = f"{batch.built} files were built ahead; the judge waited {batch.waited_s:.1f} s for builds"
        console.print(words, highlight=False)
    summaries = [path for path in batch.paths().values() if path.exists()]
    if not judged:
        none = "" if summaries else f"; there is no {batch.summary}"
        console.print(f"Nothing official was certified here{none}.", style="bold yellow")
    for path in summaries:
        words = f"summary in upstream's format: {shown_name(path)}"
        console.print(words, markup=False, highlight=False, soft_wrap=True)
    return 1 if failed else 0


def quietly(end: Callable[[], Any]) -> None:
    """End what a Ctrl-C has already torn half down: its complaints, and dask's, help nobody."""
    logging.disable(logging.CRITICAL)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        with contextlib.suppress(Exception, KeyboardInterrupt):
            end()
    logging.disable(logging.NOTSET)
