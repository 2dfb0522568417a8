"""The tables of a task that was timed over shapes with a cold L2: bandwidth, a candidate against its rivals, times 100.

Made from result files alone. The bandwidth of a program is the bytes of the input, read once and written once, over its
time; parameters are not counted, as the copy that it is held against has none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.eval.bench.compare import PairedComparison, Verdict
from kbsub.eval.bench.methods.register import cold_words
from kbsub.eval.report.tables import NOTHING, Table, is_floor, paired, programs, shape_words, title_of
from kbsub.eval.report.verdict_tables import cold_method, cold_ms, environment_words, error, gb_s
from kbsub.eval.results.model import Baseline, Candidate, Result, ResultError
from kbsub.eval.results.timing import ShapeRow

COPY = "copy"
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # an element
ENOUGH = 90  # percent of the copy that a row must reach not to be listed as an exception


def moved(key: str, precision: str) -> int:
    """The bytes of a scene "4096x512": input once, output once."""
    return 2 * math.prod(map(int, key.split("x"))) * BYTES[precision]


def shape_of(row: Baseline | Candidate | None, key: str) -> ShapeRow | None:
    return ((row.shapes or {}) if row is not None else {}).get(key)


def copies(result: Result, precision: str) -> dict[str, tuple[str, float]]:
    """Shape -> (method, ms) of the copy: what every program of that shape and precision is held against."""
    row = programs(result, precision).get(COPY)
    found = {}
    for key, shape in ((row.shapes or {}) if row is not None else {}).items():
        method = cold_method(shape.timing)
        value = cold_ms(shape.timing, method)
        if value is not None:
            found[key] = (method, value)
    return found


def bandwidth_table(result: Result, precisions: Sequence[str], names: Sequence[str] = ()) -> Table:
    """GB/s and percent of the copy: a row a program (the fastest at the largest shape first), a column a shape."""
    keys = list(dict.fromkeys(key for precision in precisions for key in copies(result, precision)))
    table = Table("bandwidth", ["program", "precision", *map(shape_words, keys)])
    methods = set()
    for precision in precisions:
        copied = copies(result, precision)
        if not copied:
            continue
        methods |= {method for method, _ in copied.values()}
        cells = [f"{gb_s(moved(key, precision), copied[key][1]):.0f}" if key in copied else NOTHING for key in keys]
        table.rows.append([title_of(COPY), precision, *cells])
        rows = {
            name: row
            for name, row in programs(result, precision).items()
            if name != COPY and row.shapes and (not names or name in names)
        }
        last = list(copied)[-1]
        rank = {name: shape_ms(row, last, copied) or math.inf for name, row in rows.items()}
        for name in sorted(rows, key=rank.__getitem__):
            cells = [_bandwidth_cell(rows[name], key, precision, copied) for key in keys]
            table.rows.append([title_of(name), precision, *cells])
    if table.rows:
        words = "; ".join(what for method, what in cold_words().items() if method in methods)
        table.notes = [
            f"GB/s, and percent of the copy of the same bytes. {environment_words(result)}. Cold L2, medians, copy and "
            f"programs interleaved in one run: {words}. Bytes: input once, output once."
        ]
    return table


def shape_ms(row: Baseline | Candidate | None, key: str, copied: Mapping[str, tuple[str, float]]) -> float | None:
    shape = shape_of(row, key)
    return cold_ms(shape.timing, copied[key][0]) if shape is not None and key in copied else None


def _bandwidth_cell(
    row: Baseline | Candidate, key: str, precision: str, copied: Mapping[str, tuple[str, float]]
) -> str:
    mine, shape = shape_ms(row, key, copied), shape_of(row, key)
    if mine is None:
        return str(shape.status) if shape is not None and shape.status is not None else NOTHING
    return f"{gb_s(moved(key, precision), mine):.0f} ({100 * copied[key][1] / mine:.0f}%)"


# ---- one candidate against everything that was timed beside it ----


def pairwise(result: Result, name: str, precision: str) -> Iterator[tuple[str, float, dict[str, PairedComparison]]]:
    """(shape, percent of the copy, rival -> paired comparison) for every shape at which `name` was timed."""
    rows, copied = programs(result, precision), copies(result, precision)
    for key, (method, copy_ms) in copied.items():
        mine, time_ms = shape_of(rows.get(name), key), shape_ms(rows.get(name), key, copied)
        if mine is None or time_ms is None:
            continue
        found = {}
        for rival, row in rows.items():
            theirs = shape_of(row, key)
            if rival != name and not is_floor(rival) and theirs is not None and method in (theirs.timing or {}):
                found[rival] = paired((mine.timing or {}).get(method), (theirs.timing or {}).get(method))
        yield key, 100 * copy_ms / time_ms, found


def rivals_table(result: Result, name: str, precisions: Sequence[str], *, only_exceptions: bool = False) -> Table:
    """How often a candidate is faster than each rival, a shape and precision a row, with the interval.

    only_exceptions: only where it is not faster, or below ENOUGH percent of the copy; rivals that it always beats go
    into the note.
    """
    scenes = [(p, key, percent, found) for p in precisions for key, percent, found in pairwise(result, name, p)]
    rivals = list(dict.fromkeys(rival for *_, found in scenes for rival in found))
    lost = {rival: sum(_lost(found, rival) for *_, found in scenes) for rival in rivals}
    shown = [rival for rival in rivals if lost[rival] or not only_exceptions]
    table = Table(f"`{name}` against the others", ["shape", "precision", "of copy", *map(title_of, shown)])
    for precision, key, percent, found in scenes:
        if only_exceptions and percent >= ENOUGH and not any(_lost(found, rival) for rival in shown):
            continue
        share = f"{percent:.0f}%" if percent >= ENOUGH else f"**{percent:.0f}%**"
        cells = [_pairwise_words(found[rival], short=only_exceptions) if rival in found else NOTHING for rival in shown]
        table.rows.append([shape_words(key), precision, share, *cells])
    if scenes:
        table.notes = [
            f"{environment_words(result)}. How many times faster `{name}` is, with the 95% interval (paired bootstrap "
            f"over rounds, margin 0.5%); below 1 it is slower. Bold: below {ENOUGH}% of the copy."
        ]
    if scenes and only_exceptions:
        always = ", ".join(title_of(rival) for rival in rivals if not lost[rival]) or "none"
        enough = sum(percent >= ENOUGH for _, _, percent, _ in scenes)
        table.notes.append(
            f"Listed: where something is not FASTER, or below {ENOUGH}%. {enough} of {len(scenes)} scenes reach "
            f"{ENOUGH}%. Faster at every scene that both were timed at than: {always}."
        )
    return table


def _lost(found: Mapping[str, PairedComparison], rival: str) -> bool:
    return rival in found and found[rival].verdict is not Verdict.FASTER


def _pairwise_words(comparison: PairedComparison, *, short: bool) -> str:
    if math.isnan(comparison.ratio):
        return NOTHING
    if short and comparison.verdict is Verdict.FASTER:
        return str(comparison.verdict)
    low, high = 1 / comparison.high, 1 / comparison.low
    return f"{comparison.verdict} {comparison.speedup:.3f} ({low:.3f} to {high:.3f})"


# ---- inputs times 100 ----


def x100_path(result: Path) -> Path:
    """Where `kbsub measure tokens` leaves the table beside a result file."""
    return result.with_name(f"{result.stem}_x100.json")


def x100_table(stored: Mapping[str, Any]) -> Table:
    """The first values of each program beside the float64 answer, what is wrong with the rest, and the input."""
    rows: Mapping[str, Mapping[str, Any]] = stored["rows"]
    shown = max((len(row["first"]) for row in rows.values() if "first" in row), default=0)
    table = Table(
        "inputs times 100", ["program", *(f"y[0, {i}]" for i in range(shown)), "max abs error", "zeros", "NaN"]
    )
    for name, row in rows.items():
        title = "float64 (oracle)" if name == "float64" else title_of(name)
        if "first" not in row:
            table.rows.append([title, *[NOTHING] * shown, str(row["error"]), NOTHING, NOTHING])
            continue
        cells = [f"{float(value):.4f}" for value in row["first"]]
        table.rows.append([title, *cells, error(float(row["max_abs_error"])), str(row["zeros"]), str(row["nans"])])
    if table.rows:
        table.notes = [f"Input: `{stored['input']}`; gamma 1, beta 0. Max abs error: against float64."]
    return table


def read_x100(path: Path) -> Table:
    """The table of a file, or an empty one that says so in a document. Raises ResultError for a broken file."""
    if not path.is_file():
        return Table("inputs times 100", ["program"])
    try:
        return x100_table(json.loads(path.read_text("utf-8")))
    except (KeyError, TypeError, ValueError) as problem:
        raise ResultError(f"{path}: is not what `kbsub measure tokens` writes ({problem})") from problem
