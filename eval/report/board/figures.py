"""The figures of a leaderboard from the rows of run folders: pass@k, fast_p, geometric mean as upstream defines them.

Upstream, at the pin: pass@k (scripts/eval_from_generations.py) takes every sample; fast_p and the geometric mean
(scripts/benchmark_eval_analysis.py, src/kernelbench/score.py) take sample 0 of each problem and divide by all problems
of the level. What this project adds stands in columns beside them and changes none. Knows rows; imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.adapters.pin import PIN
from kbsub.eval.run.batch.rows import official_entry, problems_of, read_row
from kbsub.eval.run.batch.samples import ROWS_FOLDER
from kbsub.eval.tasks.sizes import recorded
from kbsub.eval.verdicts.register import KINDS

THRESHOLDS = (0.0, 0.5, 0.8, 1.0, 1.5, 2.0)  # upstream's p
Baseline = Mapping[tuple[int, int], float]  # (level, problem) -> ms
SCHEMA = 1
WHAT = "leaderboard"


class BoardError(Exception):
    """There is nothing to show, or a file is not what it is said to be; the message names it."""


def read_rows(folders: Sequence[Path]) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """(row file, run, row) of every row of the folders. run: the folder's name and, in a tree, the one below it.

    BoardError for a folder without rows, and for two folders of one name.
    """
    names = [folder.resolve().name for folder in folders]
    if twice := {name for name in names if names.count(name) > 1}:
        raise BoardError(f"two folders are called {', '.join(sorted(twice))}: their rows could not be told apart")
    for folder, name in zip(folders, names, strict=True):
        some = False
        for path in sorted((folder / ROWS_FOLDER).rglob("*.json")):
            if (row := read_row(path)) is not None:
                some = True
                yield path, f"{name}/{row['run']}" if row["run"] else name, row
        if not some:
            raise BoardError(f"{folder}: holds no rows; make them with: kbsub eval {folder}")


def read_baseline(path: Path) -> Baseline:
    """The means (ms) of a baseline in KernelBench's format, {"level1": {"40_LayerNorm.py": {"mean": ...}}}."""
    found = {}
    try:
        for level, problems in json.loads(path.read_text("utf-8")).items():
            for name, times in problems.items():
                match, number = re.fullmatch(r"level(\d+)", level), re.match(r"(\d+)_", name)
                if match and number:
                    found[int(match[1]), int(number[1])] = float(times["mean"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BoardError(f"{path}: is no baseline in KernelBench's format: {error}") from error
    if not found:
        raise BoardError(f"{path}: holds no level<L> with problems; make one with: kbsub baseline")
    return found


def line_of(path: Path, run: str, row: Mapping[str, Any], baseline: Baseline | None = None) -> dict[str, Any]:
    """A row of the board. Times in ms; speedup: the baseline's mean over the candidate's, else upstream's eager, which
    it times right after. correct: upstream's word, null where it has none."""
    entry = official_entry(row)
    said, own = row.get("official") or {}, row.get("source") or {}
    correct = None if entry is None else bool(entry["compiled"] and entry["correctness"])
    ms = said.get("runtime") if correct and (said.get("runtime") or -1) > 0 else None
    reference = baseline.get((row["level"], row["problem_id"])) if baseline else said.get("ref_runtime")
    records = {name: _record(name, row) for name in ("guards", "referee", "stress")}
    guards, referee = records["guards"], records["referee"]
    environment = row.get("environment") or {}
    return {
        "run": run,
        "level": row["level"],
        "problem": row["problem_id"],
        "sample": row["sample_id"],
        "status": row["status"],
        "compiled": None if entry is None else bool(entry["compiled"]),
        "correct": correct,
        "ms": ms,
        "reference_ms": reference if reference and reference > 0 else None,
        "speedup": reference / ms if ms and reference and reference > 0 else None,
        "overrides": sorted(own.get("overrides") or {}) if row.get("source") else None,
        "own_namespace": _passed(own.get("own_namespace")),
        "own_speedup": own.get("own_speedup"),
        "guards": None if guards is None else [str(each.get("guard")) for each in guards.findings],
        "referee": None if referee is None else bool(referee.good),
        "referee_ms": None if referee is None else referee.ms,
        "stress_failed": None if records["stress"] is None else records["stress"].failed,
        "blind_spots": row.get("blind_spots"),
        "problems": problems_of(row),
        "seconds": row["seconds"],
        "gpu": environment.get("gpu"),
        "torch": environment.get("torch"),
        "sha256": row["sha256"],
        "evidence": str(path),
    }


def _record(name: str, row: Mapping[str, Any]) -> Any:
    kind = KINDS[name]
    return None if row.get(kind.key) is None else kind.record.model_validate(row[kind.key])


def _passed(said: Mapping[str, Any] | None) -> bool | None:
    return None if said is None else bool(said.get("compiled") and said.get("correctness"))


def board(folders: Sequence[Path], baseline: Baseline | None = None, ks: Sequence[int] = (1,)) -> dict[str, Any]:
    """Everything that is shown: rows, and figures a run and level, and a problem."""
    lines = [line_of(path, run, row, baseline) for path, run, row in read_rows(folders)]
    lines.sort(key=lambda line: (line["run"], line["level"], line["problem"], line["sample"]))
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    problems: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["run"], line["level"]), []).append(line)
        problems.setdefault((line["level"], line["problem"]), []).append(line)
    return {
        "schema": SCHEMA,
        "what": WHAT,
        "pin": PIN,
        "baseline": "a file of means" if baseline else "eager, timed by upstream right after each candidate",
        "k": list(ks),
        "runs": [
            {"run": run, "level": level, **run_figures(group, level, baseline, ks)}
            for (run, level), group in groups.items()
        ],
        "problems": [
            {"level": level, "problem": problem, **problem_figures(group, ks)}
            for (level, problem), group in sorted(problems.items())
        ],
        "rows": lines,
    }


def read_board(path: Path) -> dict[str, Any]:
    """The board that `kbsub leaderboard` wrote as JSON. BoardError for anything else."""
    try:
        made = json.loads(path.read_text("utf-8"))
        if made["what"] != WHAT or made["schema"] != SCHEMA:
            raise ValueError(f"{made['what']}, schema {made['schema']}")
        if not all(isinstance(made[key], list) for key in ("runs", "problems", "rows", "k")):
            raise ValueError("its tables are none")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BoardError(f"{path}: is no board of this version: {error}; make one of run folders") from error
    return dict(made)


def run_figures(
    lines: Sequence[Mapping[str, Any]], level: int, baseline: Baseline | None, ks: Sequence[int]
) -> dict[str, Any]:
    """The figures of one run at one level. total: the problems that fast_p is divided by, upstream's: those of the
    level that have a baseline. untimed: correct in sample 0 and without a time, which the geometric mean leaves out.
    """
    judged = [line for line in lines if line["correct"] is not None]
    first = {line["problem"]: line for line in judged if line["sample"] == 0}
    known = baseline.keys() if baseline else [_numbers(slug) for slug in recorded().tasks]
    problems = {problem for each, problem in known if each == level}
    counted = [line for problem, line in first.items() if problem in problems]
    speedups = [line["speedup"] for line in counted if line["correct"] and line["speedup"] is not None]
    return {
        "rows": len(lines),
        "judged": len(judged),
        "problems": len({line["problem"] for line in lines}),
        "total": len(problems),
        "compiled": sum(bool(line["compiled"]) for line in counted),
        "correct": sum(bool(line["correct"]) for line in counted),
        "untimed": sum(bool(line["correct"]) and line["speedup"] is None for line in counted),
        "geometric_mean": geometric_mean(speedups),
        "fast_p": {str(p): fast_p(speedups, p, len(problems)) for p in THRESHOLDS},
        "fast_p_of_judged": {str(p): fast_p(speedups, p, len(first)) for p in THRESHOLDS},
        **averages(judged, ks),
        **beside(lines),
    }


def problem_figures(lines: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> dict[str, Any]:
    """The figures of one problem over all runs. best: the fastest that upstream calls correct."""
    judged = [line for line in lines if line["correct"] is not None]
    right = [line for line in judged if line["correct"] and line["speedup"] is not None]
    best = max(right, key=lambda line: float(line["speedup"]), default=None)
    named = {"best_run": best["run"], "best_sample": best["sample"], "best_speedup": best["speedup"]} if best else {}
    figures = {"rows": len(lines), "judged": len(judged), "correct": sum(bool(line["correct"]) for line in judged)}
    spots = next((line["blind_spots"] for line in lines if line["blind_spots"]), None)
    count, good = len(judged), figures["correct"]
    passed = {f"pass@{min(k, count)}": pass_at_k(count, good, min(k, count)) for k in ks} if judged else {}
    return {**figures, **passed, **named, **beside(lines), "blind_spots": spots}


def beside(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """What upstream's verdict does not say of these rows: counts."""
    lines = list(lines)
    right = [line for line in lines if line["correct"]]
    return {
        "on_other_inputs": sum(bool(line["overrides"]) for line in lines),
        "wrong_in_own_namespace": sum(line["own_namespace"] is False for line in right),
        "caught_by_guards": sum(bool(line["guards"]) for line in lines),
        "refused_by_referee": sum(line["referee"] is False for line in lines),
        "failed_stress": sum(bool(line["stress_failed"]) for line in lines),
        "with_blind_spots": sum(line["blind_spots"] is not None for line in lines),
    }


def pass_at_k(n: int, c: int, k: int) -> float:
    """Upstream's unbiased estimate: the chance that one of k of n samples, c of them correct, is correct."""
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def averages(judged: Sequence[Mapping[str, Any]], ks: Sequence[int]) -> dict[str, float | None]:
    """Upstream's avg_pass@k: the mean over the problems; one with fewer than k samples counts as nothing in it."""
    samples: dict[int, list[bool]] = {}
    for line in judged:
        samples.setdefault(line["problem"], []).append(bool(line["correct"]))
    found: dict[str, float | None] = {}
    for k in ks:
        each = [pass_at_k(len(good), sum(good), k) for good in samples.values() if len(good) >= k]
        found[f"pass@{k}"] = sum(each) / len(samples) if samples else None
    return found


def geometric_mean(speedups: Sequence[float]) -> float:
    """Upstream's, 0 where nothing is correct; by logarithms, so that many rows cannot overflow."""
    return math.exp(sum(map(math.log, speedups)) / len(speedups)) if speedups else 0.0


def fast_p(speedups: Sequence[float], p: float, n: int) -> float:
    """Upstream's: the share of n problems that are correct and more than p times as fast as the baseline."""
    return sum(speedup > p for speedup in speedups) / n if n else 0.0


def _numbers(slug: str) -> tuple[int, int]:
    level, _, problem = slug.removeprefix("level").partition("_")
    return int(level), int(problem)
