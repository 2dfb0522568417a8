"""The table of what else was measured on a GPU: twins, compute-sanitizer, the sweep, wall time, the cell, two GPUs.

Each record is a JSON file of its own beside the results (made by `kbsub measure`, or by hand where something could
not be measured: `measured` null and `why`). Knows their keys; a record that is not there has no row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kbsub.eval.report.freshness import MARK, SHOWN, digest_of
from kbsub.eval.report.tables import Table
from kbsub.eval.results.model import ResultError
from kbsub.eval.tasks.sizes import recorded

Record = Mapping[str, Any]
Stale = list[tuple[str, str]]  # (file below the root, measured sha256) of what has changed since
Cells = tuple[str, str, Stale, str]  # what was asked, what came out, stale files, the command that measures again


def evidence_table(folder: Path, root: Path) -> Table:
    """One row a record of `folder`; files named by a record that are not as measured are marked, with a footnote.

    ResultError for a record that is broken.
    """
    table = Table("other evidence", ["record", "question", "outcome"], prose=True)
    for name, cells in ROWS.items():
        path = folder / f"{name}.json"
        if not path.is_file():
            continue
        try:
            question, outcome, stale, command = cells(json.loads(path.read_text("utf-8")), root)
        except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError) as problem:
            words = f"is no record of this kind ({type(problem).__name__}: {problem}); measure it again, or remove it"
            raise ResultError(f"{path}: {words}") from problem
        label = f"`{path.relative_to(root).as_posix()}`"
        table.rows.append([label + (MARK if stale else ""), question, outcome])
        if stale:
            files = ", ".join(f"{file} (sha256 {sha256[:SHOWN]}…)" for file, sha256 in stale)
            words = f"measured on an earlier version of {files}; run `{command} --out {label.strip('`')}` on a GPU"
            table.notes.append(f"{MARK} {label}: {words} to renew it.")
    return table


def changed(measured: Mapping[str, str], root: Path) -> Stale:
    """The files (below the root) whose sha256 is not the measured one."""
    return [(file, sha256) for file, sha256 in measured.items() if digest_of(root / file) != sha256]


def listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def twins(record: Record, root: Path) -> Cells:
    found: Mapping[str, Any] = record["twins"]
    rows = list(found.values())
    held, caught = (sum(row[key] is True for row in rows) for key in ("label_holds", "caught"))
    passing = sum(row["passes_upstream"] is True for row in rows)
    outcome = f"{caught} of {len(rows)} caught by what is named for it; {passing} of them pass upstream's check"
    outcome += f"; {held} of {len(rows)} labels (passes upstream or not) hold"
    stale = changed({f"tests/twins/{name}.py": row["sha256"] for name, row in found.items()}, root)
    return "Are deliberately bad candidates caught?", outcome, stale, "kbsub measure twins"


def sanitizer(record: Record, root: Path) -> Cells:
    tools = [tool for tool in record["runs"] if tool != "none"]
    run = {name for tool in tools for name in record["runs"][tool]}  # a record may list files that it did not run
    files = {name: each for name, each in record["files"].items() if name in run}
    states = [row["state"] for tool in tools for row in _runs(record, tool)]
    clean = sum(state == "clean" for state in states)
    kernels = sum(len(each["kernels"]) for each in files.values())
    planted = sum(each["found"] is True for each in record["planted"].values())
    outcome = f"{record['verdict']}: {clean} of {len(states)} runs, {kernels} kernels of {len(files)} files under "
    outcome += f"{listed(tools)}; {planted} of {len(record['planted'])} planted faults found"
    stale = changed({f"submissions/{name}": each["sha256"] for name, each in files.items()}, root)
    question = "Does compute-sanitizer find anything in a kernel?"
    return question, outcome, stale, "kbsub measure sanitizer --workers 10"


def _runs(record: Record, tool: str) -> list[Record]:
    return [row for precisions in record["runs"][tool].values() for row in precisions.values()]


def sweep(record: Record, root: Path) -> Cells:
    found, grid, bits = record["summary"], record["grid"], record["summary"]["native_bits"]
    outcome = f"{found['pairs']} files and dtypes x {grid['shapes']:,} shapes: {found['right']:,} right, "
    outcome += (
        f"{found['refused']:,} refused in the file's own words, {found['declared_failure']:,} declared failures, "
    )
    errors = found["driver_error"] + found["other_error"] + found["not_run"]
    outcome += f"**{found['wrong']:,} wrong, {errors:,} errors**"
    if bits["compared"]:
        outcome += f"; native's own bits at {bits['equal']:,} of {bits['compared']:,} shapes where they are promised"
    stale = changed({f"submissions/{name}": each["sha256"] for name, each in record["candidates"].items()}, root)
    question = (
        f"Is every candidate right at every shape, {len(grid['rows'])} row counts x {len(grid['widths'])} widths?"
    )
    return question, outcome, stale, "kbsub measure sweep --resume"


def wall_time(record: Record, root: Path) -> Cells:
    candidate = record["candidate"]
    medians = [f"`{name}` {seconds:.1f} s" for name, seconds in record["median_s"].items()]
    counts = {len(seconds) for seconds in record["seconds"].values()}
    runs = f"median of {max(counts)} runs each" if max(counts) > 1 else "one run each"
    outcome = f"{listed(medians)} ({runs}{', after one uncounted' if record.get('warm_up') else ''}; "
    outcome += "the script also times eager and torch.compile)"
    stale = changed({candidate["file"]: candidate["sha256"]}, root)
    question = f"How long does one official verdict on `{Path(candidate['file']).stem}` take, the whole process?"
    return question, outcome, stale, "kbsub measure wall_time"


def cell(record: Record, root: Path) -> Cells:
    rows: Mapping[str, Any] = record["programs"]
    words = []
    for name, row in rows.items():
        said = f"`{name}` "
        if row["correct"] and "ratio" in row:
            median, interval = row["median_ms"], f"{row['low']:.3f} to {row['high']:.3f}, {row['rounds']} rounds"
            said += f"{median['inside']:g} ms inside, {median['outside']:g} outside: {row['ratio']:.3f} ({interval})"
        words.append(said if row["correct"] else f"{said}**not correct 5/5**")
    outcome = f"{record['cell']}: {listed(words)}"
    stale = changed({f"tests/cell_programs/{name}.py": row["sha256"] for name, row in rows.items()}, root)
    return "Does a cell change an official verdict or its time?", outcome, stale, "kbsub measure cell"


def batch(record: Record, root: Path) -> Cells:
    measured = record["measured"]
    if measured is None:
        return record["what"], f"**not measured**: {record['why']}", [], record["command"]
    one, two = measured["one_gpu_s"], measured["two_gpus_s"]
    return record["what"], f"{two:.0f} s on two, {one:.0f} s on one: {two / one:.2f}", [], record["command"]


def tasks(record: Record, root: Path) -> Cells:
    rows: Mapping[str, Any] = record["rows"]
    ends = Counter(row["ended"] for row in rows.values())
    outcome = (
        f"{len(rows)} of {len(recorded().tasks)} problems at the {record['how']['size']} size: {ends['passed']} pass "
    )
    outcome += f"{listed(record['how']['stages'])}, {ends['not checked']} say what could not be asked, and why, "
    outcome += f"**{ends['failed']} failed**"
    question = "Does the reference of each of KernelBench's problems pass every check as its own candidate?"
    return question, outcome, [], "kbsub measure tasks"


def corpus(record: Record, root: Path) -> Cells:
    rows: Mapping[str, Any] = record["rows"]
    judged = [row["stages"]["source"] for row in rows.values() if "source" in row["stages"]]
    official = [row["stages"]["official"] for row in rows.values() if "official" in row["stages"]]
    own = [found["own_namespace"] for found in judged if found.get("own_namespace")]
    outcome = (
        f"{len(rows)} files: {sum(each.get('correctness') is True for each in official)} of {len(official)} correct "
    )
    outcome += (
        f"by the official verdict; {sum(bool(each.get('overrides')) for each in judged)} redefine names of their "
    )
    outcome += f"task, and of {len(own)} judged in a namespace of their own "
    outcome += f"{sum(each.get('correctness') is True for each in own)} are correct"
    return "What do the checks say of a public corpus?", outcome, [], "kbsub measure tasks --corpus FILE"


ROWS: Mapping[str, Callable[[Record, Path], Cells]] = {
    "twins": twins,
    "sanitizer": sanitizer,
    "sweep": sweep,
    "wall_time": wall_time,
    "cell": cell,
    "batch": batch,
    "tasks": tasks,
    "corpus": corpus,
}


# ---- the table of all problems ----

STAGES = ("identity", "stress", "oracle", "guards")


def tasks_table(record: Record) -> Table:
    """A line a problem that `kbsub measure tasks` judged with its own reference as the candidate.

    The notes say what was measured, how many problems of each level, and how many are left.
    """
    table = Table("every problem, its reference as the candidate", ["task", *STAGES, "not asked, and why"], prose=True)
    for name, row in record["rows"].items():
        cells = [_stage_words(stage, row["stages"].get(stage)) for stage in STAGES]
        table.rows.append([name.replace("level", "L").replace("_", "/"), *cells, _not_asked(row)])
    made = record["environment"] or {}
    where = f"{made.get('gpu') or 'CPU'}, torch {made.get('torch')}, the {record['how']['size']} size"
    parts = []
    for level in (1, 2, 3):
        of = [row["ended"] for name, row in record["rows"].items() if name.startswith(f"level{level}_")]
        known, ends = sum(name.startswith(f"level{level}_") for name in recorded().tasks), Counter(of)
        words = [f"{count} {end}" for end, count in ends.items()] + [f"{known - len(of)} not measured yet"]
        parts.append(f"level {level}: {', '.join(words if known > len(of) else words[:-1])}")
    table.notes = [
        f"{where}. {'; '.join(parts)}. {sum(row['seconds'] for row in record['rows'].values()):.0f} s in all."
    ]
    return table


def _stage_words(stage: str, told: Record | None) -> str:
    if told is None:
        return "-"
    if told["status"] != "OK":
        return str(told["status"])
    if stage == "identity":
        return f"{told['identical']}/{told['total']}"
    if stage == "oracle":
        return f"{told['cases']} cases"
    if stage == "guards":
        return f"{told['checked']} asked, {'clean' if told['clean'] else '**' + ', '.join(told['findings']) + '**'}"
    more = [f"{told[key]} {key}" for key in ("apart", "refused") if told.get(key)]
    failed = [f"**{told['failed']} failed: {', '.join(told['first_failed'])}**"] if told["failed"] else []
    return ", ".join([f"{told['passed'] + told['nearer_than_reference']} passed", *more, *failed])


def _not_asked(row: Record) -> str:
    """Why stages ended as they did, then why cases and guards were left out; like reasons together."""
    words: dict[str, list[str]] = {}
    for stage, told in row["stages"].items():
        if told.get("why"):
            words.setdefault(told["why"], []).append(stage)
    stress, guards = row["stages"].get("stress", {}), row["stages"].get("guards", {})
    for why, count in (stress.get("not_asked") or {}).items():
        words.setdefault(why, []).append(f"{count} cases" if count > 1 else "1 case")
    reasons = guards.get("not_checked") or {}
    for name, why in reasons.items() if isinstance(reasons, Mapping) else ():
        words.setdefault(why, []).append(name)
    return "; ".join(f"{', '.join(who)}: {why}" for why, who in words.items()) or "-"
