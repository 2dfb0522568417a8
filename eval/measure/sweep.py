"""`kbsub measure sweep`: every candidate in every dtype it declares, at every shape of a grid, against float64.

A task takes part when its task.toml has a [[grid]], which says how rows and a width become a call. The parent's half:
which files, which shapes, a child process each (sweep_child.py), what is done again after a child died, and the record.
Imports no torch. A finished pair of file and dtype is written at once, so an interrupted run keeps it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.tasks.declarations import Declaration, read_declarations
from kbsub.eval.tasks.grid import GridShape
from kbsub.eval.tasks.task_file import needs_checkout, read_task_file, swept_folders, task_text

TARGET = "kbsub.eval.measure.children.sweep_child:judge"
FINE = ("right", "refused", "declared_failure")
FAULTS = ("wrong", "driver_error", "other_error", "not_run")
MOST_RESTARTS = 20  # of one candidate in one dtype: a file that dies everywhere says so after these
SAME_MACHINE = ("gpu", "driver", "torch", "cuda", "cupy", "nvrtc")  # what the entries of one record have in common

Row = dict[str, Any]  # one shape: sweep_child.judge says what is in it


class SweepError(ValueError):
    """A call that cannot be carried out, in words for the person who made it."""


@dataclass(frozen=True)
class Grid:
    """Row counts x widths, less those above `most_elements`."""

    name: str
    rows: tuple[int, ...]
    widths: tuple[int, ...]
    most_elements: int

    def shapes(self) -> list[tuple[int, int]]:
        """(rows, width), those of one width together, as the child wants them."""
        pairs = [(rows, width) for width in self.widths for rows in self.rows]
        return [(rows, width) for rows, width in pairs if rows * width <= self.most_elements]

    def calls(self, grid: Sequence[GridShape]) -> dict[str, tuple[int, int, int]]:
        """{name: (which of the task's grids, rows, width)}, those of one grid and width together; no too large one."""
        pairs = self.shapes()
        made = [((which, *pair), each.at(*pair)) for which, each in enumerate(grid) for pair in pairs]
        return {shape.name: asked for asked, shape in made if shape.elements <= self.most_elements}

    def to_json(self) -> dict[str, Any]:
        lists = {"rows": list(self.rows), "widths": list(self.widths)}
        return {"name": self.name, **lists, "most_elements": self.most_elements, "shapes": len(self.shapes())}


GRIDS = {
    # 28 x 41. Rows: odd ones, both sides of powers of two, 132 and 133 (an H200's multiprocessors, and one more), and
    # 65,536 and 65,537 (beyond a grid's y). Widths: both sides of a vector, a warp, a block; where a kernel of some
    # file ends (8,192, 16,384, 32,768) and what lies just above; hidden sizes of models; the official width.
    "full": Grid(
        "full",
        (1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 31, 32, 33, 64, 100, 127, 129, 132, 133, 255, 257, 513, 1000, 1025, 4096,
         8193, 65536, 65537),
        (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 64, 100, 127, 128, 129, 255, 256, 257, 512, 768, 1000, 1001, 1024, 2048, 3072,
         4096, 5120, 8192, 8196, 10000, 12288, 16384, 16388, 20672, 32768, 32772, 65536, 65537, 131072, 1048576,
         4194304),
        600_000_000,
    ),
    # For a CPU, where every thread of a kernel is executed: the boundaries that fit into seconds.
    "small": Grid("small", (1, 3, 5), (1, 4, 7, 33, 64, 129, 1000, 8196, 12288), 1 << 16),
}  # fmt: skip


@dataclass
class SweptFile:
    """One candidate file in one dtype: its rows by shape name, and how its children ended."""

    folder: str
    stem: str
    precision: str
    declaration: Declaration
    source: str
    sha256: str
    grid: tuple[GridShape, ...]  # of its task
    task: str = ""  # as --task names it; "": the folder's name
    rows: dict[str, Row] = field(default_factory=dict)
    restarts: int = 0
    seconds: float = 0.0

    @property
    def file(self) -> str:
        return f"{self.folder}/{self.stem}.py"


Report = Callable[[SweptFile, Mapping[str, Any]], None]  # (entry, progress event)


def entries_of(names: Sequence[str], folders: Mapping[str, Path] | None = None) -> list[SweptFile]:
    """An entry a declared (candidate, dtype) of every folder with a grid, or of the named ones.

    SweepError for an unknown name.
    """
    found, swept = [], folders or swept_folders()
    for folder, path in swept.items():
        grid, task = read_task_file(path).grid, task_text(path) or folder
        for stem, row in read_declarations(path).items():
            if names and stem not in names and f"{folder}/{stem}" not in names:
                continue
            data = (path / f"{stem}.py").read_bytes()
            digest = hashlib.sha256(data).hexdigest()
            found += [
                SweptFile(folder, stem, each, row, data.decode("utf-8"), digest, grid, task) for each in row.precision
            ]
    known = {entry.stem for entry in found} | {f"{entry.folder}/{entry.stem}" for entry in found}
    if unknown := sorted(set(names) - known):
        raise SweepError(f"{', '.join(unknown)}: no candidate of that name is declared in {', '.join(swept)}")
    return found


# ---- one entry ----


def measure(
    entry: SweptFile,
    grid: Grid,
    device: str,
    timeout_s: float,
    report: Report,
    run: Any = run_isolated,
    kernelbench: Path | None = None,
) -> None:
    """Fill `entry.rows`, one for every shape of the grid; a child that ends early is begun again behind that shape."""
    names = grid.calls(entry.grid)
    last: dict[str, str] = {}  # the shape that the child is at

    def heard(event: dict[str, Any]) -> None:
        if event.get("stage") == "row":
            entry.rows[event["row"]["shape"]] = event["row"]
        elif event.get("stage") == "shape":
            last["shape"] = event["case"]
        report(entry, event)

    while missing := [name for name in names if name not in entry.rows]:
        last.clear()
        outcome: Outcome = run(
            TARGET,
            {
                "task": entry.task or entry.folder,
                "precision": entry.precision,
                "device": device,
                "candidate_source": entry.source,
                "declaration": entry.declaration.model_dump(mode="json"),
                "grid": [each.model_dump(mode="json") for each in entry.grid],
                "shapes": [names[name] for name in missing],
                "kernelbench": None if kernelbench is None else str(kernelbench),
            },
            timeout_s=timeout_s,
            on_progress=heard,
        )
        entry.seconds += outcome.seconds
        why = f"{outcome.status}: {outcome.message}"
        died_at = last.get("shape")
        if outcome.status is Status.OK and entry.rows.keys() >= set(missing):
            return
        if died_at is not None and died_at not in entry.rows:
            entry.rows[died_at] = {"shape": died_at, "outcome": "other_error", "text": why}
        if died_at is None or entry.restarts >= MOST_RESTARTS:
            rest = {name: {"shape": name, "outcome": "not_run", "text": why} for name in names}
            entry.rows = {**rest, **entry.rows}
            return
        entry.restarts += 1


def measure_all(entries: Sequence[SweptFile], workers: int, one: Callable[[SweptFile], None]) -> Iterator[SweptFile]:
    """Call `one` for each entry, so many at a time, and hand out what is finished. They share the GPU: no timing."""
    if workers == 1:  # in this thread, which Ctrl-C stops at once
        for entry in entries:
            one(entry)
            yield entry
        return
    with ThreadPoolExecutor(workers) as pool:
        jobs = {pool.submit(one, entry): entry for entry in entries}
        for job in as_completed(jobs):
            job.result()
            yield jobs[job]


# ---- the record ----


def entry_record(entry: SweptFile) -> dict[str, Any]:
    """What the record keeps of one dtype of a file: counts, margins by width, and every shape that was not right."""
    rows = list(entry.rows.values())
    right = [row for row in rows if row["outcome"] == "right"]
    record: dict[str, Any] = {
        "counts": dict(Counter(row["outcome"] for row in rows)),
        "seconds": round(entry.seconds, 1),
        "restarts": entry.restarts,
        "share_by_width": _largest_by_width(right, "share"),
    }
    if entry.declaration.accurate:
        record["bound_by_width"] = _largest_by_width(right, "bound")
    if compared := [row["bits"] for row in right if "bits" in row]:
        record["native_bits"] = {"compared": len(compared), "equal": sum(compared)}
        record["other_bits"] = [row["shape"] for row in right if row.get("bits") is False]
    record["refused"] = _by_words(row for row in rows if row["outcome"] == "refused")
    failed = [row for row in rows if row["outcome"] == "declared_failure"]
    record["declared_failures"] = {row["shape"]: row.get("share") for row in failed}
    record["faults"] = [row for row in rows if row["outcome"] in FAULTS]
    return record


def _largest_by_width(rows: Iterable[Row], key: str) -> dict[str, float]:
    largest: dict[str, float] = {}
    for row in rows:
        width = row["shape"].partition("x")[2]
        largest[width] = max(largest.get(width, 0.0), float(f"{row[key]:.3g}"))
    return largest


def _by_words(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Refusals with the same words but for their numbers: the words of the first, and all shapes."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(re.sub(r"\d+", "#", row["text"]), {"text": row["text"], "shapes": []})
        group["shapes"].append(row["shape"])
    return list(groups.values())


def has_fault(record: Mapping[str, Any]) -> bool:
    """Whether a shape was wrong, ended in an error, had no answer, or had other bits where they are promised."""
    return bool(record["faults"] or record.get("other_bits"))


def summary(candidates: Mapping[str, Any]) -> dict[str, Any]:
    """Counts over all files and dtypes of a record."""
    records = [each for file in candidates.values() for each in file["precisions"].values()]
    counts: Counter[str] = Counter()
    for record in records:
        counts.update(record["counts"])
    bits = [record["native_bits"] for record in records if "native_bits" in record]
    return {
        "pairs": len(records),
        **{name: counts[name] for name in (*FINE, *FAULTS)},
        "native_bits": {key: sum(each[key] for each in bits) for key in ("compared", "equal")},
        "with_faults": sum(has_fault(record) for record in records),
    }


def blank(grid: Grid, environment: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        "schema": 1,
        "what": "every declared candidate and dtype at every shape of a grid; normal inputs, random parameters (gamma "
        "and beta), the task's eps, against float64. share: largest error / (tolerance + tolerance * |true|), the "
        "official tolerance; "
        "bound: the same for 5 * 2^-24 * (|gamma z| + |beta|) of accurate files, (|y|) without parameters",
        "environment": environment,
        "grid": grid.to_json(),
        "candidates": {},
    }


def joined(text: str, new: Mapping[str, Any], entries: Sequence[SweptFile], resume: bool) -> dict[str, Any]:
    """The record to go on with: `new`, and of the stored one what is of files as they are.

    Without `resume` the entries asked for now are measured again. SweepError when the stored file is something else.
    """
    try:
        there = json.loads(text)
        grid, machine, candidates = there["grid"], there["environment"] or {}, dict(there["candidates"])
    except (ValueError, TypeError, KeyError) as fault:
        raise SweepError(f"--out: no record of a sweep ({fault}); move it away or name another file") from None
    here = new["environment"] or {}
    different = [key for key in SAME_MACHINE if machine.get(key) != here.get(key)]
    different += ["grid"] if grid != new["grid"] else []
    if different:
        raise SweepError(f"--out: made with another {', '.join(different)}; move it away or name another file")
    asked = {(entry.file, entry.precision) for entry in entries}
    digests = {entry.file: entry.sha256 for entry in entries}
    kept: dict[str, Any] = {}
    for file, stored in candidates.items():
        if digests.get(file, stored["sha256"]) != stored["sha256"]:
            continue
        again = {p for p in stored["precisions"] if (file, p) in asked and not resume}
        precisions = {p: record for p, record in stored["precisions"].items() if p not in again}
        if precisions:
            kept[file] = {**stored, "precisions": precisions}
    return {**new, "candidates": kept}


def put(content: dict[str, Any], entry: SweptFile, out: Path) -> dict[str, Any]:
    """Add a finished entry to the record, and write it. Returns what was added."""
    record = entry_record(entry)
    facts = {"sha256": entry.sha256, "contract": entry.declaration.contract, "accurate": entry.declaration.accurate}
    file = content["candidates"].setdefault(entry.file, {**facts, "precisions": {}})
    file["precisions"][entry.precision] = record
    content["summary"] = summary(content["candidates"])
    write_json_atomic(out, content)
    return record


def in_words(record: Mapping[str, Any]) -> str:
    """One line for a person who watches: counts, and the first fault."""
    words = ", ".join(f"{count} {name}" for name, count in record["counts"].items())
    if "native_bits" in record:
        words += f"; native's bits at {record['native_bits']['equal']} of {record['native_bits']['compared']}"
    if record["faults"]:
        first = record["faults"][0]
        words += f"; first: {first['shape']} {first['outcome']}: {first.get('text', '')}"
    return f"{words} ({record['seconds']:g} s)"


def command(
    candidates: Annotated[
        list[str] | None, typer.Argument(help="Names of declared candidates, or <task>/<name>; default: all.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The record; entries of other files in it are kept.")] = Path(
        "runs/sweep.json"
    ),
    device: Annotated[str, typer.Option(help="cuda, cuda:<index>, or cpu through the host executor.")] = "cuda",
    grid: Annotated[str, typer.Option(help="full (28 x 41 shapes) or small (for a CPU).")] = "full",
    resume: Annotated[bool, typer.Option("--resume", help="Leave out what the record has of the same file.")] = False,
    workers: Annotated[
        int, typer.Option(help="Children at once, 15 GB of GPU memory each on the full grid.", min=1)
    ] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds for one child.", min=1.0)] = 600.0,
) -> None:
    """Every candidate in each dtype it declares, at every shape of a grid, against float64.

    Exit code: 0 every shape right, refused in the file's own words, or a declared failure; 1 something else; 2 the
    call is wrong; 3 no such GPU.
    """
    from rich.console import Console

    from kbsub.adapters.checkout import CheckoutError, checkout_or_none
    from kbsub.eval.results.model import ResultError, check_writable
    from kbsub.eval.run.machine_facts import gpu_index, gpu_name, measured_on, no_such_gpu
    from kbsub.eval.tasks.declarations import DeclarationError

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if grid not in GRIDS:
        _stop(2, f"--grid {grid}: known are {', '.join(GRIDS)}")
    try:
        if device != "cpu" and gpu_name(gpu_index(device)) is None:
            _stop(3, no_such_gpu(device))
        entries, kernelbench = entries_of(candidates or []), checkout_or_none()
        left_out = set() if kernelbench else {entry.folder for entry in entries if needs_checkout(entry.task)}
        if left_out:
            words = f"{', '.join(sorted(left_out))}: the reference program is KernelBench's; get it with: kbsub fetch"
            if candidates:
                _stop(2, words)
            console.print(f"left out: {words}", soft_wrap=True)
            entries = [entry for entry in entries if entry.folder not in left_out]
        check_writable(out)
        content = blank(GRIDS[grid], measured_on(device))
        if out.is_file():
            content = joined(out.read_text("utf-8"), content, entries, resume)
    except (ValueError, DeclarationError, ResultError, CheckoutError) as error:
        _stop(2, str(error))
    has = {(file, each) for file, stored in content["candidates"].items() for each in stored["precisions"]}
    pending = [entry for entry in entries if (entry.file, entry.precision) not in has]
    left = len(pending)
    with console.status("") as status:

        def report(entry: SweptFile, event: object) -> None:
            done, of = len(entry.rows), len(GRIDS[grid].calls(entry.grid))
            status.update(f"{entry.stem} {entry.precision}: {done} of {of} shapes; {left} files and dtypes to go")

        def one(entry: SweptFile) -> None:
            measure(entry, GRIDS[grid], device, timeout, report, kernelbench=kernelbench)

        for entry in measure_all(pending, workers, one):
            left -= 1
            line = f"{entry.file} {entry.precision}: {in_words(put(content, entry, out))}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    found = content.get("summary") or summary(content["candidates"])
    console.print(f"{found['pairs']} files and dtypes, {found['with_faults']} with faults; written to {out}")
    raise typer.Exit(1 if found["with_faults"] else 0)


def _stop(code: int, message: str) -> NoReturn:
    typer.echo(f"kbsub measure sweep: {message}", err=True)
    raise typer.Exit(code)
