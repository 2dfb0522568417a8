"""The `kbsub` command: registers one verb a module of kbsub.eval.commands and does nothing else.

Nothing here imports torch: `kbsub --help` answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import Annotated

import typer

import kbsub.eval.commands as commands
from kbsub.eval.process.printable import shown_name
from kbsub.eval.report.console import accept_any_encoding

app: typer.Typer  # every verb; made when it is asked for


def _version(asked: bool) -> None:
    """End the call with one line: this project's version and the commit of KernelBench that it is written against."""
    if asked:
        from kbsub.adapters.pin import PIN
        from kbsub.adapters.version import VERSION

        typer.echo(f"kbsub {VERSION}, KernelBench {PIN[:12]}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="The version, and the pin.")
    ] = False,
) -> None:
    """Judge KernelBench candidates: official verdict, bit identity, stress, oracle, guards, timing."""


def make(asked: str | None = None) -> typer.Typer:
    """The command with the verb that is asked for, or, where that is none, with all of them.

    Imports are what a person waits for before anything is judged.
    """
    modules = {module.name.rstrip("_"): module.name for module in pkgutil.iter_modules(commands.__path__)}
    made = typer.Typer(no_args_is_help=True, help="Judge KernelBench candidates.")
    made.callback()(root)
    found = 0
    for name in [asked] if asked in modules else modules:
        verb = importlib.import_module(f"{commands.__name__}.{modules[name]}")
        if hasattr(verb, "command"):
            settings = getattr(verb, "CONTEXT", None)  # how click parses it, where a verb says so
            made.command(name=name, context_settings=settings)(verb.command)
            found += 1
    return made if found or asked is None else make()


def __getattr__(name: str) -> typer.Typer:
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = make()
    return made


def main() -> None:
    """Entry point of the `kbsub` command. A file or folder that cannot be used is exit code 2 and a sentence."""
    accept_any_encoding()
    try:
        make(sys.argv[1] if len(sys.argv) > 1 else None)()
    except OSError as error:  # read-only folders, full disks; with no file named it is a mistake of ours
        if error.filename is None:
            raise
        name = shown_name(error.filename)
        typer.echo(f"kbsub: {name}: {error.strerror}; choose another place, or mend this one", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
