"""The tables of the documents that are about verdicts rather than times: headline, official, identity, stress, oracle.

Made from result files alone (keys of docs/result.schema.json). The official verdict has its own table and its own
columns: nothing of the other stages is merged into it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kbsub.adapters.evaluator import TIMING_METHOD
from kbsub.eval.bench.methods.register import cold_words
from kbsub.eval.report.tables import NOTHING, Table, ms, percent, programs, title_of, typical_ms
from kbsub.eval.results.blindspots import known as known_blind_spots
from kbsub.eval.results.model import Candidate, Result, ResultRow
from kbsub.eval.results.timing import Timing
from kbsub.eval.verdicts.identity.registration import BitIdentity, equal
from kbsub.eval.verdicts.oracle.registration import Oracle, OracleCase
from kbsub.eval.verdicts.register import KINDS

HEADLINE_BASELINES = ("eager", "compile_default")
UNIFORM_WORDS = KINDS["stress"].note


def best(result: Result, contract: str | None = None, *, accurate: bool = False, precision: str = "fp32") -> str | None:
    """The fastest officially correct candidate of a contract, by upstream's own mean; accurate: the oracle's."""
    times = {}
    for name, row in programs(result, precision).items():
        if isinstance(row, Candidate) and row.official is not None and row.official.ms is not None:
            if (accurate and row.accurate) or (not accurate and row.contract == contract):
                times[name] = row.official.ms
    return min(times, key=lambda name: times[name]) if times else None


def worst_case(row: ResultRow, side: str = "candidate_max_abs") -> tuple[float, str] | None:
    """The largest max abs error of a row over the oracle's cases, and the case; None where none was measured."""
    found = row.verdict(Oracle)
    return None if found is None else found.worst(side)


def worst_error(row: ResultRow, side: str = "candidate_max_abs") -> float | None:
    worst = worst_case(row, side)
    return None if worst is None else worst[0]


def oracle_of(row: ResultRow) -> dict[str, OracleCase]:
    """The oracle's cases of a candidate, or of a baseline (measure/error_table.py)."""
    found = row.verdict(Oracle)
    return {} if found is None else found.cases


def error(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}" if math.isfinite(value) else str(value)


def worst_words(worst: tuple[float, str] | None) -> str:
    return NOTHING if worst is None else f"{error(worst[0])} ({worst[1]})"


def identity_words(row: ResultRow) -> str:
    found = row.verdict(BitIdentity)
    return NOTHING if found is None else equal(found)


def headline_table(result: Result) -> Table:
    """Bit-identical, accurate, eager, compile: ms, speedup, bit identity, worst oracle error."""
    headers = ["program", "contract", "ms", "speedup over eager", "bit-equal cases", "worst error against float64"]
    table = Table("headline", headers)
    rows = programs(result)
    chosen = [best(result, "bit-identical"), best(result, accurate=True)]
    eager_error: tuple[float, str] | None = None
    for name in dict.fromkeys(name for name in chosen if name):
        row = rows[name]
        assert isinstance(row, Candidate)
        said = row.official
        assert said is not None, "best() chose it by its official time"
        mine, speedup = said.ms, f"{said.speedup:.1f}x" if said.speedup else NOTHING
        contract = "accurate" if name == chosen[1] else row.contract or "undeclared"
        cells = [title_of(name), contract, ms(mine), speedup, identity_words(row), worst_words(worst_case(row))]
        table.rows.append(cells)
        eager_error = eager_error or worst_case(row, "reference_max_abs")
    eager_ms = typical_ms(rows["eager"].timing, TIMING_METHOD) if "eager" in rows else None
    for name in HEADLINE_BASELINES:
        value = typical_ms(rows[name].timing, TIMING_METHOD) if name in rows else None
        if value is None:
            continue
        speedup = f"{eager_ms / value:.1f}x" if eager_ms else NOTHING
        worst = worst_case(rows[name]) or (eager_error if name == "eager" else None)
        cells = [
            title_of(name),
            "baseline",
            ms(value),
            speedup,
            "native" if name == "eager" else NOTHING,
            worst_words(worst),
        ]
        table.rows.append(cells)
    if table.rows:
        table.notes = [
            f"{environment_words(result)}. Candidates: upstream's evaluator (mean of 100 `{TIMING_METHOD}`, cold L2), "
            "against the eager it times right after. Baselines: the same method, interleaved in one `kbsub bench`. "
            "Worst error: max abs over the oracle's cases, with the case."
        ]
    return table


def environment_words(result: Result) -> str:
    where = result.environment
    return f"{where.gpu}, driver {where.driver}, torch {where.torch}, CuPy {where.cupy}, NVRTC {where.nvrtc}"


def official_table(result: Result, precision: str = "fp32") -> Table:
    """Upstream's words, unchanged, one row a candidate."""
    headers = ["candidate", "contract", "compiled", "correct", "trials", "ms", "eager ms", "speedup"]
    headers += ["of memory floor", "flags"]
    table = Table(f"official verdicts, {precision}", headers)
    for name, row in programs(result, precision).items():
        if not isinstance(row, Candidate):
            continue
        said = row.official
        if said is None:
            reason = f"{row.status}: {row.reason or 'no reason given'}"
            table.rows.append([title_of(name), row.contract or "undeclared", *[NOTHING] * 7, reason])
            continue
        mine, eager = said.ms, said.reference_ms
        flags = "excessive_speedup" if said.metadata.get("excessive_speedup") else NOTHING
        words = [str(said.compiled), str(said.correctness), said.trials or NOTHING]
        speedup = f"{said.speedup:.2f}x" if said.speedup else NOTHING
        floor = result.floors.memory_ms if precision == "fp32" else None
        cells = [title_of(name), row.contract or "undeclared", *words, ms(mine), ms(eager), speedup]
        table.rows.append([*cells, percent(floor, mine), flags])
    table.rows.sort(key=lambda cells: -float(cells[5]) if cells[5] != NOTHING else -math.inf)
    if table.rows:
        table.notes = [
            f"{environment_words(result)}, KernelBench {result.environment.kernelbench_commit[:12]}. Upstream's "
            "evaluator, 5 correctness trials, 100 timed, `cuda_event`. `excessive_speedup` is its word for more than "
            "10x eager; the percentage beside it is the memory floor over the time (100% would be the floor itself)."
        ]
        task = result.task
        if spots := known_blind_spots(task.slug or "", task.provenance, precision):
            table.notes.append(f"What correct means here: {spots} (docs/blind-spots.md).")
    return table


def checks_table(result: Result, precision: str = "fp32") -> Table:
    """What this project adds, each kind of verdict with the columns that it registers."""
    kinds = [kind for kind in KINDS.values() if kind.columns]
    headers = ["candidate", "contract", *(column.heading for kind in kinds for column in kind.columns)]
    table = Table(f"beyond the official check, {precision}", headers)
    for name, row in programs(result, precision).items():
        found = [row.verdict(kind.record) for kind in kinds]
        if not isinstance(row, Candidate) or not any(found):
            continue
        cells = [
            NOTHING if record is None else column.cell(record)
            for kind, record in zip(kinds, found, strict=True)
            for column in kind.columns
        ]
        table.rows.append([title_of(name), row.contract or "undeclared", *cells])
    if table.rows:
        table.notes = [
            f"{environment_words(result)}. Stress: {UNIFORM_WORDS}; never part of the official verdict. Nearer: away "
            "from eager, and nearer to float64 than it; apart: beyond what fp32 can hold, not judged; refused: a clear "
            "ValueError; skipped: not of this precision."
        ]
    return table


def oracle_table(result: Result, candidates: Sequence[str] = (), precision: str = "fp32") -> Table:
    """Max abs error against float64, a case a row: eager and every candidate that was measured."""
    everyone = programs(result, precision)
    rows = {name: row for name, row in everyone.items() if name != "eager" and oracle_of(row)}
    if candidates:
        rows = {name: rows[name] for name in candidates if name in rows}
    table = Table(f"max abs error against the float64 oracle, {precision}", ["case", "eager", *map(title_of, rows)])
    cases: dict[str, None] = {}
    tables = {name: oracle_of(row) for name, row in rows.items()}
    native = oracle_of(everyone["eager"]) if "eager" in everyone else {}
    for found in tables.values():
        cases.update(dict.fromkeys(found))
    for case in cases:
        entries = [found.get(case) for found in tables.values()]
        reference = next((entry.reference_max_abs for entry in entries if entry), None)
        reference = native[case].candidate_max_abs if case in native else reference
        cells = [_error_cell(entry.candidate_max_abs if entry else None) for entry in entries]
        table.rows.append([case, _error_cell(reference), *cells])
    if table.rows:
        table.notes = [
            f"{environment_words(result)}. Cases are rows of the stress suite; lower is nearer to the formula."
        ]
    return table


def _error_cell(value: Any) -> str:
    return NOTHING if value is None else error(float(value))


def cold_method(timing: Mapping[str, Timing] | None) -> str:
    """The best method with a cold L2 that a timing block has; of a copy, the one its programs are held against."""
    return next((method for method in cold_words() if method in (timing or {})), TIMING_METHOD)


def cold_ms(timing: Mapping[str, Timing] | None, method: str) -> float | None:
    """The median (ms) of the samples of a method with a cold L2: not moved by one interrupted trial."""
    found = (timing or {}).get(method)
    if found is None:
        return None
    values = sorted(found.by_round())
    return values[len(values) // 2] if values else found.mean_ms


def gb_s(size_bytes: int, time_ms: float) -> float:
    return size_bytes / (time_ms * 1e-3) / 1e9
