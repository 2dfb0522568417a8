"""Measures what the cell costs: official verdicts of an nvcc, a Triton, an inductor and a CuPy program, inside and out.

    kbsub measure cell --out results/h200/cell.json

Each program of tests/cell_programs is judged by upstream's evaluator (5 trials, 100 timed) inside its cell and in a
plain child, in turn, so that what drifts moves both. First each runs once uncounted on either side: nothing is compiled
beside a clock that counts. Also what the kernel grants a process on either side (cell_facts.py). The file is written
after every round; --only keeps the other programs' rows, where GPU and versions are the same. Exit code 1 when a
verdict is not "correct 5/5" or a ratio inside/outside is more than 2% off 1. Run it with the GPU and the host's cores
to itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kbsub.adapters.checkout import find_checkout
from kbsub.eval.bench.compare import compare
from kbsub.eval.process.cell import LEVELS, Cell, probe
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.manifest import digest
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.machine_facts import gpu_index, gpu_name, measured_on, no_such_gpu
from kbsub.eval.run.project import project_path
from kbsub.eval.tasks.cell import cell_of

FOLDER = "tests/cell_programs"  # of a checkout
TASK = "level1_40"
OFFICIAL, FACTS = "kbsub.eval.verdicts.official.judge:judge", "kbsub.eval.measure.children.cell_facts:facts"
MARGIN = 0.02
ALL_TRIALS = "(5 / 5)"
SIDES = ("inside", "outside")
SAME_MACHINE = ("gpu", "driver", "torch", "cuda", "cupy", "kernelbench_commit")  # what rows of one file have in common
LIMIT_S = 400.0

Run = Callable[[str], dict[str, Any]]  # a side -> the record of one official run there
Keep = Callable[[dict[str, Any]], None]


def official(file: Path, cell: Cell, shared: Mapping[str, Any], side: str) -> dict[str, Any]:
    """One official run: {status, message, trials, correct, ms, min_ms, reference_ms, seconds, confined}.

    Times are upstream's, ms, rounded by it to 3 digits; seconds: of the whole process. confined: null outside.
    """
    source = file.read_text("utf-8")
    payload = {**shared, "candidate": file.name, "candidate_source": source, "stem": file.stem, "declaration": {}}
    outcome = run_isolated(OFFICIAL, payload, timeout_s=LIMIT_S, cell=cell if side == "inside" else None)
    return row_of(outcome)


def row_of(outcome: Outcome) -> dict[str, Any]:
    said = (outcome.value or {}).get("official") or {}
    verdict = (outcome.value or {}).get("verdict") or {}
    ended = outcome.status.value if outcome.status is not Status.OK else verdict.get("status")
    return {
        "status": ended,
        "message": outcome.message or verdict.get("reason") or "",
        "trials": said.get("trials"),
        "correct": bool(said.get("compiled") and said.get("correctness") and said.get("trials") == ALL_TRIALS),
        "ms": said.get("runtime"),
        "min_ms": (said.get("runtime_stats") or {}).get("min"),
        "reference_ms": said.get("ref_runtime"),
        "seconds": round(outcome.seconds, 2),
        "confined": outcome.confined,
        **({"log": outcome.log[-2000:]} if ended != Status.OK.value else {}),
    }


def in_turn(programs: Mapping[str, Run], rounds: int, keep: Keep) -> dict[str, dict[str, Any]]:
    """Every program once uncounted on both sides, all at a time, since building is most of it; then `rounds` times on
    both, one after the other, the first side changing every round.

    `keep` gets every program's record after each round. A program that fails uncounted is not run again.
    """
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(max(1, len(SIDES) * len(programs))) as pool:
        begun = {name: {side: pool.submit(run, side) for side in SIDES} for name, run in programs.items()}
        for name, sides in begun.items():
            warm_up = {side: run.result() for side, run in sides.items()}
            found[name] = {"warm_up": warm_up, "runs": {side: [] for side in SIDES}}
            found[name] |= summary(found[name])
            keep(found)
    for number in range(rounds):
        for name, run in programs.items():
            if all(each["correct"] for each in found[name]["warm_up"].values()):
                for side in SIDES if number % 2 == 0 else reversed(SIDES):
                    found[name]["runs"][side].append(run(side))
                found[name] |= summary(found[name])
        keep(found)
    return found


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Of one program: medians in ms, inside over outside with its interval (compare.py), and whether the aim is met.

    reference: the same of eager, which upstream times in the same runs. `holds`: every run correct 5/5, the ratio
    within 2% of 1; `certain`: the whole interval is, which needs eight rounds.
    """
    runs = {side: list(found["runs"][side]) for side in SIDES}
    every = [*found["warm_up"].values(), *runs["inside"], *runs["outside"]]
    correct = all(run["correct"] for run in every)
    if not (correct and runs["inside"]):
        return {"correct": correct, "holds": False, "certain": False}
    ratio, reference = (ratio_of(runs, key) for key in ("ms", "reference_ms"))
    medians = {side: statistics.median(run["ms"] for run in runs[side]) for side in SIDES}
    holds = abs(ratio["ratio"] - 1) <= MARGIN
    return {
        "correct": correct,
        "median_ms": medians,
        **ratio,
        "reference": reference,
        "holds": holds,
        "certain": ratio["verdict"] == "SAME",
    }


def ratio_of(runs: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> dict[str, Any]:
    """{ratio, low, high, rounds, verdict} of inside over outside, paired by round: a median and its 95% interval."""
    found = compare(*([run[key] for run in runs[side]] for side in SIDES), margin=MARGIN)
    numbers = {name: round(getattr(found, name), 5) for name in ("ratio", "low", "high")}
    return {**numbers, "rounds": found.rounds, "verdict": found.verdict.value}


def process_facts(cell: Cell) -> dict[str, Any]:
    """What a process is granted on either side; "differs": what is not the same. ValueError without answers."""
    found = {side: run_isolated(FACTS, {}, timeout_s=60, cell=cell if side == "inside" else None) for side in SIDES}
    for side, outcome in found.items():
        if outcome.value is None:
            raise ValueError(f"the process {side} gave no facts: {outcome.status}: {outcome.message}")
    inside, outside = (dict(found[side].value or {}) for side in SIDES)
    names = inside["grants"].keys() | outside["grants"].keys()
    pairs = {name: [each["grants"].get(name) for each in (inside, outside)] for name in sorted(names)}
    return {
        "differs": {name: dict(zip(SIDES, pair, strict=True)) for name, pair in pairs.items() if pair[0] != pair[1]},
        "same": {name: pair[0] for name, pair in pairs.items() if pair[0] == pair[1]},
        "variables_only_outside": sorted(set(outside["variables"]) - set(inside["variables"])),
        "host_us": {side: each["host_us"] for side, each in zip(SIDES, (inside, outside), strict=True)},
    }


def kept(text: str, environment: Mapping[str, Any] | None, fresh: Sequence[str], confined: str) -> dict[str, Any]:
    """Rows of an earlier file that may stay beside new ones: same machine, versions and cell. {} where they may not."""
    before = json.loads(text)
    there = before.get("environment") or {}
    if any(there.get(key) != (environment or {}).get(key) for key in SAME_MACHINE) or before.get("cell") != confined:
        return {}
    return {name: row for name, row in before["programs"].items() if name not in fresh}


def in_words(name: str, row: Mapping[str, Any]) -> str:
    if not row["correct"]:
        runs = [*row["warm_up"].values(), *(run for side in SIDES for run in row["runs"][side])]
        wrong = next(run for run in runs if not run["correct"])
        return f"{name}: not correct 5/5: {wrong['status']} {wrong['trials']} {wrong['message'][:300]}"
    if "ratio" not in row:
        return f"{name}: correct 5/5 on both sides; no counted round yet"
    return (
        f"{name}: {row['median_ms']['inside']:g} ms inside, {row['median_ms']['outside']:g} outside; ratio "
        f"{row['ratio']:.4f} ({row['low']:.4f} to {row['high']:.4f}, {row['rounds']} rounds: {row['verdict']} within "
        f"{MARGIN:.0%}); eager's {row['reference']['ratio']:.4f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 every program correct on both sides and within 2%; 1 one is not; 2 usage."""
    parser = argparse.ArgumentParser(prog="kbsub measure cell", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="programs, by comma; the other rows of an existing file are kept")
    parser.add_argument("--rounds", type=int, default=8, help="counted runs on each side; below 8 no interval")
    parser.add_argument("--programs", type=Path, help=f"their folder; default: {FOLDER} of the checkout")
    parser.add_argument("--level", choices=LEVELS[:-1], help="the cell; default: the best that this machine has")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernelbench", type=Path, help="the checkout; default: as kbsub fetch left it")
    options = parser.parse_args(arguments)
    try:
        gpu = gpu_name(gpu_index(options.device))
    except ValueError as error:
        parser.error(str(error))
    if gpu is None:
        parser.error(no_such_gpu(options.device))
    found = probe(options.level)
    if found.level == LEVELS[-1] or (options.level and found.level != options.level):
        parser.error(f"this machine has no such cell, so there is nothing to compare: {found}")
    try:
        folder = (options.programs or project_path(FOLDER, "--programs")).resolve()
    except FileNotFoundError as error:
        parser.error(str(error))
    files = {file.stem: file for file in sorted(folder.glob("*.py"))}
    names = options.only.split(",") if options.only else list(files)
    if unknown := [name for name in names if name not in files]:
        parser.error(f"--only {unknown[0]}: there are {', '.join(files)}")
    checkout = str(find_checkout(options.kernelbench).path)
    shared = {
        "task": TASK,
        "precision": "fp32",
        "kernelbench": checkout,
        "device": options.device,
        "timeout_s": LIMIT_S,
    }
    cells = {
        name: dataclasses.replace(cell_of([digest(files[name])], TASK, checkout), level=options.level) for name in names
    }
    environment = measured_on(options.device)
    content: dict[str, Any] = {
        "schema": 1,
        "what": "upstream's official verdict and time of the same files inside a cell and in a plain child, in turn",
        "cell": str(found),
        "environment": environment,
        "process": process_facts(cells[names[0]]),
        "programs": {},
    }
    if options.only and options.out.is_file():
        try:
            content["programs"] = kept(options.out.read_text("utf-8"), environment, names, str(found))
        except (AttributeError, KeyError, ValueError) as fault:
            parser.error(f"{options.out}: cannot be joined with this run: {fault}")

    def keep(rows: dict[str, dict[str, Any]]) -> None:
        fresh = {name: {"sha256": digest(files[name]), **row} for name, row in rows.items()}
        there = {**content["programs"], **fresh}
        content["programs"] = {name: there[name] for name in sorted(there)}
        write_json_atomic(options.out, content)
        for name, row in rows.items():
            print(in_words(name, row), flush=True)

    def run_of(name: str) -> Run:
        return lambda side: official(files[name], cells[name], shared, side)

    in_turn({name: run_of(name) for name in names}, options.rounds, keep)
    held = sum(row["holds"] for row in content["programs"].values())
    print(f"{held} of {len(content['programs'])} programs hold. Written to {options.out}")
    return 0 if held == len(content["programs"]) else 1
