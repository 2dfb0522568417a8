"""The check and small sizes of KernelBench's problems, derived and tried on their references, as a data file.

    kbsub measure sizes [TASK ...] --jobs 2

writes eval/tasks/kernelbench_sizes.json: names and numbers. Finished tasks of the same program are kept, so that an
interrupted run goes on; --again derives them anew. Needs a CPU and the checkout, no GPU. No torch here.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.adapters.checkout import CheckoutError, find_checkout
from kbsub.adapters.pin import PIN
from kbsub.adapters.task import Task, TaskError, resolve_task
from kbsub.eval.process.isolated import Status, run_isolated
from kbsub.eval.process.printable import one_line
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.tasks.sizes import RECORDED, RecordedSizes, SizesError, TaskSizes, recorded

TARGET = "kbsub.eval.run.derive_size:judge_many"
LEVELS = (1, 2, 3)  # level 4 downloads models
AT_ONCE = 10  # tasks a child: torch's start is paid once
TIMEOUT_S = 900.0


def command(
    tasks: Annotated[list[str] | None, typer.Argument(help="level<L>_<id>; default: levels 1 to 3.")] = None,
    jobs: Annotated[int, typer.Option(help="Children at once.", min=1)] = 2,
    again: Annotated[bool, typer.Option("--again", help="Derive what is there already, too.")] = False,
    out: Annotated[Path, typer.Option(help="The data file.")] = RECORDED,
) -> None:
    """Derive the sizes and record them. Exit code: 0 every task has its sizes, 1 one has none, 2 usage."""
    try:
        checkout = find_checkout(None).path
        wanted = [resolve_task(name, kernelbench=checkout) for name in tasks or all_tasks(checkout)]
    except (CheckoutError, TaskError) as error:
        typer.echo(f"kbsub measure sizes: {error}", err=True)
        raise typer.Exit(2) from error
    try:
        known = recorded(out)
    except SizesError:
        known = RecordedSizes(pin=PIN, torch="", tasks={})
    there = known.tasks if known.pin == PIN else {}
    todo = [task for task in wanted if again or task.slug not in there or there[task.slug].sha256 != task.sha256]
    typer.echo(f"{len(wanted)} tasks, {len(todo)} to derive")
    keep = _Keep(out, dict(there), known.torch)
    shares = [todo[at : at + AT_ONCE] for at in range(0, len(todo), AT_ONCE)]
    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda share: _derive(share, checkout, keep), shares):
            pass
    missing = [task.slug for task in wanted if task.slug not in keep.tasks]
    typer.echo(f"{len(keep.tasks)} tasks in {out.name}; without sizes: {', '.join(missing) or 'none'}")
    raise typer.Exit(1 if missing else 0)


def all_tasks(checkout: Path) -> list[str]:
    """The names of every problem of levels 1 to 3, in order."""
    found = []
    for level in LEVELS:
        files = (checkout / "KernelBench" / f"level{level}").glob("*_*.py")
        numbers = sorted(int(match[1]) for file in files if (match := re.match(r"(\d+)_", file.name)))
        found += [f"level{level}_{number}" for number in numbers]
    return found


class _Keep:
    """The data file, written after every task."""

    def __init__(self, out: Path, tasks: dict[str, TaskSizes], torch: str) -> None:
        self.out, self.tasks, self.torch = out, tasks, torch
        self.lock = threading.Lock()

    def add(self, slug: str, found: dict[str, Any]) -> None:
        with self.lock:
            self.tasks[slug] = TaskSizes.model_validate(found)
            self.write()

    def write(self) -> None:
        def order(slug: str) -> list[int]:
            return [int(number) for number in re.findall(r"\d+", slug)]

        rows = {
            slug: self.tasks[slug].model_dump(mode="json", exclude_defaults=True)
            for slug in sorted(self.tasks, key=order)
        }
        write_json_atomic(self.out, {"pin": PIN, "torch": self.torch, "tasks": rows})


def _derive(share: Sequence[Task], checkout: Path, keep: _Keep) -> None:
    """The sizes of each task of a share; one that takes its child down is left out, the rest go on in another."""
    pending = [task.slug for task in share]
    while pending:
        done: list[str] = []

        def note(event: dict[str, Any], done: list[str] = done) -> None:
            if event.get("stage") != "sizes":
                return
            done.append(str(event["task"]))
            if "sizes" in event:
                keep.add(str(event["task"]), event["sizes"])
            words = event.get("why") or event["sizes"].get("why_not") or ""
            typer.echo(one_line(f"{event['task']}: {words or 'ok'}"))

        outcome = run_isolated(
            TARGET, {"tasks": pending, "kernelbench": str(checkout)}, timeout_s=TIMEOUT_S, on_progress=note
        )
        keep.torch = (outcome.value or {}).get("torch") or keep.torch
        pending = [slug for slug in pending if slug not in done]
        if outcome.status is not Status.OK and pending:
            typer.echo(one_line(f"{pending[0]}: {outcome.status}: {outcome.message}"))
            pending = pending[1:]
    with keep.lock:
        keep.write()
