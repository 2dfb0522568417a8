"""`kbsub measure`: the programs that make evidence, one file of kbsub.eval.measure each.

A program is a module with `main(arguments) -> exit code`, or with `command`, a function as typer takes it. The first
line of its docstring is what `kbsub measure` says of it. Adding the file adds the program.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated

import typer

import kbsub.eval.measure as programs_package
from kbsub.eval.commands import common

CONTEXT = {"allow_interspersed_args": False}  # what follows NAME is the program's own, --help too


def programs() -> dict[str, str]:
    """Name -> first line of the docstring of every program. Reads the files and imports none: some import torch."""
    found = {}
    for folder in programs_package.__path__:
        for file in sorted(Path(folder).glob("*.py")):
            tree = ast.parse(file.read_text("utf-8"))
            defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            if defined & {"main", "command"}:
                found[file.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def command(
    name: Annotated[str | None, typer.Argument(help="The program; without one, the list of them.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own; `kbsub measure NAME --help`.")] = None,
    quiet: common.Quiet = False,
    form: common.Format = "table",
) -> None:
    """Run one of the programs that make evidence. --format and --quiet, before NAME, are of the list of programs.

    Exit code: the program's own; 2 a name that is none, or a file that it needs and does not find.

    \b
    kbsub measure
    kbsub measure sweep --help
    kbsub measure --format json
    """
    known = programs()
    console = common.console_of("measure", form, quiet)
    if name is None:
        for each, words in known.items():
            console.print(f"{each:16} {words}")
        if form == "json":
            common.print_json(known)
        return
    chosen = name.replace("-", "_")
    if chosen not in known:
        typer.echo(f"kbsub measure {name}: no such program; there are {', '.join(known)}", err=True)
        raise typer.Exit(2)
    raise typer.Exit(run(chosen, arguments or []))


def run(name: str, arguments: list[str]) -> int:
    """The exit code of the program after running it in this process."""
    program = importlib.import_module(f"{programs_package.__name__}.{name}")
    if hasattr(program, "main"):
        return int(program.main(arguments) or 0)
    app = typer.Typer(add_completion=False)
    app.command()(program.command)
    return int(app(arguments, prog_name=f"kbsub measure {name}", standalone_mode=False) or 0)
