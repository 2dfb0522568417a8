"""The record of a task's blind spots (`results/<gpu>/blindspots/<task>.json`): what upstream's check accepts.

Written by `kbsub blindspots`, read by reports and by the row of every verdict. Numbers and names only. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kbsub.eval.results.files import write_text_atomic
from kbsub.eval.results.model import ResultError, jsonable
from kbsub.eval.results.record import Environment, Record

VERSION = 1  # of the variants: a record of another version is made again
FOLDER = "blindspots"
# What a task is blind to, worst first; the first two say that the reference itself is the one that is off.
SEVERITIES = (
    "unstable",
    "hostile",
    "vacuous",
    "operator",
    "parameter",
    "input",
    "data",
    "precision",
    "undecided",
    "sound",
)
OUGHT_TO_PASS = ("unstable", "hostile")
MEANING = {
    "unstable": "the reference fails against itself",
    "hostile": "the truth (float64, or fp32 without TF32) fails",
    "vacuous": "an output made without the input passes",
    "operator": "an operator can be left out or be a constant",
    "parameter": "a parameter's values are not looked at",
    "input": "an input is not looked at",
    "data": "a part of the data is enough",
    "precision": "bf16, fp16 or TF32 arithmetic passes",
    "undecided": "nothing wrong passes, but not all could be tried: time or memory",
    "sound": "every wrong variant fails",
}
_SAID = 3  # accepted variants that a verdict's row names


class VariantRow(Record):
    """One variant. `share`: the largest share of the tolerance it used in the trials it was in (of a failed one up to
    the chunk that failed, unless `whole`); `passed` null: no trial failed, but not all were run. `same`: the
    substitute is what the task has anyway."""

    name: str
    blind: str
    words: str
    share: float
    trials: int
    passed: bool | None
    failed_at: int | None = None
    failing: list[int] | None = None
    whole: bool | None = None
    same: bool | None = None
    why: str | None = None


class NotTriedRow(Record):
    """A variant, or a number of them, that could not be tried, and why."""

    name: str
    why: str


class BlindSpots(Record):
    """All variants of one task. size: official, check or small; values: of the integers that make it so."""

    version: int = VERSION
    task: str
    name: str
    sha256: str
    provenance: str
    precision: str
    tolerance: float
    size: str
    values: dict[str, int] = Field(default_factory=dict)
    seeds: list[int]
    another_seed: int
    drawn: list[str] = Field(default_factory=list)
    variants: list[VariantRow] = Field(default_factory=list)
    not_tried: list[NotTriedRow] = Field(default_factory=list)
    error: str | None = None
    alone: bool | None = None  # the task had the whole GPU
    granted_s: float = 0.0  # that the task was given, and those that it took
    seconds: float = 0.0
    peak_bytes: int | None = None
    environment: Environment | None = None

    def accepted(self) -> list[VariantRow]:
        """Wrong variants that pass all trials, worst first."""
        found = [row for row in self.variants if row.passed and row.blind not in OUGHT_TO_PASS]
        return sorted(found, key=lambda row: SEVERITIES.index(row.blind))

    def refused(self) -> list[VariantRow]:
        """What ought to pass and does not: the reference again, and the truth.

        Of a reference that fails against itself the truth says nothing: it drew other random numbers, too.
        """
        found = [row for row in self.variants if row.passed is False and row.blind in OUGHT_TO_PASS]
        return [row for row in found if row.blind == "unstable"] or found

    def severities(self) -> list[str]:
        """Everything that the task is, worst first: ["vacuous", "data"], ["sound"]; [] where nothing was tried."""
        if not self.variants:
            return []
        found = {row.blind for row in [*self.accepted(), *self.refused()]}
        return [each for each in SEVERITIES if each in found] or ["undecided" if self.cut_short else "sound"]

    @property
    def worst(self) -> str | None:
        return next(iter(self.severities()), None)

    @property
    def cut_short(self) -> bool:
        """Whether time or memory kept variants from being tried in all trials: what was not tried may pass."""
        reasons = any(row.why in ("time limit", "out of memory") for row in self.not_tried)
        return reasons or self.error is not None or any(row.passed is None for row in self.variants)

    @property
    def out_of_memory(self) -> bool:
        return self.error == "out of memory" or any(row.why == "out of memory" for row in self.not_tried)


def in_words(record: BlindSpots) -> str:
    """What a verdict's row says of its task: "this task also accepts zeros, ...; the truth in float64 fails"."""
    parts = []
    accepted = list(dict.fromkeys(row.words for row in record.accepted()))
    if accepted:
        more = f" and {len(accepted) - _SAID} more" if len(accepted) > _SAID else ""
        parts.append(f"this task also accepts {', '.join(accepted[:_SAID])}{more}")
    for row in record.refused():
        if row.blind == "unstable":
            parts.append("its reference fails against itself")
        else:
            parts.append(f"the {row.name.replace(':', ' in', 1)} fails ({row.share:.3g} tolerances)")
    if not parts:
        tried = sum(row.blind not in OUGHT_TO_PASS for row in record.variants)
        return f"none of {tried} wrong variants passes" if tried else ""
    return "; ".join(parts) + ("" if record.size == "official" else f" (at the {record.size} size)")


def file_name(task: str, precision: str) -> str:
    """Of a task's record: "level1_37.json" in fp32, else with the precision, as the rows of a result file have it."""
    return f"{task}.json" if precision == "fp32" else f"{task}@{precision}.json"


def read_blindspots(path: Path) -> BlindSpots:
    """The record in a file; ResultError when it is none."""
    try:
        return BlindSpots.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ResultError(f"{path}: no record of blind spots: {' '.join(str(error).split())[:200]}") from error


def write_blindspots(path: Path, record: BlindSpots) -> None:
    """The record as JSON, a variant a line; a failed variant's words are left out, since nobody is told of it."""
    content = jsonable(record.model_dump(mode="json"))
    lists = {key: content.pop(key) for key in ("variants", "not_tried")}
    for row in lists["variants"]:
        if row["passed"] is False:
            row["words"] = ""
    head = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    parts = [head]
    for key, rows in lists.items():
        lines = ",\n".join(f"  {json.dumps(row, ensure_ascii=False, allow_nan=False)}" for row in rows)
        parts.append(f' "{key}": [\n{lines}\n ]' if rows else f' "{key}": []')
    write_text_atomic(path, ",\n".join(parts) + "\n}\n")


def records_in(folder: Path) -> list[BlindSpots]:
    """Every record of a folder, by level and problem."""
    return sorted((read_blindspots(path) for path in folder.glob("*.json")), key=lambda record: order(record.task))


def order(task: str) -> tuple[Any, ...]:
    """A key that sorts level1_9 before level1_10."""
    return tuple(int(part) if part.isdecimal() else part for part in task.removeprefix("level").split("_"))


def committed_folders() -> list[Path]:
    """The folders of this checkout's results/, the H200's first; [] of an installation without them."""
    results = Path(__file__).resolve().parents[2] / "results"
    return sorted((each for each in results.glob("*") if each.is_dir()), key=lambda each: (each.name != "h200", each))


def known(task: str, provenance: str, precision: str = "fp32", folders: Iterable[Path] | None = None) -> str | None:
    """What a verdict's row says of its task, from the first committed record of this very task; None without one."""
    for folder in committed_folders() if folders is None else folders:
        path = folder / FOLDER / file_name(task, precision)
        if path.is_file():
            try:
                record = read_blindspots(path)
            except ResultError:
                continue
            if record.provenance == provenance:
                return in_words(record) or None
    return None
