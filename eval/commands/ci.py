"""`kbsub ci`: ready-made CI, written where the CI system looks for it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from kbsub.eval.commands import common

# What is written -> which of the packaged files it is.
FILES = {
    "github": {
        ".github/workflows/kernels.yml": "github.yml",
        ".github/actions/kbsub-gate/action.yml": "action.yml",
    },
    "gitlab": {"kbsub.gitlab-ci.yml": "gitlab.yml"},
}
PACKAGED = Path(__file__).resolve().parents[1] / "ci"  # in a wheel: setup.py puts them there
ROOT = Path(__file__).resolve().parents[2]


def command(
    system: Annotated[str, typer.Argument(help="github or gitlab.")],
    to: Annotated[Path, typer.Option(help="The root of the repository of kernels.")] = Path("."),
) -> None:
    """Write a CPU job and a GPU job that gate candidates: a workflow and its action for GitHub, a template for GitLab.

    What is there already is never written over. Exit code: 0 written; 2 the call is wrong.

    \b
    kbsub ci github
    kbsub ci gitlab --to ../my_kernels
    """
    from kbsub.eval.process.printable import shown_name

    if system not in FILES:
        common.stop("ci", common.EXIT_USAGE, f"{system}: no such system; there are {', '.join(FILES)}")
    targets = {to / name: packaged(source) for name, source in FILES[system].items()}
    if there := [target for target in targets if target.exists()]:
        common.stop("ci", common.EXIT_USAGE, f"{shown_name(there[0])} exists: move it away, or choose another --to")
    for target, source in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        typer.echo(f"wrote {shown_name(target)}")
    typer.echo(
        "now set in it: CANDIDATES, PACKAGE (which kb-submissions pip installs), and TASK unless each file says it"
    )


def packaged(name: str) -> Path:
    """A CI file of this project: of the wheel, else of the repository."""
    places = (PACKAGED / name, ROOT / name, ROOT / "docs" / "ci" / name)
    return next(place for place in places if place.is_file())
