"""Stored runs beside each other, and the summary (Markdown, pictures) of one run. Reads results, measures nothing.

Each file is one GPU and one set of versions. Within a file programs are ranked and compared; across files they are put
side by side, each against the eager of its own file, and the table says that the columns are not ranked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from kbsub.eval.process.printable import one_line
from kbsub.eval.report import plots
from kbsub.eval.report.freshness import mark, outdated
from kbsub.eval.report.tables import (
    NOTHING,
    PRECISIONS,
    Table,
    against,
    beside,
    best_ms,
    is_floor,
    ms,
    programs,
    shapes_table,
    speedup_words,
    timing_table,
    title_of,
    verdicts_table,
)
from kbsub.eval.report.verdict_tables import best
from kbsub.eval.results.files import write_text_atomic
from kbsub.eval.results.model import Candidate, Result
from kbsub.eval.tasks.folder import submissions_folder
from kbsub.eval.verdicts.referee.registration import Referee, brief

UPSTREAM, REFEREE = "upstream", "referee"
RANKING = ["program (ms)", "contract", "upstream", "referee", "interval", "upstream / referee", "the two"]


def column_name(result: Result) -> str:
    where = result.environment
    return f"{where.gpu or 'CPU'}, torch {where.torch}"


def side_by_side(results: Sequence[Result], names: Sequence[str], precision: str = "fp32") -> Table:
    """A row a program, two columns a file: its ms, and how it stands against the eager of the same file.

    `names`: one label a result (its path), used where two files would have the same title. Raises ValueError when the
    files are about different tasks.
    """
    tasks = {(r.task.level, r.task.problem_id, r.task.sha256) for r in results}
    if len(tasks) > 1:
        raise ValueError(f"{', '.join(names)}: results of different tasks; compare files of one task")
    titles = [column_name(result) for result in results]
    if len(set(titles)) < len(titles):
        titles = [f"{title} ({name})" for title, name in zip(titles, names, strict=True)]
    table = Table(f"stored runs, {precision}", ["program (ms)"])
    table.headers += [header for title in titles for header in (title, "against its eager")]
    rows = [programs(result, precision) for result in results]
    for name in dict.fromkeys(name for found in rows for name in found):
        cells = [title_of(name)]
        for found in rows:
            row, eager = found.get(name), found.get("eager")
            value = best_ms(row.timing) if row is not None else None
            words = NOTHING
            if row is not None and value is not None and eager is not None and name != "eager" and not is_floor(name):
                words = speedup_words(against(row.timing, beside(eager, row.timing))[0])
            cells += [ms(value), words]
        if any(cell != NOTHING for cell in cells[1:]):
            table.rows.append(cells)
    table.notes = _notes(results, titles, rows)
    return table


def _notes(results: Sequence[Result], titles: Sequence[str], rows: Sequence[Mapping[str, object]]) -> list[str]:
    notes = []
    if len(results) > 1:
        gpus = {result.environment.gpu for result in results}
        versions = {(r.environment.torch, r.environment.driver, r.environment.cupy) for r in results}
        what = " and ".join(word for word, found in (("GPUs", gpus), ("software versions", versions)) if len(found) > 1)
        why = f"they are of different {what}" if what else "they are of different runs"
        notes.append(f"Columns are not ranked against each other: {why}. Each compares with the eager of its own run.")
    changed = []
    for name in sorted(set().union(*rows)):
        hashes = {row.sha256 for found in rows if isinstance(row := found.get(name), Candidate)}
        if len(hashes) > 1:
            changed.append(name)
    if changed:
        notes.append(f"Not the same source in every file: {', '.join(changed)}.")
    for title, result in zip(titles, results, strict=True):
        where = result.environment
        notes.append(f"{title}: driver {where.driver}, CuPy {where.cupy}, Python {where.python}, {where.date[:10]}.")
    return notes


def chosen_candidates(result: Result, precision: str = "fp32") -> list[str]:
    """The candidates worth a column: the best bit-identical and the best accurate one, else every one timed."""
    found = [best(result, "bit-identical", precision=precision), best(result, accurate=True, precision=precision)]
    names = [name for name in dict.fromkeys(found) if name]
    rows = programs(result, precision)
    return names or [name for name, row in rows.items() if isinstance(row, Candidate) and row.timing]


def ranking_table(result: Result, precision: str = "fp32", rank: str = UPSTREAM) -> Table:
    """Candidates by upstream's own time, as the published protocol ranks them, and the referee's beside it.

    rank: UPSTREAM or REFEREE, by whose time; those without it come last. A row whose two times differ says so.
    """
    table = Table(f"candidates by {rank}'s time, {precision}", RANKING)
    found = []
    for name, row in programs(result, precision).items():
        if not isinstance(row, Candidate):
            continue
        theirs, verdict = row.official.ms if row.official is not None else None, row.verdict(Referee)
        if theirs is None and verdict is None:
            continue
        ours = verdict.ms if verdict is not None and verdict.good else None
        ratio = theirs / ours if theirs is not None and ours is not None else None
        words = NOTHING if verdict is None else _referee_words(verdict, theirs)
        cells = [title_of(name), row.contract or "undeclared", ms(theirs), ms(ours)]
        interval = NOTHING if ours is None or verdict is None else f"{ms(verdict.low)} - {ms(verdict.high)}"
        cells += [interval, NOTHING if ratio is None else f"{ratio:.2f}", words]
        found.append(((ours if rank == REFEREE else theirs), cells))
    table.rows = [cells for _, cells in sorted(found, key=lambda each: math.inf if each[0] is None else each[0])]
    if table.rows:
        table.notes = [
            "Upstream: KernelBench's own mean, taken in the candidate's process. Referee: a clock outside of it, with "
            "its 95% interval; where the two differ by more than 5%, the words say so."
        ]
    return table


def _referee_words(verdict: Referee, theirs: float | None) -> str:
    if not verdict.good:
        return brief(verdict)
    deceived = verdict.deceives(theirs)
    words = [*verdict.under_the_floor(theirs), *([deceived] if deceived else []), *verdict.flags(theirs)]
    return "; ".join(words) or ("agrees" if theirs is not None else NOTHING)


def tables_of(result: Result, path: Path | None = None, rank: str = UPSTREAM) -> list[Table]:
    """Every timing table one result can fill: by precision the ranking, the official shape and the comparisons, then
    the shapes.

    rank: see `ranking_table`. `path`: where the result is from. With it, rows whose file in this installation is not
    the measured one are marked (a candidate without a file here may never have had one: nothing is said).
    """
    found = []
    for precision in PRECISIONS:
        ranking = ranking_table(result, precision, rank)
        if ranking.rows:
            found.append(_marked(ranking, result, path, (precision,)))
        table = timing_table(result, precision)
        if table.rows:
            verdicts = verdicts_table(result, chosen_candidates(result, precision), precision)
            found += [_marked(each, result, path, (precision,)) for each in (table, verdicts) if each.rows]
    shapes = _marked(shapes_table(result, _with_shapes(result)), result, path, PRECISIONS)
    return found + ([shapes] if shapes.rows else [])


def _marked(table: Table, result: Result, path: Path | None, precisions: Sequence[str]) -> Table:
    task = result.task.slug
    if path is None or task is None:  # a local task's folder is not known from its result
        return table
    stale = outdated(result, submissions_folder(task), precisions, gone=False)
    return mark(table, stale, f"submissions/{task}", f"--task {task} --out {path}")


def _with_shapes(result: Result) -> list[str]:
    return list(dict.fromkeys(key.partition("@")[0] for key, row in result.candidates.items() if row.shapes))


def write_summary(result: Result, stem: Path) -> list[Path]:
    """`<stem>_timing.md`, and the pictures `<stem>_time.png` and `<stem>_error.png` where there are data for them.

    Returns what was written. Without matplotlib the pictures are left out (ModuleNotFoundError is raised last, so that
    the Markdown is there).
    """
    markdown = stem.with_name(f"{stem.name}_timing.md")
    parts = [f"## {one_line(table.title)}\n\n{table.markdown()}\n" for table in tables_of(result)]
    if not parts:
        return []
    write_text_atomic(markdown, "\n".join(parts))
    written = [markdown]
    for precision in PRECISIONS:
        for name in plots.names_with_data(result, precision, ("time", "error")):
            path = plots.plot_path(stem.parent, stem.name, name, precision)
            plots.make(result, name, precision, path)
            written.append(path)
    return written
