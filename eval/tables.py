"""Every table of the papers and of the terminal, made from result files alone.

A table is data (title, headers, rows of strings, notes); Markdown and rich are two ways to show it. Nothing here
measures, reads a file or knows a task: what a table says comes from the keys of results.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbsub.adapters.isolation import Status
from kbsub.adapters.printable import markdown_cell, one_line, table_cell
from kbsub.eval.baselines import BASELINES
from kbsub.eval.bench_plan import OFFICIAL
from kbsub.eval.comparison import Comparison, Verdict, compare, unpaired
from kbsub.eval.result import EARLIER, Baseline, Candidate, Floors, Result, Timing
from kbsub.eval.timing import UPSTREAM_METHODS

NOTHING = "-"
OTHER_RUN = "not measured in the same run"
REPLAY = ("graph_replay", "cpu_rehearsal")
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
    return next(((timing or {})[method] for method in REPLAY if method in (timing or {})), None)


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


def run_of(timing: Timing | None) -> str | None:
    return str((timing.model_extra or {}).get("run")) if timing and (timing.model_extra or {}).get("run") else None


def timings_by_scene(row: Baseline | Candidate) -> dict[str, dict[str, Timing]]:
    """What a row was timed at: the official shape, then every other one. Scene -> method -> timing."""
    others = {key: dict(shape.timing or {}) for key, shape in (row.shapes or {}).items()}
    return {OFFICIAL: dict(row.timing or {}), **others}


def beside(other: Baseline | Candidate, mine: Mapping[str, Timing] | None, scene: str = OFFICIAL) -> dict[str, Timing]:
    """The timings of `other` in a scene to hold `mine` against: where it is stored, the one of the same run as mine.

    A baseline that was timed again keeps the older samples that candidates were timed beside (bench_record).
    """
    found = timings_by_scene(other).get(scene, {})
    earlier = (other.model_extra or {}).get(EARLIER) or {}
    for method, timing in (mine or {}).items():
        block = earlier.get(run_of(timing), {}).get(scene, {}).get(method)
        if block is not None:
            found[method] = Timing.model_validate(block)
    return found


def paired(a: Timing | None, b: Timing | None) -> Comparison:
    """Two stored timings of one method compared round by round; UNSURE unless both come from the same run."""
    if a is None or b is None or not by_round(a) or not by_round(b):
        return unpaired("not measured")
    if run_of(a) is None or run_of(a) != run_of(b):
        return unpaired(OTHER_RUN)
    return compare(by_round(a), by_round(b))


def by_round(timing: Timing) -> list[float]:
    """One number a round: a replay's sample, or the median of the trials of one of upstream's passes."""
    medians = (timing.model_extra or {}).get("pass_medians_ms")
    return [float(value) for value in medians] if medians else list(timing.samples_ms or [])


def against(mine: Mapping[str, Timing] | None, other: Mapping[str, Timing] | None) -> tuple[Comparison, str]:
    """The comparison by the best method that both have: graph replay, else upstream's cuda_event."""
    for method in (*REPLAY, "cuda_event"):
        if method in (mine or {}) and method in (other or {}):
            return paired((mine or {})[method], (other or {})[method]), method
    return unpaired("not measured by a common method"), NOTHING


def speedup_words(comparison: Comparison) -> str:
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
    headers = ["program (ms)", "contract", replayed, "quartiles", *UPSTREAM_METHODS]
    headers += [f"against {reference}", "of memory floor"]
    name = f"{result.task.slug} " if result.task.slug else ""
    table = Table(f"{name}{precision}, {result.environment.gpu or 'CPU'}", headers)
    rows = programs(result, precision)
    base = rows.get(reference)
    floor = floor_ms(result, precision)
    timed = {name: row for name, row in rows.items() if row.timing}
    elsewhere: list[str] = []
    for name, row in sorted(timed.items(), key=lambda item: -(best_ms(item[1].timing) or math.inf)):
        replay = replay_of(row.timing)
        quartiles = NOTHING if replay is None else f"{ms(replay.q25_ms)} - {ms(replay.q75_ms)}"
        contract = row.contract if isinstance(row, Candidate) else "floor" if is_floor(name) else "baseline"
        words = NOTHING
        if base is not None and name != reference and not is_floor(name):
            comparison, method = against(row.timing, beside(base, row.timing))
            words = speedup_words(comparison) + (" (cuda_event)" if method == "cuda_event" else "")
            if comparison.reason == OTHER_RUN:
                elsewhere.append(title_of(name))
        cells = [title_of(name), contract or "undeclared", ms(replay.median_ms if replay else None), quartiles]
        cells += [ms(typical_ms(row.timing, method)) for method in UPSTREAM_METHODS]
        table.rows.append([*cells, words, NOTHING if is_floor(name) else percent(floor, best_ms(row.timing))])
    table.notes = timing_notes(result, precision)
    if elsewhere:
        table.notes.append(f"Timed in another run than {reference}, so not compared with it: {', '.join(elsewhere)}.")
    flagged = {name: flags for name, row in timed.items() if (flags := flag_words(row))}
    if flagged:
        table.notes.append("Flags. " + " ".join(f"{title_of(name)}: {flags}." for name, flags in flagged.items()))
    return table


def is_floor(name: str) -> bool:
    return name in BASELINES and BASELINES[name].floor


def best_ms(timing: Mapping[str, Timing] | None) -> float | None:
    """The time a program is ranked by: its graph replay, or cuda_event where it replays graphs itself."""
    replay = replay_of(timing)
    return replay.median_ms if replay is not None else typical_ms(timing, "cuda_event")


def floor_ms(result: Result, precision: str, key: str = "official") -> float | None:
    """The memory floor of a scene: as stored by the newest run that timed it, else the file's own for fp32."""
    bench = (result.model_extra or {}).get("bench") or {}
    for run in sorted(bench.get("runs", {}), reverse=True):
        scene = bench["runs"][run]["scenes"].get(f"{key}@{precision}", {})
        if "memory_floor_ms" in scene:
            return float(scene["memory_floor_ms"])
    return result.floors.memory_ms if (precision, key) == ("fp32", "official") else None


def bench_floors(result: Result, precision: str) -> Floors:
    """The floors of the newest run that timed the official shape, all of that run; the file's own where none did."""
    runs = ((result.model_extra or {}).get("bench") or {}).get("runs", {})
    for run in sorted(runs, reverse=True):
        scene = runs[run]["scenes"].get(f"{OFFICIAL}@{precision}", {})
        if "memory_floor_ms" in scene:
            once, size = scene["memory_floor_ms"], scene["bytes"]
            twice = once * (size + scene["input_bytes"]) / size
            return Floors.model_validate({**runs[run]["floors"], "memory_ms": once, "memory_two_reads_ms": twice})
    return result.floors


def flag_words(row: Baseline | Candidate) -> str:
    """What speaks against the samples of a program, and what must be said about where it was timed."""
    replay = replay_of(row.timing)
    flags = list((replay.model_extra or {}).get("flags", [])) if replay is not None else []
    flags += ((row.model_extra or {}).get("bench") or {}).get("notes", [])
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
        twice = (floors.model_extra or {}).get("memory_two_reads_ms")
        words += f", input read twice {ms(twice)} ms" if twice and precision == "fp32" else ""
        words += f", chain of the reference order {ms(floors.chain_ms)} ms" if floors.chain_ms else ""
        notes.append(words + ".")
    bench = (result.model_extra or {}).get("bench") or {}
    for run in sorted(bench.get("runs", {}), reverse=True)[:1]:
        flags = bench["runs"][run]["scenes"].get(f"official@{precision}", {}).get("quality", {}).get("flags", [])
        if flags:
            notes.append("Disturbed: " + "; ".join(flags) + ".")
    return notes


def floors_table(result: Result, names: Sequence[str], precision: str = "fp32") -> Table:
    """Percent of each floor, by the best method of each program: 100% would be the floor itself."""
    floors = bench_floors(result, precision)
    lines = {"every byte once": floor_ms(result, precision)}
    if precision == "fp32":
        lines["input read twice"] = (floors.model_extra or {}).get("memory_two_reads_ms")
        lines["chain of the reference order"] = floors.chain_ms
        both = floors.chain_ms + floors.memory_ms if floors.chain_ms and floors.memory_ms else None
        lines["chain, then the output pass"] = both
    lines = {name: value for name, value in lines.items() if value}
    table = Table("percent of the floors", ["program", "graph replay ms", "cuda_event ms", *lines])
    rows = programs(result, precision)
    if lines:
        table.rows.append(["the floor itself", NOTHING, NOTHING, *(f"{ms(value)} ms" for value in lines.values())])
    for name in names:
        timing = rows[name].timing if name in rows else None
        value = best_ms(timing)
        if value is not None and lines:
            replay = replay_of(timing)
            cells = [title_of(name), ms(replay.median_ms if replay else None), ms(typical_ms(timing, "cuda_event"))]
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
    identity = shape.bit_identity if isinstance(shape.bit_identity, Mapping) else {}
    equal = f"{identity['identical']}/{identity['total']}" if "total" in identity else NOTHING
    reference = replay_of(beside(eager, shape.timing, key))
    return [ms(mine.median_ms), speedup_words(paired(mine, reference)), equal]


def _verdict_words(comparison: Comparison, method: str) -> str:
    """ "FASTER 1.16x (1.15 to 1.17)": the verdict, how many times faster, and its 95% interval."""
    if math.isnan(comparison.ratio):
        return NOTHING
    low, high = 1 / comparison.high, 1 / comparison.low
    words = f"{comparison.verdict} {comparison.speedup:.2f}x ({low:.2f} to {high:.2f})"
    return words + (" by cuda_event" if method == "cuda_event" else "")


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
