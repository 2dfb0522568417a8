"""`kbsub verify`: a result folder against its manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbsub.eval.commands import common


def command(
    folder: Annotated[Path, typer.Argument(help="A folder of results, such as results/h200.")],
    write: Annotated[bool, typer.Option("--write", help="Write the manifest from the files as they are now.")] = False,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Check a result folder against its manifest (sha256 of every file), and that its results can be read.

    Exit code: 0 everything is as listed; 1 a file is missing, altered, not listed or not readable; 2 the call is wrong.

    \b
    kbsub verify results/h200
    kbsub verify --write results/h200
    kbsub verify results/h200 --format json
    """
    from kbsub.eval.process.printable import one_line, printable, shown_name
    from kbsub.eval.results import manifest
    from kbsub.eval.results.model import ResultError, read_result

    console = common.console_of("verify", form, quiet)
    if not folder.is_dir():
        typer.echo(f"kbsub verify: {shown_name(folder)}: no such folder", err=True)
        raise typer.Exit(2)
    if write:
        console.print(f"written: {manifest.write_manifest(folder)}")
    try:
        problems = [f"{problem.file}: {problem.what}" for problem in manifest.check_manifest(folder)]
    except manifest.ManifestError as error:
        typer.echo(printable(f"kbsub verify: {error}"), err=True)
        raise typer.Exit(1) from None
    count = 0
    for name in manifest.files_of(folder):
        if is_result(folder / name):
            count += 1
            try:
                read_result(folder / name)
            except ResultError as error:
                problems.append(str(error))
    for problem in problems:
        console.print(one_line(problem))
    if form == "json":
        common.print_json({"folder": shown_name(folder), "problems": [one_line(each) for each in problems]})
    if problems:
        typer.echo(
            f"{folder}: {len(problems)} problems; if the change is meant: kbsub verify --write {folder}", err=True
        )
        raise typer.Exit(1)
    console.print(f"{shown_name(folder)}: every file is as listed; {count} result files can be read")


def is_result(path: Path) -> bool:
    """Whether a JSON file is a result: `schema` and `candidates`, and no record, which says `what` it is of."""
    import json

    if path.suffix != ".json":
        return False
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return True  # broken JSON: let the reader say so
    return isinstance(content, dict) and {"schema", "candidates"} <= content.keys() and "what" not in content
