"""What several verbs ask the same way: the GPU that is meant, the checkout, the words of a call that cannot go on.

No verb of its own: it has no `command`. Must not know what a verb does with the answers. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

EXIT_USAGE, EXIT_NO_GPU = 2, 3

Task = Annotated[
    str,
    typer.Option(
        help="level<L>_<id>, or the path of a reference program; default: the task that the files say, by a first line "
        "`# kbsub: task=level1_19` or their names (level_L_problem_P_...), else level1_40."
    ),
]
Size = Annotated[
    str,
    typer.Option(
        help="official, check or small: the size of the task for every verdict but the official one on a GPU; "
        "default: for each the largest that fits memory and time here."
    ),
]
Checkout = Annotated[Path | None, typer.Option(help="The checkout; default: as kbsub fetch left it.")]
Declarations = Annotated[
    Path | None,
    typer.Option(help="A candidates.toml that you vouch for; beside a file of one's own none counts by itself."),
]

Cell = Annotated[
    str,
    typer.Option(
        "--cell",
        envvar="KBSUB_CELL",
        help="What confines the candidates' processes: namespaces, landlock, unconfined, or auto, the best there is.",
    ),
]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no table and no progress; errors and the exit code.")]
Format = Annotated[str, typer.Option("--format", help="table, or json: one JSON value on stdout, the rest on stderr.")]


def console_of(verb: str, form: str, quiet: bool) -> Any:
    """The console for tables and progress under --format and --quiet; another --format ends the call."""
    from kbsub.eval.report.console import PlainConsole, console_for_stdout

    if form not in ("table", "json"):
        stop(verb, EXIT_USAGE, f"--format {form}: table or json")
    if quiet:
        return PlainConsole(quiet=True)
    return PlainConsole(emoji=False, stderr=True) if form == "json" else console_for_stdout()


def print_json(content: Any) -> None:
    """One JSON value on stdout; non-finite numbers as the strings that result files use."""
    import json

    from kbsub.eval.results.model import jsonable

    typer.echo(json.dumps(jsonable(content), indent=1, ensure_ascii=False, allow_nan=False))


def stop(verb: str, code: int, message: str) -> NoReturn:
    """End the command: `message` on stderr behind the verb's name, and the exit code."""
    from kbsub.eval.process.printable import printable

    typer.echo(printable(f"kbsub {verb}: {message}"), err=True)
    raise typer.Exit(code)


def task_of(verb: str, task: str, candidates: Sequence[str]) -> Any:
    """What --task says, else what the candidates say, as a Meant; files that contradict each other end the call.

    Where nothing named a task its note is said on stderr here, before anything runs.
    """
    from kbsub.adapters.task import TaskError
    from kbsub.eval.tasks.meant import meant_task

    try:
        meant = meant_task(task, candidates)
    except TaskError as error:
        stop(verb, EXIT_USAGE, str(error))
    if meant.note:
        typer.echo(f"kbsub {verb}: {meant.note}", err=True)
    return meant


class Ahead:
    """What a run must know of this machine, asked for side by side while its modules are imported.

    The driver's start, a git, the bytes of the checkout and a process in a cell: each is waited for, not computed, and
    in turn they were a third of what `kbsub eval` takes beside its judge. `checkout_of` takes the answer of one; what
    the others found is kept where it was asked for (the driver is started, the cell's level known).
    """

    def __init__(self, device: str, kernelbench: Path | None, level: str) -> None:
        from concurrent.futures import ThreadPoolExecutor

        from kbsub.adapters.checkout import find_checkout
        from kbsub.eval.process import cell
        from kbsub.eval.run.machine_facts import gpu_index, gpu_name

        pool = ThreadPoolExecutor(3)
        self.checkout = pool.submit(lambda: find_checkout(kernelbench))
        pool.submit(lambda: gpu_name(gpu_index(device)))  # what is wrong with it is said by whoever asks again
        if level in (*cell.LEVELS, cell.AUTO):
            pool.submit(lambda: cell.probe(level))
        pool.shutdown(wait=False)


def check_size(verb: str, size: str) -> None:
    """End the command where --size names no size."""
    from kbsub.eval.tasks.sizes import SIZES

    if size and size not in SIZES:
        stop(verb, EXIT_USAGE, f"--size {size}: there are {', '.join(SIZES)}")


def confine(verb: str, level: str, *, here: bool = True) -> None:
    """Let everything that this process starts be confined as --cell says; a level that is refused here ends the call.

    Where nobody asked and there is less than namespaces, one line on stderr says how much and why. `here` False: what
    judges is on other machines, whose rows say what each has.
    """
    from kbsub.eval.process import cell
    from kbsub.eval.process.printable import one_line

    if level not in (*cell.LEVELS, cell.AUTO):
        stop(verb, EXIT_USAGE, f"--cell {level}: there are {', '.join((*cell.LEVELS, cell.AUTO))}")
    if level != (os.environ.get(cell.LEVEL_VARIABLE) or cell.AUTO):
        os.environ[cell.LEVEL_VARIABLE] = level
    if not here:
        return
    found = cell.probe()
    if level == cell.AUTO:
        if found.level != cell.LEVELS[0]:
            typer.echo(one_line(f"kbsub {verb}: candidates run {found}"), err=True)
    elif found.level != level:
        why = found.why[level]
        words = (
            f"--cell {level}: this machine refuses it: {why}. Mend it: {cell.WAY_OUT[level]}. Or let candidates run "
        )
        stop(verb, EXIT_USAGE, f"{words}in what there is ({found.level}), with --cell auto")


def gpu_of(verb: str, device: str) -> str | None:
    """The name of the GPU that --device means; None where there is none. A --device of another form ends the call."""
    from kbsub.eval.run.machine_facts import gpu_index, gpu_name

    try:
        return gpu_name(gpu_index(device))
    except ValueError as error:
        stop(verb, EXIT_USAGE, str(error))


def checkout_of(verb: str, explicit: Path | None, ahead: Ahead | None = None) -> tuple[Path | None, str]:
    """(the verified checkout, ""), or (None, why there is none) where none was named; a wrong one ends the call.

    ahead: asks for this very one already.
    """
    from kbsub.adapters.checkout import CheckoutError, CheckoutMissing, find_checkout

    try:
        return (find_checkout(explicit) if ahead is None else ahead.checkout.result()).path, ""
    except CheckoutMissing as error:
        if explicit is not None:
            stop(verb, EXIT_USAGE, str(error))
        return None, str(error)
    except CheckoutError as error:
        stop(verb, EXIT_USAGE, str(error))
