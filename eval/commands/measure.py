"""`kbsub measure NAME`: the programs that make evidence on a GPU, one sub-command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(no_args_is_help=True, help="Make evidence on a GPU: records that kbsub report shows.")


@app.callback()
def root() -> None:
    """Make evidence on a GPU: records that kbsub report shows."""


@app.command()
def sweep(
    candidates: Annotated[
        list[str] | None, typer.Argument(help="Names of declared candidates; default: all of both folders.")
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

    from kbsub.eval.declarations import DeclarationError
    from kbsub.eval.machine_facts import gpu_index, gpu_name, measured_on
    from kbsub.eval.measure import sweep as work
    from kbsub.eval.result import ResultError, check_writable

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if grid not in work.GRIDS:
        _stop(2, f"--grid {grid}: known are {', '.join(work.GRIDS)}")
    try:
        if device != "cpu" and gpu_name(gpu_index(device)) is None:
            _stop(3, f"--device {device}: the NVIDIA driver offers no such GPU; see kbsub doctor")
        entries = work.entries_of(candidates or [])
        check_writable(out)
        content = work.blank(work.GRIDS[grid], measured_on(device))
        if out.is_file():
            content = work.joined(out.read_text("utf-8"), content, entries, resume)
    except (ValueError, DeclarationError, ResultError) as error:
        _stop(2, str(error))
    has = {(file, each) for file, stored in content["candidates"].items() for each in stored["precisions"]}
    pending = [entry for entry in entries if (entry.file, entry.precision) not in has]
    left = len(pending)
    with console.status("") as status:

        def report(entry: work.Entry, event: object) -> None:
            done, of = len(entry.rows), content["grid"]["shapes"]
            status.update(f"{entry.stem} {entry.precision}: {done} of {of} shapes; {left} files and dtypes to go")

        def one(entry: work.Entry) -> None:
            work.measure(entry, work.GRIDS[grid], device, timeout, report)

        for entry in work.measure_all(pending, workers, one):
            left -= 1
            line = f"{entry.file} {entry.precision}: {work.in_words(work.put(content, entry, out))}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    found = content.get("summary") or work.summary(content["candidates"])
    console.print(f"{found['pairs']} files and dtypes, {found['with_faults']} with faults; written to {out}")
    raise typer.Exit(1 if found["with_faults"] else 0)


def _stop(code: int, message: str) -> NoReturn:
    typer.echo(f"kbsub measure: {message}", err=True)
    raise typer.Exit(code)
