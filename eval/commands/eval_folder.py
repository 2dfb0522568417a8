"""The folder half of `kbsub eval`: a run folder, a tree of them or a corpus, judged as a batch.

No verb of its own: it has no `command`. Imports no torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORD = "kbsub_batch.json"  # of a run folder: how long the last invocation took, which GPU judged how many of its rows


@dataclass(frozen=True)
class Where:
    """Which processes judge. gpus > 1, a scheduler's address, or `workers` (CPU worker processes, for machines
    without a GPU) use dask.distributed. builders: builds ahead at once on this machine."""

    gpus: int = 1
    scheduler: str | None = None
    workers: int | None = None
    builders: int = 0

    def record(self) -> dict[str, Any]:
        return {"gpus": self.gpus, "scheduler": self.scheduler, "workers": self.workers, "builders": self.builders}


def run_folder(
    source: Path,
    settings: Any,
    *,
    where: Where = Where(),
    fields: str = "",
    out: Path | None = None,
    retry: str = "",
    console: Any,
) -> int:
    """Judge every sample of a folder or corpus; returns the exit code: 0 no row failed, 1 one did, 130 interrupted.

    fields: of a corpus, which of its fields is what. out: where the rows go; of a folder it is that folder itself.
    Raises BatchError when the batch cannot start or a row cannot be written.
    """
    from kbsub.eval.process.printable import one_line, shown_name
    from kbsub.eval.report import batch_report as report
    from kbsub.eval.results.model import write_json_atomic
    from kbsub.eval.run.batch import samples, work

    def say(words: str) -> None:
        console.print(one_line(words), markup=False, highlight=False, soft_wrap=True)

    started = time.monotonic()
    again = work.retried(retry)
    if source.is_dir():
        folder, found = source, samples.find_samples(source)
    else:
        folder, found = out or Path("runs") / source.stem, samples.find_in_corpus(source, samples.read_fields(fields))
        folder.mkdir(parents=True, exist_ok=True)
    for words in found.notes():
        say(words)
    stack = ExitStack()
    try:
        stack.enter_context(work.alone(folder))
        run, machines, notes = _runner(stack, settings, where)
        for words in notes:
            say(words)
        batch = work.prepare(folder, settings, found=found, retry=again, machines=machines)
        if batch.finished:
            say(f"{len(batch.finished)} of {report.total(batch)} rows are finished and kept")
        for words in batch.unwritable.values():
            say(words)
        progress = stack.enter_context(report.progress(console))
        bar = progress.add_task("", total=report.total(batch), completed=len(batch.finished))
        seen = report.Seen(len(batch.jobs), batch.finished)

        def show(stem: str, row: Mapping[str, Any]) -> None:
            seen.add(stem, row)
            progress.advance(bar)
            words = one_line(f"{stem}: {report.row_words(row)} {seen.left()}".rstrip())
            progress.console.print(words, highlight=False, markup=False, soft_wrap=True)

        rows = work.evaluate(batch, run, show)
        stack.close()
    except KeyboardInterrupt:
        report.quietly(stack.close)
        console.print("interrupted; finished rows are kept, the same command goes on after them", style="yellow")
        return 130
    finally:
        stack.close()
    try:
        record = report.record(batch, seen, where.record(), time.monotonic() - started)
        write_json_atomic(folder / RECORD, record)
    except OSError as error:  # the rows are written; only the record of how long they took is not
        say(f"{shown_name(folder / RECORD)}: cannot write: {error}")
    return report.last_words(batch, rows, seen, console)


def _runner(stack: ExitStack, settings: Any, where: Where) -> tuple[Any, Any, list[str]]:
    """(what judges, the machines that do, what is to be said of them)."""
    import functools

    from kbsub.eval.run.batch import build_ahead
    from kbsub.eval.run.batch.job import this_machine
    from kbsub.eval.run.batch.samples import BatchError

    here = frozenset({this_machine(settings.device)})
    builders = where.builders if settings.device != "cpu" else 0
    if where.scheduler is None and where.gpus <= 1 and not where.workers:
        return functools.partial(build_ahead.run_here, builders=builders), here, []
    if where.scheduler is None and where.gpus > 1 and ":" in settings.device:
        raise BatchError(
            f"--device {settings.device} names one GPU and --gpus {where.gpus} asks for several: leave --device away; "
            "which GPUs are used is said with CUDA_VISIBLE_DEVICES"
        )
    from kbsub.eval.run.batch import cluster

    if where.scheduler is None:
        environments = (
            cluster.gpu_environments(range(where.gpus)) if not where.workers else [{} for _ in range(where.workers)]
        )
        client = stack.enter_context(cluster.local_client(environments))
        return cluster.run_on(client, builders), here, []
    client = stack.enter_context(cluster.remote_client(where.scheduler))
    workers = cluster.Workers(client, settings.device)
    if not workers.look():
        raise BatchError(f"--scheduler {where.scheduler}: no worker may judge: {'; '.join(workers.notes())}")
    return cluster.run_on(client), workers.machines(), workers.notes()
