"""`kbsub doctor`: what this machine can certify, what is missing, and the command that mends it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.adapters.pin import PIN
from kbsub.adapters.version import VERSION
from kbsub.eval.commands import common


def command(
    kernelbench: Annotated[
        Path | None, typer.Option(help="The checkout to look at (else KERNELBENCH_DIR, the user cache).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    clear: Annotated[
        list[str] | None,
        typer.Option(help="Delete a part of the user cache, by its name in the table, or all; may be repeated."),
    ] = None,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Say what this machine can certify, and what is missing, with the command that mends it.

    Exit code: 0; 2 the call is wrong.

    \b
    kbsub doctor
    kbsub doctor --format json
    kbsub doctor --clear cells
    """
    from dataclasses import asdict

    from rich.table import Table
    from rich.text import Text

    from kbsub.eval.process.printable import one_line, shown_name
    from kbsub.eval.run.doctor import abilities, clear_caches, examine, python_line

    console = common.console_of("doctor", "json" if as_json else form, quiet)
    if clear:
        try:
            for name, size in clear_caches(clear).items():
                console.print(one_line(f"deleted {shown_name(name)}: {size / 1e6:.1f} MB"))
        except ValueError as error:
            common.stop("doctor", common.EXIT_USAGE, f"--clear: {error}")
        return
    findings = examine(kernelbench)
    can = abilities(findings)
    if as_json or form == "json":
        content = {"findings": [asdict(f) for f in findings], "abilities": [asdict(a) for a in can]}
        common.print_json({"version": VERSION, "kernelbench_commit": PIN, **content})
        return
    console.print(f"kbsub {VERSION}, KernelBench {PIN[:12]}; {python_line()}")
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
