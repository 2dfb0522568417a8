"""`kbsub blindspots`: wrong variants of the references through upstream's own predicate; one record a problem."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from kbsub.eval.commands import common

LEVELS = {1: 100, 2: 100, 3: 50, 4: 20}  # problems at the pin
_GPU_SHARE = 0.94  # of the GPU's memory, for all children together


def command(
    tasks: Annotated[
        list[str] | None, typer.Argument(help="level<L>_<id> ...; default: every problem of --level.")
    ] = None,
    level: Annotated[str, typer.Option(help="Levels, by comma.")] = "1,2,3",
    only: Annotated[str, typer.Option(help="Of those, ids by comma and ranges: 1,5,33-40.")] = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cuda, cuda:<index> or cpu.")] = "",
    size: Annotated[
        str, typer.Option(help="official, check or small; default: official on a GPU, small on a CPU.")
    ] = "",
    out: Annotated[Path | None, typer.Option(help="Folder of the records; default runs/<gpu>/blindspots.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Judge those again that have a record.")] = False,
    budget: Annotated[float, typer.Option(help="Seconds after which no further task is begun.", min=1.0)] = 86400.0,
    limit: Annotated[float, typer.Option(help="Seconds for one task.", min=1.0)] = 120.0,
    workers: Annotated[int, typer.Option(help="Children at once; 0: 10 on a GPU, 1 on a CPU.", min=0)] = 0,
    kernelbench: common.Checkout = None,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """What the official check accepts: zeros, another input's output, an operator left out, bf16, ...

    No candidate is involved: the variants are made of the reference. A record a task is kept, and a second run goes on
    where the first stopped. Exit code: 0 every task has a record; 1 the budget left some out; 2 the call is wrong; 3 no
    GPU for --device cuda.

    \b
    kbsub blindspots level1_36 --device cpu
    kbsub blindspots --level 2 --budget 3600
    kbsub blindspots level1_36 --device cpu --format json
    """
    from kbsub.adapters.task import TaskError
    from kbsub.eval.blindspots.schedule import ScheduleError, Terms, cores, is_current, judge_all
    from kbsub.eval.results.blindspots import FOLDER, BlindSpots, file_name
    from kbsub.eval.run.machine_facts import gpu_folder, gpu_index, gpu_memory_bytes, no_such_gpu

    began = time.time()
    console = common.console_of("blindspots", form, quiet)
    common.check_size("blindspots", size)
    gpu = common.gpu_of("blindspots", device)
    if device.startswith("cuda") and gpu is None:
        common.stop("blindspots", common.EXIT_NO_GPU, no_such_gpu(device))
    where = (device or "cuda") if gpu else "cpu"
    checkout, missing = common.checkout_of("blindspots", kernelbench)
    if checkout is None:
        common.stop("blindspots", common.EXIT_USAGE, missing)
    try:
        wanted = chosen(tasks or [], level, only, checkout, precision, size or ("official" if gpu else "small"))
    except (TaskError, ValueError) as error:
        common.stop("blindspots", common.EXIT_USAGE, str(error))
    target = out or Path("runs") / gpu_folder(gpu) / FOLDER
    target.mkdir(parents=True, exist_ok=True)
    todo = [each for each in wanted if again or not is_current(target / file_name(each.task, precision), each, limit)]
    console.print(f"{len(wanted)} tasks, {len(wanted) - len(todo)} have a record in {target}", highlight=False)
    at_once = workers or (min(10, cores()) if gpu else 1)
    memory = int(_GPU_SHARE * (gpu_memory_bytes(gpu_index(where)) or 0)) if gpu else 1 << 60
    terms = Terms(str(checkout), where, precision, limit, began + budget, at_once, memory)
    count = Counter[str]()

    def heard(record: BlindSpots) -> None:
        count[record.worst or "not tried"] += 1
        words = record.error or ", ".join(record.severities())
        tried = f"{len(record.variants)} variants, {len(record.not_tried)} not tried"
        line = f"{time.time() - began:6.1f} s  {record.task}: {words} ({tried}, {record.seconds:.1f} s)"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    try:
        undone = judge_all(todo, terms, target, heard) if todo else []
    except ScheduleError as error:
        common.stop("blindspots", 1, str(error))
    console.print(", ".join(f"{number} {name}" for name, number in count.most_common()), highlight=False)
    if form == "json":
        files = {each.task: target / file_name(each.task, precision) for each in wanted}
        records = {name: json.loads(file.read_text("utf-8")) for name, file in files.items() if file.exists()}
        common.print_json({"folder": str(target), "undone": undone, "tasks": records})
    if undone:
        console.print(f"left by --budget: {' '.join(undone)}; the same command goes on", soft_wrap=True)
        raise typer.Exit(1)


def chosen(tasks: list[str], level: str, only: str, checkout: Path, precision: str, size: str) -> list[Any]:
    """The tasks that are meant, at that size. ValueError or TaskError for words that mean none."""
    from kbsub.adapters.task import TaskError, load_task, parse_task
    from kbsub.eval.blindspots.schedule import wanted

    pairs = [parse_task(each) for each in tasks]
    if not pairs:
        levels = [int(each) for each in level.split(",") if each.strip()]
        if unknown := [each for each in levels if each not in LEVELS]:
            raise ValueError(f"--level {unknown[0]}: levels at the pin are {', '.join(map(str, LEVELS))}")
        ids = numbers(only)
        pairs = [(lev, number) for lev in levels for number in range(1, LEVELS[lev] + 1) if not ids or number in ids]
    found = []
    for pair in pairs:
        task = load_task(*pair, kernelbench=checkout, precision=precision)
        try:
            found.append(wanted(task, size))
        except TaskError as error:
            if tasks:
                raise
            typer.echo(f"left out: {error}", err=True)  # one task without such a size stops no level
    return found


def numbers(text: str) -> set[int]:
    """The numbers of "1,5,33-40"; ValueError for another form."""
    found: set[int] = set()
    for part in filter(None, (each.strip() for each in text.split(","))):
        low, dash, high = part.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"--only {text}: write ids by comma and ranges, as in 1,5,33-40")
        found |= set(range(int(low), int(high or low) + 1))
    return found
