"""`kbsub audit`: would any stored case change class if rtol scaled the other argument?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.eval.commands import common


def command(
    results: Annotated[list[Path], typer.Argument(help="Result files, or any JSON with stored comparisons.")],
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Also the largest budget ratios of each file.")
    ] = False,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Would any stored case change class if rtol scaled the other argument?

    torch.allclose(reference, candidate) gives the candidate's own magnitude to the tolerance; every stored comparison
    also holds the answer with the reference's. Exit code: 0 no case differs, 1 some do, 2 a file cannot be read,
    3 there is no stored comparison to audit.

    \b
    kbsub audit results/h200/level1_40.json
    kbsub audit runs/cpu/level1_36.json --verbose
    kbsub audit results/h200/level1_40.json --format json
    """
    from kbsub.eval.process.printable import one_line, printable, shown_name
    from kbsub.eval.results.audit import AuditError, audit_file

    console = common.console_of("audit", form, quiet)
    total = changed = 0
    content = []
    for path in results:
        try:
            found = audit_file(path)
        except AuditError as error:
            typer.echo(printable(str(error)), err=True)
            raise typer.Exit(2) from error
        total += found.comparisons
        changed += len(found.changes)
        closest = one_line(str(found.closest)) if found.closest is not None else None
        changes = [one_line(str(change)) for change in found.changes]
        file = {"file": shown_name(path), "comparisons": found.comparisons, "changes": changes, "closest": closest}
        content.append(file)
        counted = f"{found.comparisons} stored comparisons, {len(found.changes)} would change class"
        console.print(f"{shown_name(path)}: {counted}")
        for change in changes:
            console.print(f"  {change}")
        if verbose and closest is not None:
            console.print(f"  closest to the edge: {closest}")
    if form == "json":
        common.print_json(content)
    if not total:
        typer.echo("no stored comparison: run kbsub eval --only identity,stress first", err=True)
        raise typer.Exit(3)
    raise typer.Exit(1 if changed else 0)
