"""A leaderboard as Markdown, CSV and, where pandas and pyarrow are installed, Parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.eval.process.printable import markdown_cell, one_line

# key of a board's row -> heading; the same order in CSV, Parquet and on the page
COLUMNS = {
    "run": "run",
    "level": "level",
    "problem": "problem",
    "sample": "sample",
    "status": "official",
    "ms": "ms",
    "reference_ms": "baseline ms",
    "speedup": "speedup",
    "overrides": "redefines",
    "own_namespace": "own namespace",
    "own_speedup": "own speedup",
    "guards": "guards",
    "referee": "referee",
    "referee_ms": "referee ms",
    "stress_failed": "stress failed",
    "blind_spots": "blind spots",
}
BESIDE = {
    "on_other_inputs": "on other inputs",
    "wrong_in_own_namespace": "wrong in own namespace",
    "caught_by_guards": "caught by guards",
    "refused_by_referee": "refused by referee",
    "failed_stress": "failed stress",
    "with_blind_spots": "with blind spots",
}


def cell(key: str, value: Any) -> str:
    """A value as it is shown: "-" where nobody asked, and never an empty cell that could be taken for a good answer."""
    if value is None:
        return "-"
    if key == "guards":
        return ", ".join(value) or "clean"
    if key == "overrides":
        return ", ".join(value) or "nothing"
    if key == "own_namespace":
        return "correct" if value else "wrong"
    if key == "referee":
        return "right" if value else "refused"
    if isinstance(value, float):
        return f"{value:.2f}x" if key.endswith("speedup") else f"{value:.4g}"
    return one_line(str(value))


def runs_table(board: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, a line a run and level."""
    thresholds = list(board["runs"][0]["fast_p"]) if board["runs"] else []
    passes = [f"pass@{k}" for k in board["k"]]
    head = ["run", "level", "rows", "judged", "correct", "of", *passes, *(f"fast_{p}" for p in thresholds)]
    head += ["geometric mean", *BESIDE.values()]
    lines = []
    for run in board["runs"]:
        line = [str(run[key]) for key in ("run", "level", "rows", "judged", "correct", "total")]
        line += ["-" if run[each] is None else f"{run[each]:.3f}" for each in passes]
        line += [f"{run['fast_p'][p]:.3f}" for p in thresholds]
        lines.append([*line, f"{run['geometric_mean']:.2f}x", *(str(run[key]) for key in BESIDE)])
    return head, lines


def problems_table(board: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells, a line a problem."""
    head = ["level", "problem", "rows", "judged", "correct", "pass@1", "best", "by", *BESIDE.values()]
    lines = []
    for each in board["problems"]:
        line = [str(each[key]) for key in ("level", "problem", "rows", "judged", "correct")]
        line.append(cell("", each.get("pass@1")))
        by = f"{each['best_run']}, sample {each['best_sample']}" if "best_run" in each else "-"
        lines.append([*line, cell("speedup", each.get("best_speedup")), by, *(str(each[key]) for key in BESIDE)])
    return head, lines


# What a person on a machine without a GPU must know before reading a zero.
UNJUDGED = (
    "**No row has an official verdict, which takes a GPU: `judged`, `correct`, pass@k, fast_p and the mean say nothing "
    "here. How each file did in the local check stands in its row (`status` of leaderboard.csv, and the page).**"
)


def markdown(board: Mapping[str, Any]) -> str:
    """The runs and the problems. The rows are in the CSV and on the page."""
    parts = [
        "# Leaderboard",
        f"KernelBench at {board['pin'][:12]}. Baseline: {board['baseline']}. pass@k, fast_p and geometric mean are "
        "upstream's: fast_p counts sample 0 and divides by all problems of the level (`of`). The columns after them "
        "are counts of this project's own verdicts and change none of those.",
        *([] if any(run["judged"] for run in board["runs"]) else [UNJUDGED]),
        "## Runs",
        _table(*runs_table(board)),
        "## Problems",
        _table(*problems_table(board)),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    text = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(markdown_cell(each) for each in line) + " |" for line in text)


def rows_csv(board: Mapping[str, Any]) -> str:
    """Every row, with plain values; a list is joined by spaces. A text that a spreadsheet would compute is quoted."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*COLUMNS, "gpu", "torch", "sha256", "evidence"])
    for row in board["rows"]:
        values = (row[key] for key in (*COLUMNS, "gpu", "torch", "sha256", "evidence"))
        writer.writerow([_plain(value) for value in values])
    return stream.getvalue()


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        value = " ".join(value)
    if isinstance(value, str):
        value = one_line(value)
        return f"'{value}" if value[:1] in "=+-@" and value else value
    return value


def write_parquet(board: Mapping[str, Any], path: Path) -> str | None:
    """The rows as Parquet; why not, in words, where pandas or pyarrow is not installed."""
    for name in ("pandas", "pyarrow"):
        if importlib.util.find_spec(name) is None:
            return f"no Parquet: {name} is not installed (pip install pandas pyarrow)"
    import pandas

    pandas.DataFrame(board["rows"]).to_parquet(path)
    return None
