"""Shows rows: the official table first and apart, then what this project adds. Knows rich and rows, runs nothing."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kbsub.adapters.evaluator import TIMING_METHOD
from kbsub.adapters.task import OFFICIAL_SIZE
from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import one_line, shown_name, table_cell
from kbsub.eval.report.console import PlainConsole
from kbsub.eval.run.runner import Plan, Row
from kbsub.eval.verdicts.kind import listed
from kbsub.eval.verdicts.register import KINDS, OFFICIAL

_COLOURS = {Status.OK: "green", Status.NOT_RUN: "yellow", Status.NOT_CHECKED: "yellow"}


# Heading and side of the official table's columns; a column that no row fills is left out.
_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("candidate", "left"),
    ("status", "left"),
    ("compiled", "left"),
    ("correct", "left"),
    ("trials", "left"),
    ("ms", "right"),
    ("reference\nms", "right"),
    ("speedup", "right"),
    ("floor\n%", "right"),
    ("flags", "left"),
)
WIDTH = 140  # what the tables need; on a narrower terminal its own line wrap loses less than folded cells


def official_table(plan: Plan, rows: Sequence[Row]) -> Table:
    """Upstream's words; on a CPU the same columns, titled as the local check that they are."""
    certified = any(row.fields.get("official") for row in rows)
    title = "Official verdict, KernelBench's own evaluator" if certified else "Nothing official, local check only"
    title = one_line(f"{title}: {plan.task.slug}, {plan.precision} ({plan.task.provenance})")
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    cells = [_official_cells(row) for row in rows]
    filled = [index for index in range(len(_COLUMNS)) if any(line[index] for line in cells)]
    for heading, side in (_COLUMNS[index] for index in filled):
        table.add_column(heading, justify=side, no_wrap=heading != "flags")
    for line in cells:
        table.add_row(*(line[index] for index in filled))
    return table


def print_wide(console: Console, table: Table) -> None:
    """Print a table and its title at the width they need, whatever the terminal's."""
    wide = PlainConsole(
        emoji=False,
        file=console.file,
        width=max(console.width, WIDTH),
        force_terminal=console.is_terminal,
        quiet=console.quiet,
    )
    title, table.title = str(table.title), None  # rich would fold it to the width of the table
    wide.print(title, style="bold")
    wide.print(table)


def added_table(rows: Sequence[Row]) -> Table | None:
    """This project's own stages, a column each; None when none was asked for."""
    names = [name for name in KINDS if name != OFFICIAL and any(name in row.outcomes for row in rows)]
    if not names:
        return None
    title = "Beyond the official check (never part of it)"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("candidate", no_wrap=True)
    for name in names:
        note = KINDS[name].note
        table.add_column(f"{name}, {note}" if note else name)
    for row in rows:
        table.add_row(_name(row), *(_stage_cell(row, name) for name in names))
    return table


def explanations(rows: Sequence[Row], plan: Plan | None = None) -> list[str]:
    """One line for every row or stage that did not end well: what happened, where, and what to do next.

    Of a file that nothing is declared of, the first failed cases and findings by name, too. A command to copy
    repeats the task and the device of `plan`.
    """
    lines = []
    for row in rows:
        name = shown_name(Path(row.file.parent.name, row.file.name))
        if "declaration_error" in row.fields:
            lines.append(f"{name}, declaration: {row.fields['declaration_error']}")
        told: dict[tuple[Status, str], list[str]] = {}
        for stage, outcome in row.outcomes.items():
            if outcome.status is not Status.OK:
                told.setdefault((outcome.status, outcome.message), []).append(stage)
        lines += [_explanation(name, plan, row, *end, stages) for end, stages in told.items()]
        lines += [f"{name}, {stage}: {listed(found)}" for stage in row.outcomes if (found := row.problems(stage))]
    return [one_line(line) for line in lines]


def _explanation(name: str, plan: Plan | None, row: Row, status: Status, message: str, stages: list[str]) -> str:
    words = message if message.startswith(str(status)) else f"{status}: {message}"
    where = "" if len(stages) == len(row.outcomes) > 1 else f", {', '.join(stages)}"
    again = f"kbsub eval {shlex.quote(shown_name(row.file))}"
    if plan is not None:
        again += f" --task {shlex.quote(shown_name(plan.task_text))} --device {plan.device}"
    again += f" --only {','.join(stages)}"
    hint = {
        Status.TIMEOUT: f". Rerun it alone with: {again} --timeout 900",
        Status.CRASHED: f". Its output is in the result file (stages.{stages[0]}.log). Rerun it alone with: {again}",
    }.get(status, "")
    return f"{name}{where}: {words}{hint}"


def speedup(fields: Mapping[str, Any]) -> float | None:
    """reference / candidate of upstream's own means, or None where it timed only one of them."""
    official = fields.get("official") or {}
    mine, reference = official.get("runtime", -1.0), official.get("ref_runtime", -1.0)
    return reference / mine if official.get("correctness") and mine > 0 and reference > 0 else None


def flags(fields: Mapping[str, Any]) -> list[str]:
    """Upstream's own warnings, in its words; and who ran the kernels where no GPU did."""
    metadata = (fields.get("official") or {}).get("metadata", {})
    found = ["over 10x (upstream's word)"] if metadata.get("excessive_speedup") else []
    found += ["error_during_performance"] if "error_during_performance" in metadata else []
    hosted = (fields.get("cpu_check") or {}).get("executor") == "host executor"
    return [*found, "host executor"] if hosted else found


def _official_cells(row: Row) -> list[str]:
    fields = row.fields
    shown = fields.get("official") or fields.get("cpu_check") or {}
    timing = (fields.get("timing") or {}).get(TIMING_METHOD) or {}
    reference = (fields.get("reference") or {}).get(TIMING_METHOD) or {}
    mean, floor, times = timing.get("mean_ms"), (fields.get("floors") or {}).get("memory_ms"), speedup(fields)
    colour = _COLOURS.get(row.status, "red")
    return [
        _name(row),
        f"[{colour}]{row.status}[/{colour}]",
        _word(shown.get("compiled")),
        _word(shown.get("correctness")),
        escape(table_cell(shown.get("trials") or "")),
        f"{mean:g}" if mean else "",
        f"{reference['mean_ms']:g}" if reference else "",
        f"{times:.2f}x" if times else "",
        f"{100 * floor / mean:.0f}" if floor and mean else "",
        ", ".join(flags(fields)),
    ]


def _stage_cell(row: Row, name: str) -> str:
    outcome = row.outcomes.get(name)
    if outcome is None:
        return ""
    if outcome.status is not Status.OK:
        colour = _COLOURS.get(outcome.status, "red")
        return f"[{colour}]{outcome.status}[/{colour}]"
    kind = KINDS[name]
    words = kind.brief(kind.record.model_validate(outcome.value or {}))
    size = row.sizes.get(name, {}).get("name", OFFICIAL_SIZE)
    return escape(table_cell(words if size == OFFICIAL_SIZE else f"{words} ({size} size)"))


def _name(row: Row) -> str:
    return escape(shown_name(row.file.stem))  # in a column that is not folded


def _word(value: bool | None) -> str:
    return "" if value is None else "yes" if value else "no"
