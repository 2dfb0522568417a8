"""Every problem of KernelBench judged with its own reference as the candidate; or the files of a public corpus.

    kbsub measure tasks --out results/h200/tasks.json
    kbsub measure tasks --corpus h100.json --rows 0:20 --out results/h200/corpus.json

The first asks whether the checks can be asked of any task: identity, stress, oracle and guards at the check size, where
each must pass or say what could not be asked. The second judges files (one JSON object a line: level_id, task_id,
custom_code): the official and the own-namespace verdict at the pin's shapes, the rest at the check size. What is
written is numbers and names of checks, no code and no words of a file. Finished rows are kept: an interrupted run goes
on, and --within ends one in time. No torch here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.adapters.checkout import CheckoutError, find_checkout
from kbsub.adapters.overrides import in_its_own_namespace
from kbsub.adapters.refusal import REFERENCE_REFUSES
from kbsub.adapters.task import Task, TaskError, resolve_task
from kbsub.eval.measure.sizes import all_tasks
from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import one_line
from kbsub.eval.results.model import ResultError, write_json_atomic
from kbsub.eval.run.machine_facts import gpu_index, gpu_name, measured_on
from kbsub.eval.run.runner import Plan, Row, run
from kbsub.eval.suite.records import NEEDS_GPU
from kbsub.eval.tasks.cases import PARAMETERS_NOT_SET, SKIPPED
from kbsub.eval.tasks.sizes import CHECK, SIZES
from kbsub.eval.verdicts.register import KINDS

BESIDE = ("identity", "stress", "oracle", "guards")  # of a reference as its own candidate
SCHEMA = 1
# What may be said of why a stage of somebody's file did not end well: words of this repository's own.
PHRASES = (NEEDS_GPU, "defines no ModelNew", REFERENCE_REFUSES, PARAMETERS_NOT_SET)


@dataclass(frozen=True)
class Work:
    """One candidate to judge: its key in the file, its task, and its text."""

    key: str
    task: str
    source: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()


def command(
    tasks: Annotated[list[str] | None, typer.Argument(help="level<L>_<id>; default: levels 1 to 3.")] = None,
    out: Annotated[Path, typer.Option(help="The data file.")] = Path("runs/tasks.json"),
    corpus: Annotated[Path | None, typer.Option(help="Judge the files of this corpus, JSON lines.")] = None,
    rows: Annotated[str, typer.Option(help="Of a corpus: FIRST:END, among the rows that have code.")] = "",
    device: Annotated[str, typer.Option(help="cuda, cuda:<index> or cpu.")] = "cuda",
    size: Annotated[str, typer.Option(help=f"One of {', '.join(SIZES)}.")] = CHECK,
    stages: Annotated[str, typer.Option(help="Verdicts, by comma; default: all that apply.")] = "",
    jobs: Annotated[int, typer.Option(help="Problems at once; 0: a core each, two left free.", min=0)] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds for one stage.")] = 120.0,
    within: Annotated[float, typer.Option(help="Begin nothing new after this many seconds; 0: no limit.")] = 0.0,
    again: Annotated[bool, typer.Option("--again", help="Judge finished rows, too.")] = False,
) -> None:
    """Judge each and write a row each. Exit code: 0 all pass or say why not, 1 one failed, 2 usage, 4 not finished."""
    try:
        checkout = find_checkout(None).path
        work = _of_corpus(corpus, rows) if corpus is not None else _references(tasks or all_tasks(checkout), checkout)
    except (CheckoutError, TaskError, OSError, ValueError, KeyError) as error:
        typer.echo(f"kbsub measure tasks: {error}", err=True)
        raise typer.Exit(2) from error
    wanted = tuple(name for name in stages.split(",") if name) or (tuple(KINDS) if corpus is not None else BESIDE)
    if unknown := [name for name in wanted if name not in KINDS] or ([size] if size not in SIZES else []):
        typer.echo(f"kbsub measure tasks: no such stage or size as {unknown[0]}", err=True)
        raise typer.Exit(2)
    at_once = jobs or max(1, (os.cpu_count() or 4) - 2)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the children share the cores
    try:
        found = TaskRows(out, {"size": size, "stages": list(wanted), "at_once": at_once}, device)
    except (OSError, ValueError) as error:
        typer.echo(f"kbsub measure tasks: {error}", err=True)
        raise typer.Exit(2) from error
    todo = [each for each in work if again or not found.has(each)]
    typer.echo(f"{len(work)} to judge, {len(todo)} of them not finished; {at_once} at once")
    started = time.monotonic()

    def one(each: Work) -> None:
        if within and time.monotonic() - started > within:
            return
        row = judged(each, checkout, device, size, wanted, timeout, words=corpus is None)
        found.add(each, row)
        typer.echo(one_line(f"{each.key}: {in_words(row)}"))

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, todo))
    missing = [each.key for each in work if not found.has(each)]
    counts = Counter(row["ended"] for row in found.content["rows"].values())
    typer.echo(f"{dict(counts)} in {time.monotonic() - started:.0f} s; not finished: {len(missing)}. Written to {out}")
    raise typer.Exit(1 if counts["failed"] else 4 if missing else 0)


def _references(names: Sequence[str], checkout: Path) -> list[Work]:
    """Each task's own reference, executed in a namespace of its own, as ModelNew."""
    found = []
    for name in names:
        task = resolve_task(name, kernelbench=checkout)
        found.append(Work(name, name, in_its_own_namespace(f"{task.source}\n\nModelNew = Model\n")))
    return found


def _of_corpus(path: Path, rows: str) -> list[Work]:
    """The rows of a JSON-lines file that have code. KeyError or ValueError for a file of another form."""
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines()):
        row = json.loads(line) if line.strip() else {}
        if row.get("custom_code"):
            level, problem = int(row["level_id"]), int(row["task_id"])
            found.append(Work(f"row{number}_level{level}_{problem}", f"level{level}_{problem}", row["custom_code"]))
    first, _, end = rows.partition(":")
    return found[int(first or 0) : int(end) if end else None]


class TaskRows:
    """The data file, written after every row, so that a run that is ended loses the rows that it was at and no others.

    Rows of the same text are kept from an earlier run. ValueError for a file of another size, other stages, another GPU
    or another form: its rows are measurements, and are not thrown away for new ones.
    """

    def __init__(self, out: Path, how: Mapping[str, Any], device: str) -> None:
        self.out, self.lock = out, threading.Lock()
        before: dict[str, Any] = {}
        gpu = None if device == "cpu" else gpu_name(gpu_index(device))
        if out.is_file():
            before = json.loads(out.read_text("utf-8"))
            if not isinstance(before, dict) or before.get("schema") != SCHEMA:
                raise ValueError(f"{out} is no file of this command; give another --out")
            was = {**before["how"], "gpu": (before.get("environment") or {}).get("gpu")}
            for key, value in {"size": how["size"], "stages": how["stages"], "gpu": gpu}.items():
                if was[key] != value:
                    raise ValueError(
                        f"{out} has rows of {key} {was[key]}, not {value}; give another --out, or remove it"
                    )
        self.content: dict[str, Any] = {
            "schema": SCHEMA,
            "how": dict(how),
            "environment": measured_on(device),
            "rows": before.get("rows", {}),
        }

    def has(self, work: Work) -> bool:
        return bool(self.content["rows"].get(work.key, {}).get("sha256") == work.sha256)

    def add(self, work: Work, row: dict[str, Any]) -> None:
        with self.lock:
            rows = {**self.content["rows"], work.key: {"sha256": work.sha256, **row}}
            self.content["rows"] = {key: rows[key] for key in sorted(rows, key=_in_order)}
            write_json_atomic(self.out, self.content)


def _in_order(key: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", key)]


def judged(
    work: Work, checkout: Path, device: str, size: str, stages: Sequence[str], timeout: float, *, words: bool
) -> dict[str, Any]:
    """The row of one candidate: how each stage ended, in numbers. words: and why, where a stage did not end well.

    ended: "passed" is every stage OK; "not checked", one that could not be asked; "not run", none could.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{work.key}.py"
        file.write_text(work.source, "utf-8")
        task: Task = resolve_task(work.task, kernelbench=checkout)
        plan = Plan(
            task=task,
            task_text=work.task,
            candidates=(file,),
            stages=tuple(name for name in KINDS if name in stages),
            precision="fp32",
            device=device,
            kernelbench=checkout,
            timeout_s=timeout,
            host_executor=device == "cpu",
            size=size,
            gpu=None if device == "cpu" else gpu_name(gpu_index(device)),
        )
        try:
            (row,), _ = run(plan, Path(folder) / "result.json", lambda row, stage, event: None, lambda row: None)
        except (TaskError, ResultError) as error:
            return {"ended": "failed", "why": type(error).__name__, "stages": {}, "seconds": 0.0}
    told = {name: _numbers(row, name) for name in row.outcomes}
    for name, outcome in row.outcomes.items():
        known = next((phrase for phrase in PHRASES if phrase in outcome.message), "in the file's own words")
        if outcome.message:
            told[name]["why"] = one_line(outcome.message)[:300] if words else known
    if words:
        _reasons(row, told)
    statuses = {outcome.status for outcome in row.outcomes.values()}
    ended = "failed" if row.failed else "not run" if statuses <= {Status.NOT_RUN} else "not checked"
    return {
        "ended": "passed" if not row.failed and statuses == {Status.OK} else ended,
        "stages": told,
        "seconds": round(time.monotonic() - started, 1),
    }


def _reasons(row: Row, told: dict[str, dict[str, Any]]) -> None:
    """Why cases and guards of a stage that ended well were not asked: a task's own reference, whose words may stand."""
    if "stress" in told and (stress := row.fields.get(KINDS["stress"].key)):
        skipped = Counter(
            one_line(str(each.get("reason")))[:200] for each in stress.get("cases", ()) if each["class"] == SKIPPED
        )
        told["stress"]["not_asked"] = dict(skipped.most_common())
    if "guards" in told and (guards := row.fields.get(KINDS["guards"].key)):
        why = {each["guard"]: one_line(each["reason"])[:200] for each in guards.get("not_checked") or []}
        told["guards"]["not_checked"] = dict(sorted(why.items()))


def _numbers(row: Row, name: str) -> dict[str, Any]:
    """What a stage found, as numbers and names of checks: no text that a candidate could have written."""
    outcome, found = row.outcomes[name], row.fields.get(KINDS[name].key) or {}
    told: dict[str, Any] = {"status": outcome.status.value, "seconds": round(outcome.seconds, 1)}
    told |= {key: value for key, value in found.items() if isinstance(value, (bool, int, float))}
    told |= {"size": row.sizes.get(name, {}).get("name")}
    if name == "stress" and found:
        told["first_failed"] = [each["name"] for each in found["cases"] if each["class"] == "fail"][:5]
        told["left_out"] = found.get("left_out") or {}
        told |= {key: found[key] for key in ("parameters_set", "eps_set") if found.get(key)}
    if name == "guards" and found:
        told["findings"] = sorted({each["guard"] for each in found["findings"]})
        told["checked"] = len(found.get("checked") or [])
        told["not_checked"] = sorted(each["guard"] for each in found.get("not_checked") or [])
    if name == "oracle":
        told["cases"] = sum(name != "secret" for name in found)
    if name == "source" and found:
        told["overrides"] = sorted(found["overrides"])
        own, static = found.get("own_namespace"), found.get("static")
        told["own_namespace"] = own and {key: own.get(key) for key in ("compiled", "correctness", "trials")}
        told["static"] = static and {"valid": static["valid"], "errors": len(static["errors"])}
    if name == "official":
        said = row.fields.get("official") or {}
        told |= {key: said.get(key) for key in ("compiled", "correctness", "trials", "runtime", "ref_runtime")}
    return told


def in_words(row: Mapping[str, Any]) -> str:
    """One line for a person who watches."""
    ends = ", ".join(f"{name} {told['status']}" for name, told in row["stages"].items())
    failed = row["stages"].get("stress", {}).get("first_failed")
    return f"{row['ended']} ({ends}){f', first {failed[0]}' if failed else ''}, {row['seconds']} s"
