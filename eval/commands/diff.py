"""`kbsub diff`: what changed between two judged run folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.eval.commands import common


def command(
    before: Annotated[Path, typer.Argument(help="A run folder that kbsub eval has judged.")],
    after: Annotated[Path, typer.Argument(help="Another one, of the same samples.")],
    same_within: Annotated[
        float, typer.Option(help="Times this much apart, as a part of the smaller, count as the same.", min=0.0)
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Say which verdicts and times differ between two runs, sample by sample.

    Exit code: 0 nothing changed; 1 something did; 2 the call is wrong.

    \b
    kbsub diff runs/before runs/after
    kbsub diff runs/before runs/after --same-within 0.1 --format json
    """
    from kbsub.eval.process.printable import one_line
    from kbsub.eval.report.board import diff, figures

    console = common.console_of("diff", "json" if as_json else form, quiet)
    try:
        found = diff.diff(before, after, same_within)
    except figures.BoardError as error:
        common.stop("diff", common.EXIT_USAGE, str(error))
    if as_json or form == "json":
        common.print_json(found)
    else:
        for words in diff.words(found):
            console.print(one_line(words))
    raise typer.Exit(1 if found["changed"] or found["only_before"] or found["only_after"] else 0)
