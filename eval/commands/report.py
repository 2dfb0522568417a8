"""`kbsub report`: every table and plot of the papers, from the committed results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    root: Annotated[Path, typer.Option(help="The project's folder.")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; say what does not match the results.")
    ] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="Draw the plots again even where their data are the same.")
    ] = False,
) -> None:
    """Remake the tables and plots of README and the other papers from results/*/*.json, and the manifests.

    Exit code: 0 done, or --check found nothing; 1 --check found something; 2 a marker or a result is broken.

    \b
    kbsub report
    kbsub report --check
    """
    from kbsub.eval.report import papers as report
    from kbsub.eval.results.manifest import ManifestError
    from kbsub.eval.results.model import ResultError

    root = root.resolve()
    try:
        if not report.papers(root):  # or --check would find nothing wrong where there is nothing
            raise report.ReportError(f"{root}: no Markdown file with a report marker; name the project with --root")
        if check:
            stale = report.out_of_date(root)
            for name in stale:
                typer.echo(f"does not match the results: {name}")
            if stale:
                typer.echo("bring it up to date with: make report", err=True)
                raise typer.Exit(1)
            typer.echo("every paper, plot and manifest matches the results")
            return
        written = report.remake(root, force=redraw)
    except (report.ReportError, ResultError, ManifestError, ModuleNotFoundError) as error:
        hint = "; install it with: pip install matplotlib" if isinstance(error, ModuleNotFoundError) else ""
        typer.echo(f"kbsub report: {error}{hint}", err=True)
        raise typer.Exit(2) from None
    for name in written:
        typer.echo(f"written: {name}")
    if not written:
        typer.echo("nothing to change: every paper, plot and manifest matches the results")
