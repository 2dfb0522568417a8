"""A leaderboard as one HTML file that opens from disk: sortable, filterable, each row with a link to its evidence."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kbsub.eval.report.board.words import COLUMNS, cell, problems_table, runs_table

TEMPLATE = Path(__file__).with_name("page.html")
NUMBERS = ("level", "problem", "sample", "ms", "reference_ms", "speedup", "own_speedup", "referee_ms", "stress_failed")


def page(board: Mapping[str, Any]) -> str:
    """The text of the page. The evidence of its rows is what `link` gives, or None.

    Whatever a row holds is text on the page: everything is escaped, and a link is a path beginning with "./" or "../".
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    rows = [
        {
            "state": "bad" if row["problems"] else "good" if row["correct"] else "open",
            "cells": [{"words": cell(key, row[key]), "sort": _sort(key, row[key])} for key in COLUMNS],
            "problems": row["problems"],
            "evidence": row["evidence"],
            "sha256": row["sha256"][:12],
        }
        for row in board["rows"]
    ]
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        board=board,
        columns=[{"name": words, "number": key in NUMBERS} for key, words in COLUMNS.items()],
        rows=rows,
        tables=[("Runs", *runs_table(board)), ("Problems", *problems_table(board))],
    )


def _sort(key: str, value: Any) -> str:
    return ("" if value is None else repr(float(value))) if key in NUMBERS else cell(key, value).lower()


def link(path: Path, where: Path) -> str:
    """The relative link from a page in `where` to a file."""
    relative = os.path.relpath(path.resolve(), where.resolve()).replace(os.sep, "/")
    return quote(relative if relative.startswith("../") else f"./{relative}")
