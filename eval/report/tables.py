"""Every timing table of the documents and of the terminal, made from result files alone.

A table is data (title, headers, rows of strings, notes); Markdown and rich are two ways to show it. Nothing here
measures, reads a file or knows a task: what a table says comes from the keys of docs/result.schema.json.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbsub.adapters.evaluator import TIMING_METHOD
from kbsub.eval.bench.baselines import BASELINES
from kbsub.eval.bench.compare import PairedComparison, Verdict, compare, unpaired
from kbsub.eval.bench.methods.register import compared_keys, methods, upstream_names
from kbsub.eval.bench.timing import GRAPH_REPLAY
from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import markdown_cell, one_line, table_cell
from kbsub.eval.results.model import Baseline, Candidate, Result
from kbsub.eval.results.timing import OFFICIAL, BenchRun, BenchRuns, Floors, Timing, timings_by_shape

NOTHING = "-"
OTHER_RUN = "not measured in the same run"
PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass
class Table:
    """Cells are ready-made text; `notes` are sentences below the table; `prose`: the cells are sentences, too."""

    title: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    prose: bool = False

    def markdown(self) -> str:
        """A GitHub table: the first column to the left, the others to the right (prose: left); the notes below."""
        if not self.rows:
            return f"_{self.title}: no such results are committed yet._"
        lines = ["| " + " | ".join(map(one_line, self.headers)) + " |"]
        lines.append("|---|" + ("---|" if self.prose else "---:|") * (len(self.headers) - 1))
        lines += ["| " + " | ".join(map(markdown_cell, row)) + " |" for row in self.rows]
        if self.notes:
            lines += ["", *map(one_line, self.notes)]
        return "\n".join(lines)

    def content(self) -> dict[str, Any]:
        """The same as data: title, rows of {header: cell}, notes."""
        rows = [dict(zip(self.headers, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows, "notes": self.notes}

    def rich(self) -> Any:
        """The same for a terminal."""
        from rich.markup import escape
        from rich.table import Table as RichTable

        notes = escape("\n".join(map(table_cell, self.notes)))
        shown = RichTable(title=escape(one_line(self.title)), caption=notes or None, caption_justify="left")
        for index, header in enumerate(self.headers):
            shown.add_column(escape(table_cell(header)), justify="left" if index == 0 else "right", overflow="fold")
        for row in self.rows:
            shown.add_row(*(escape(table_cell(cell)) for cell in row))
        return shown


# ---- one program's numbers ----


def programs(result: Result, precision: str = "fp32") -> dict[str, Baseline | Candidate]:
    """Baselines, then candidates, of one precision, by plain name (no "@fp16")."""
    found: dict[str, Baseline | Candidate] = {}
    rows: list[tuple[str, Baseline | Candidate]] = [*result.baselines.items(), *result.candidates.items()]
    for key, row in rows:
        name, _, suffix = key.partition("@")
        if (suffix or "fp32") == precision:
            found[name] = row
    return found


def shape_words(key: str) -> str:
    """A shape's key as a reader sees it: "4096x512" as "4096 x 512"."""
    return key.replace("x", " x ")


def title_of(name: str) -> str:
    return BASELINES[name].title if name in BASELINES else f"`{name}`"


def replay_of(timing: Mapping[str, Timing] | None) -> Timing | None:
    """The graph-replay timing, or the CPU's rehearsal of it."""
    return next(((timing or {})[key] for key in methods()[GRAPH_REPLAY].keys if key in (timing or {})), None)


def typical_ms(timing: Mapping[str, Timing] | None, method: str) -> float | None:
    """The median of a replay, upstream's mean of one of its methods; None where it was not measured."""
    found = (timing or {}).get(method)
    if found is None:
        return None
    return found.median_ms if found.median_ms is not None else found.mean_ms


def ms(value: float | None) -> str:
    """A time in ms with the digits that mean something: 4 significant, at least as fine as a tenth of a microsecond."""
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{value:.4f}" if value < 0.1 else f"{value:.3f}" if value < 10 else f"{value:.2f}"


def beside(other: Baseline | Candidate, mine: Mapping[str, Timing] | None, shape: str = OFFICIAL) -> dict[str, Timing]:
    """The timings of `other` at a shape to hold `mine` against: where it is stored, the one of the same run as mine.

    A baseline that was timed again keeps the older samples that candidates were timed beside (bench/record.py).
    """
    found = timings_by_shape(other).get(shape, {})
    earlier = (other.earlier if isinstance(other, Baseline) else None) or {}
    for method, timing in (mine or {}).items():
        kept = earlier.get(timing.run or "", {}).get(shape, {}).get(method)
        if kept is not None:
            found[method] = kept
    return found


def paired(a: Timing | None, b: Timing | None) -> PairedComparison:
    """Two stored timings of one method compared round by round; UNSURE unless both come from the same run."""
    if a is None or b is None or not a.by_round() or not b.by_round():
        return unpaired("not measured")
    if a.run is None or a.run != b.run:
        return unpaired(OTHER_RUN)
    return compare(a.by_round(), b.by_round())


def against(mine: Mapping[str, Timing] | None, other: Mapping[str, Timing] | None) -> tuple[PairedComparison, str]:
    """The comparison by the first method of the register that both have: graph replay, else upstream's cuda_event."""
    for method in compared_keys():
        if method in (mine or {}) and method in (other or {}):
            return paired((mine or {})[method], (other or {})[method]), method
    return unpaired("not measured by a common method"), NOTHING


def speedup_words(comparison: PairedComparison) -> str:
    """ "1.60x faster", "same (1.00x)", "unsure (1.01x)"; a tie never reads as a win."""
    if math.isnan(comparison.ratio):
        return NOTHING
    value = f"{comparison.speedup:.2f}x" if comparison.speedup < 10 else f"{comparison.speedup:.1f}x"
    words = {Verdict.FASTER: "{} FASTER", Verdict.SLOWER: "{} SLOWER", Verdict.SAME: "{} SAME"}
    return words.get(comparison.verdict, "{} UNSURE").format(value)


def percent(part: float | None, whole: float | None) -> str:
    """How much of a measured time a floor explains."""
    return NOTHING if not part or not whole else f"{100 * part / whole:.0f}%"


# ---- tables ----


def timing_table(result: Result, precision: str = "fp32", reference: str = "eager") -> Table:
    """All programs at the official shape: every method, the speedup over `reference`, percent of the floors."""
    replayed = "graph replay" if result.environment.gpu else "CPU rehearsal"
    rows = programs(result, precision)
    timed = {name: row for name, row in rows.items() if row.timing}
    others = _other_methods(timed.values())
    headers = ["program (ms)", "contract", replayed, "quartiles", *others]
    headers += [f"against {reference}", "of memory floor"]
    name = f"{result.task.slug} " if result.task.slug else ""
    table = Table(f"{name}{precision}, {result.environment.gpu or 'CPU'}", headers)
    base = rows.get(reference)
    floor = floor_ms(result, precision)
    elsewhere: list[str] = []
    for name, row in sorted(timed.items(), key=lambda item: -(best_ms(item[1].timing) or math.inf)):
        replay = replay_of(row.timing)
        quartiles = NOTHING if replay is None else f"{ms(replay.q25_ms)} - {ms(replay.q75_ms)}"
        contract = row.contract if isinstance(row, Candidate) else "floor" if is_floor(name) else "baseline"
        words = NOTHING
        if base is not None and name != reference and not is_floor(name):
            comparison, method = against(row.timing, beside(base, row.timing))
            words = speedup_words(comparison) + (f" ({method})" if method in upstream_names() else "")
            if comparison.reason == OTHER_RUN:
                elsewhere.append(title_of(name))
        cells = [title_of(name), contract or "undeclared", ms(replay.median_ms if replay else None), quartiles]
        cells += [ms(typical_ms(row.timing, method)) for method in others]
        table.rows.append([*cells, words, NOTHING if is_floor(name) else percent(floor, best_ms(row.timing))])
    table.notes = timing_notes(result, precision)
    if elsewhere:
        table.notes.append(f"Timed in another run than {reference}, so not compared with it: {', '.join(elsewhere)}.")
    flagged = {name: flags for name, row in timed.items() if (flags := flag_words(row))}
    if flagged:
        table.notes.append("Flags. " + " ".join(f"{title_of(name)}: {flags}." for name, flags in flagged.items()))
    return table


def _other_methods(rows: Iterable[Baseline | Candidate]) -> list[str]:
    """The columns beside graph replay: upstream's methods always, every other key of the register that was measured."""
    measured = {key for row in rows for key in (row.timing or {})}
    others = [method for name, method in methods().items() if name != GRAPH_REPLAY]
    return [key for method in others for key in method.keys if method.upstream or key in measured]


def is_floor(name: str) -> bool:
    return name in BASELINES and BASELINES[name].floor


def best_ms(timing: Mapping[str, Timing] | None) -> float | None:
    """The time a program is ranked by: the first compared method that it has, such as graph replay."""
    return next((typical_ms(timing, key) for key in compared_keys() if key in (timing or {})), None)


def floor_ms(result: Result, precision: str, shape: str = OFFICIAL) -> float | None:
    """The memory floor of a shape: as stored by the newest run that timed it, else the file's own for fp32."""
    for run in _runs(result):
        scene = run.scenes.get(f"{shape}@{precision}")
        if scene is not None and scene.memory_floor_ms is not None:
            return scene.memory_floor_ms
    return result.floors.memory_ms if (precision, shape) == ("fp32", OFFICIAL) else None


def _runs(result: Result) -> Iterator[BenchRun]:
    return (result.bench or BenchRuns()).newest_first()


def bench_floors(result: Result, precision: str) -> Floors:
    """The floors of the newest run that timed the official shape, all of that run; the file's own where none did."""
    for run in _runs(result):
        scene = run.scenes.get(f"{OFFICIAL}@{precision}")
        if scene is not None and scene.memory_floor_ms is not None:
            twice = scene.memory_floor_ms * (scene.bytes + scene.input_bytes) / scene.bytes
            found = {"memory_ms": scene.memory_floor_ms, "memory_two_reads_ms": twice}
            return run.floors.model_copy(update=found)
    return result.floors


def flag_words(row: Baseline | Candidate) -> str:
    """What speaks against the samples of a program, and what must be said about where it was timed."""
    replay = replay_of(row.timing)
    flags = list(replay.flags or []) if replay is not None else []
    flags += (row.bench.notes or []) if row.bench is not None else []
    return "; ".join(flags)


def timing_notes(result: Result, precision: str) -> list[str]:
    """Where the numbers come from, the floors, and what disturbed the machine."""
    where = result.environment
    if where.gpu is None:
        return [f"A rehearsal on a CPU, torch {where.torch}: these times say nothing about a GPU."]
    notes = [
        f"{where.gpu}, driver {where.driver}, torch {where.torch}, {where.date[:10]}. Graph replay: median, quartiles "
        "of rounds in shuffled order, 5 replays a sample. Other columns: upstream's own methods (mean of its trials), "
        "interleaved in the same run. FASTER, SLOWER, SAME, UNSURE: paired bootstrap over the rounds, 95%, margin 0.5%."
    ]
    floors = bench_floors(result, precision)
    if floors.copy_gb_s:
        words = f"Floors measured in the same run: copy {floors.copy_gb_s:.0f} GB/s"
        floor = floor_ms(result, precision)
        words += f", every byte once {ms(floor)} ms" if floor else ""
        twice = floors.memory_two_reads_ms
        words += f", input read twice {ms(twice)} ms" if twice and precision == "fp32" else ""
        words += f", chain of the reference order {ms(floors.chain_ms)} ms" if floors.chain_ms else ""
        notes.append(words + ".")
    newest = next(_runs(result), None)
    scene = newest.scenes.get(f"{OFFICIAL}@{precision}") if newest is not None else None
    if scene is not None and scene.quality.flags:
        notes.append("Disturbed: " + "; ".join(scene.quality.flags) + ".")
    return notes


def floors_table(result: Result, names: Sequence[str], precision: str = "fp32") -> Table:
    """Percent of each floor, by the best method of each program: 100% would be the floor itself."""
    floors = bench_floors(result, precision)
    lines = {"every byte once": floor_ms(result, precision)}
    if precision == "fp32":
        lines["input read twice"] = floors.memory_two_reads_ms
        lines["chain of the reference order"] = floors.chain_ms
        both = floors.chain_ms + floors.memory_ms if floors.chain_ms and floors.memory_ms else None
        lines["chain, then the output pass"] = both
    lines = {name: value for name, value in lines.items() if value}
    table = Table("percent of the floors", ["program", "graph replay ms", f"{TIMING_METHOD} ms", *lines])
    rows = programs(result, precision)
    if lines:
        table.rows.append(["the floor itself", NOTHING, NOTHING, *(f"{ms(value)} ms" for value in lines.values())])
    for name in names:
        timing = rows[name].timing if name in rows else None
        value = best_ms(timing)
        if value is not None and lines:
            replay = replay_of(timing)
            cells = [title_of(name), ms(replay.median_ms if replay else None), ms(typical_ms(timing, TIMING_METHOD))]
            table.rows.append([*cells, *(percent(floor, value) for floor in lines.values())])
    if not any(cells[0] != "the floor itself" for cells in table.rows):
        table.rows = []
    return table


def shapes_table(result: Result, candidates: Sequence[str], precisions: Iterable[str] = PRECISIONS) -> Table:
    """Every shape beyond the official one: eager, each candidate and the ratio, by graph replay on both sides."""
    names = ", ".join(f"`{name}`" for name in candidates)
    table = Table(f"shapes: eager against {names or 'nothing'}", ["shape", "precision", "eager ms"])
    for name in candidates:
        table.headers += [f"`{name}` ms", "times faster", "bit-equal"]
    for precision in precisions:
        rows = programs(result, precision)
        eager = rows.get("eager", Baseline())
        for key, base in (eager.shapes or {}).items():
            replay = replay_of(base.timing)
            if replay is None:
                continue
            cells = [shape_words(key), precision, ms(replay.median_ms)]
            for name in candidates:
                cells += _shape_cells(rows.get(name), key, eager)
            table.rows.append(cells)
    if table.rows:
        table.notes = [
            "Graph replay on both sides; the ratio is the median over rounds of eager / candidate, both of one run; "
            "eager's ms is its newest run's."
        ]
    return table


def _shape_cells(row: Baseline | Candidate | None, key: str, eager: Baseline | Candidate) -> list[str]:
    shape = (row.shapes or {}).get(key) if row is not None else None
    if shape is None:
        return [NOTHING, NOTHING, NOTHING]
    mine = replay_of(shape.timing)
    if mine is None:
        return [str(shape.status or Status.NOT_RUN), NOTHING, NOTHING]
    identity = shape.bit_identity
    equal = f"{identity.identical}/{identity.total}" if identity is not None else NOTHING
    reference = replay_of(beside(eager, shape.timing, key))
    return [ms(mine.median_ms), speedup_words(paired(mine, reference)), equal]


def _verdict_words(comparison: PairedComparison, method: str) -> str:
    """ "FASTER 1.16x (1.15 to 1.17)": the verdict, how many times faster, and its 95% interval."""
    if math.isnan(comparison.ratio):
        return NOTHING
    low, high = 1 / comparison.high, 1 / comparison.low
    words = f"{comparison.verdict} {comparison.speedup:.2f}x ({low:.2f} to {high:.2f})"
    return words + (f" by {method}" if method in upstream_names() else "")


def verdicts_table(result: Result, candidates: Sequence[str], precision: str = "fp32") -> Table:
    """Each candidate against every baseline and the other candidates: how it stands against the program of the row."""
    rows = programs(result, precision)
    others = [name for name, row in rows.items() if row.timing and not is_floor(name)]
    table = Table("paired comparisons", ["against", *(f"`{name}`" for name in candidates)])
    for other in others:
        cells = []
        for name in candidates:
            mine = rows.get(name)
            if mine is None or name == other:
                cells.append(NOTHING)
                continue
            comparison, method = against(mine.timing, beside(rows[other], mine.timing))
            cells.append(_verdict_words(comparison, method))
        if any(cell != NOTHING for cell in cells):
            table.rows.append([title_of(other), *cells])
    return table
