"""`kbsub doctor`: what this machine can certify, what is missing, and the command that mends it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    kernelbench: Annotated[
        Path | None, typer.Option(help="The checkout to look at (else KERNELBENCH_DIR, the user cache).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the tables.")] = False,
) -> None:
    """Say what this machine can certify, and what is missing, with the command that mends it."""
    from dataclasses import asdict

    from rich.table import Table
    from rich.text import Text

    from kbsub.eval.console import console_for_stdout
    from kbsub.eval.doctor import abilities, examine, python_line

    findings = examine(kernelbench)
    can = abilities(findings)
    if as_json:
        content = {"findings": [asdict(f) for f in findings], "abilities": [asdict(a) for a in can]}
        typer.echo(json.dumps(content, indent=1))
        return
    console = console_for_stdout()
    console.print(python_line(), highlight=False)
    found = Table("", "found", "mend it with", title="This machine", title_justify="left")
    for finding in findings:
        mark = Text("ok" if finding.good else "missing", "green" if finding.good else "yellow")
        found.add_row(Text.assemble(mark, f"  {finding.name}"), Text(finding.found), Text(finding.mend))
    console.print(found)
    certified = Table("", "needs", title="What it can certify", title_justify="left")
    for ability in can:
        mark = Text("no ", "yellow") if ability.missing else Text("yes", "green")
        certified.add_row(Text.assemble(mark, f"  {ability.name}"), Text(", ".join(ability.missing)))
    console.print(certified)
