"""Reads one row or one cell of a table by its words."""

from __future__ import annotations

from kbsub.eval.report import tables


def row(table: tables.Table, first: str) -> list[str]:
    found = [cells for cells in table.rows if cells[0] == first]
    assert found, f"no row {first} in {[cells[0] for cells in table.rows]}"
    return found[0]


def column(table: tables.Table, first: str, header: str) -> str:
    return row(table, first)[table.headers.index(header)]
