"""Reads stored comparisons back and asks each the other way round; no torch, nothing is run again.

A stored comparison is any JSON object with the booleans `allclose` and `allclose_swapped`, as
`kbsub.eval.operators.compare.predicate.Comparison.to_json` writes it, wherever it stands in a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class AuditError(ValueError):
    """The file cannot be read; the message names it."""


@dataclass(frozen=True)
class Change:
    """One comparison that the other direction answers otherwise."""

    where: str  # keys and case names from the top of the file
    official: bool  # torch.allclose(reference, candidate)
    class_: str  # the class stored with it; "" where a bare comparison stands
    ratio: float
    ratio_swapped: float

    def __str__(self) -> str:
        here, there = ("close", "not close") if self.official else ("not close", "close")
        stored = f" (stored as {self.class_})" if self.class_ else ""
        ratios = f"budget used {self.ratio:.6g} against {self.ratio_swapped:.6g}"
        return f"{self.where}: {here}{stored}, the other way {there}; {ratios}"


@dataclass(frozen=True)
class Audit:
    """comparisons: how many were found. closest: the one whose ratio is nearest to 1, either way, in words."""

    comparisons: int
    changes: tuple[Change, ...]
    closest: str | None


def audit_file(path: Path) -> Audit:
    """Every stored comparison of one JSON file. Raises AuditError."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise AuditError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AuditError(f"{path}: is not JSON: {error}") from error
    return audit(content)


def audit(content: Any) -> Audit:
    """Every stored comparison of a JSON value."""
    changes = []
    count, edge, closest = 0, math.inf, None
    for where, comparison, class_ in _comparisons(content, ()):
        count += 1
        ratio, swapped = (_number(comparison.get(key)) for key in ("ratio", "ratio_swapped"))
        name = " / ".join(where) or "the top of the file"
        if comparison["allclose"] != comparison["allclose_swapped"]:
            changes.append(Change(name, comparison["allclose"], class_, ratio, swapped))
        for each in (ratio, swapped):
            if abs(each - 1) < edge:
                edge, closest = abs(each - 1), f"{name}: {ratio:.6g} of the budget, {swapped:.6g} the other way"
    return Audit(count, tuple(changes), closest)


def _comparisons(
    value: Any, where: tuple[str, ...], class_: str = ""
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], str]]:
    if isinstance(value, list):
        for index, each in enumerate(value):
            name = each.get("name", each.get("case")) if isinstance(each, dict) else None
            yield from _comparisons(each, (*where, str(name or index)), class_)
    elif isinstance(value, dict):
        if isinstance(value.get("allclose"), bool) and isinstance(value.get("allclose_swapped"), bool):
            yield where, value, class_
        stored = value.get("class")
        for key, each in value.items():
            yield from _comparisons(each, (*where, key), stored if isinstance(stored, str) else class_)


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
