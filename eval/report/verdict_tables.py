"""The tables of the papers that are about verdicts rather than times: headline, official, identity, stress, oracle.

Made from result files alone (keys of results.md). The official verdict has its own table and its own columns: nothing
of the other stages is merged into it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kbsub.eval.bench.timing import COLD_REPLAY
from kbsub.eval.report.tables import NOTHING, Table, by_round, ms, percent, programs, title_of, typical_ms
from kbsub.eval.results.model import Candidate, Result, Stress

HEADLINE_BASELINES = ("eager", "compile_default")
UNIFORM_WORDS = "equal_nan=True"


def official_ms(row: Candidate) -> float | None:
    """Upstream's own mean (ms) of a row that passed; None otherwise."""
    runtime = (row.official.model_extra or {}).get("runtime") if row.official is not None else None
    passed = row.official is not None and row.official.correctness
    return float(runtime) if passed and runtime is not None and runtime > 0 else None


def reference_ms(row: Candidate) -> float | None:
    """Upstream's mean (ms) of eager, timed by it right after this candidate."""
    runtime = (row.official.model_extra or {}).get("ref_runtime") if row.official is not None else None
    return float(runtime) if runtime is not None and runtime > 0 else None


def best(result: Result, contract: str | None = None, *, accurate: bool = False, precision: str = "fp32") -> str | None:
    """The fastest officially correct candidate of a contract, by upstream's own mean; accurate: the oracle's."""
    times = {}
    for name, row in programs(result, precision).items():
        if isinstance(row, Candidate) and (value := official_ms(row)) is not None:
            declared_accurate = bool((row.model_extra or {}).get("accurate"))
            if (accurate and declared_accurate) or (not accurate and row.contract == contract):
                times[name] = value
    return min(times, key=lambda name: times[name]) if times else None


def worst_case(row: Any, side: str = "candidate_max_abs") -> tuple[float, str] | None:
    """The largest max abs error of a row over the oracle's cases, and the case; None where none was measured.

    NaN (no number where the formula has one) is worse than any number.
    """
    found = [(float(case[side]), name) for name, case in oracle_of(row).items() if case.get(side) is not None]
    if not found:
        return None
    return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0])


def worst_error(row: Any, side: str = "candidate_max_abs") -> float | None:
    worst = worst_case(row, side)
    return None if worst is None else worst[0]


def oracle_of(row: Any) -> dict[str, Mapping[str, Any]]:
    """The oracle's cases of a candidate, or of a baseline that eval/measure/error_table.py measured. Errors may read "NaN"."""
    cases = getattr(row, "oracle", None) or (getattr(row, "model_extra", None) or {}).get("oracle") or {}
    return {name: case for name, case in cases.items() if isinstance(case, Mapping) and "candidate_max_abs" in case}


def error(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}" if math.isfinite(value) else str(value)


def worst_words(worst: tuple[float, str] | None) -> str:
    return NOTHING if worst is None else f"{error(worst[0])} ({worst[1]})"


def identity_words(row: Candidate) -> str:
    if row.bit_identity is None:
        return NOTHING
    return f"{row.bit_identity.identical}/{row.bit_identity.total}"


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
        mine, eager = official_ms(row), reference_ms(row)
        speedup = f"{eager / mine:.1f}x" if mine and eager else NOTHING
        contract = "accurate" if name == chosen[1] else row.contract or "undeclared"
        cells = [title_of(name), contract, ms(mine), speedup, identity_words(row), worst_words(worst_case(row))]
        table.rows.append(cells)
        eager_error = eager_error or worst_case(row, "reference_max_abs")
    eager_ms = typical_ms(rows["eager"].timing, "cuda_event") if "eager" in rows else None
    for name in HEADLINE_BASELINES:
        value = typical_ms(rows[name].timing, "cuda_event") if name in rows else None
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
            f"{environment_words(result)}. Candidates: upstream's evaluator (mean of 100 `cuda_event`, cold L2), "
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
        if row.official is None:
            reason = f"{row.status}: {row.reason or 'no reason given'}"
            table.rows.append([title_of(name), row.contract or "undeclared", *[NOTHING] * 7, reason])
            continue
        mine, eager = official_ms(row), reference_ms(row)
        flags = "excessive_speedup" if row.official.metadata.get("excessive_speedup") else NOTHING
        words = [str(row.official.compiled), str(row.official.correctness), row.official.trials or NOTHING]
        speedup = f"{eager / mine:.2f}x" if mine and eager else NOTHING
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
    return table


def checks_table(result: Result, precision: str = "fp32") -> Table:
    """What this project adds, a column each: bit identity, stress, oracle, guards."""
    headers = [
        "candidate",
        "contract",
        "bit-equal",
        "stress passed",
        "nearer",
        "apart",
        "failed",
        "refused",
        "skipped",
        "nearer than eager",
        "guards",
    ]
    table = Table(f"beyond the official check, {precision}", headers)
    for name, row in programs(result, precision).items():
        if not isinstance(row, Candidate) or not (row.bit_identity or row.stress or row.oracle or row.guards):
            continue
        stress = row.stress
        counts = stress_counts(stress)
        cases = [case for case in (row.oracle or {}).values() if isinstance(case, Mapping) and "nearer" in case]
        nearer = f"{sum(case['nearer'] == 'candidate' for case in cases)}/{len(cases)}" if cases else NOTHING
        guards = (
            NOTHING if row.guards is None else "clean" if row.guards.clean else f"{len(row.guards.findings)} findings"
        )
        table.rows.append([title_of(name), row.contract or "undeclared", identity_words(row), *counts, nearer, guards])
    if table.rows:
        table.notes = [
            f"{environment_words(result)}. Stress: {UNIFORM_WORDS}; never part of the official verdict. Nearer: away "
            "from eager, and nearer to float64 than it; apart: beyond what fp32 can hold, not judged; refused: a clear "
            "ValueError; skipped: not of this precision."
        ]
    return table


def stress_counts(stress: Stress | None) -> list[str]:
    """Cases by how they ended, in the order of the checks table's columns; an older result may lack a kind."""
    if stress is None:
        return [NOTHING] * 6
    more = stress.model_extra or {}
    counts = (stress.passed, more.get("nearer_than_reference"), more.get("apart"))
    return [NOTHING if n is None else str(n) for n in (*counts, stress.failed, stress.refused, stress.skipped)]


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
        reference = next((entry["reference_max_abs"] for entry in entries if entry), None)
        reference = native[case]["candidate_max_abs"] if case in native else reference
        cells = [_error_cell(entry["candidate_max_abs"] if entry else None) for entry in entries]
        table.rows.append([case, _error_cell(reference), *cells])
    if table.rows:
        table.notes = [
            f"{environment_words(result)}. Cases are rows of the stress suite; lower is nearer to the formula."
        ]
    return table


def _error_cell(value: Any) -> str:
    return NOTHING if value is None else error(float(value))


COLD = {  # method -> what it is, best first
    COLD_REPLAY: "graph replay over a ring of buffers larger than the L2 (`cold_replay`)",
    "cuda_event": "upstream's `cuda_event`, which flushes it between calls and times the launch too",
}


def cold_method(timing: Mapping[str, Any] | None) -> str:
    """The best method with a cold L2 that a timing block has; of a copy, the one its programs are held against."""
    return next((method for method in COLD if method in (timing or {})), "cuda_event")


def cold_ms(timing: Mapping[str, Any] | None, method: str) -> float | None:
    """The median (ms) of the samples of a method with a cold L2: not moved by one interrupted trial."""
    found = (timing or {}).get(method)
    if found is None:
        return None
    values = sorted(by_round(found))
    return values[len(values) // 2] if values else found.mean_ms


def gb_s(size_bytes: int, time_ms: float) -> float:
    return size_bytes / (time_ms * 1e-3) / 1e9
