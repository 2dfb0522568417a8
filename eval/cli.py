"""The `kbsub` command: registers one verb a module of kbsub.eval.commands and does nothing else.

Nothing here imports torch: `kbsub --help` answers at once.
"""

from __future__ import annotations

import importlib
import pkgutil

import typer

import kbsub.eval.commands as commands

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Judge KernelBench candidates.")


@app.callback()
def root() -> None:
    """Judge KernelBench candidates: official verdict, bit identity, stress, oracle, guards, timing."""


for module in pkgutil.iter_modules(commands.__path__):
    verb = importlib.import_module(f"{commands.__name__}.{module.name}")
    if hasattr(verb, "command"):
        app.command(name=module.name.rstrip("_"))(verb.command)


def main() -> None:
    """Entry point of the `kbsub` command."""
    app()


if __name__ == "__main__":
    main()
