"""The `kbsub` command: registers one verb a module of kbsub.eval.commands and does nothing else.

Nothing here imports torch: `kbsub --help` answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import typer

import kbsub.eval.commands as commands
from kbsub.adapters.printable import shown_name
from kbsub.eval.console import accept_any_encoding

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Judge KernelBench candidates.")


@app.callback()
def root() -> None:
    """Judge KernelBench candidates: official verdict, bit identity, stress, oracle, guards, timing."""


for module in pkgutil.iter_modules(commands.__path__):
    verb = importlib.import_module(f"{commands.__name__}.{module.name}")
    if hasattr(verb, "command"):
        app.command(name=module.name.rstrip("_"))(verb.command)
    elif hasattr(verb, "app"):  # a verb with verbs of its own
        app.add_typer(verb.app, name=module.name)


def main() -> None:
    """Entry point of the `kbsub` command. A file or folder that cannot be used is exit code 2 and a sentence."""
    accept_any_encoding()
    try:
        app()
    except OSError as error:  # read-only folders, full disks; with no file named it is a mistake of ours
        if error.filename is None:
            raise
        name = shown_name(error.filename)
        typer.echo(f"kbsub: {name}: {error.strerror}; choose another place, or mend this one", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
