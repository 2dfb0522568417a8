"""Where the folder of a task lies: the only place that knows where this installation keeps submissions/."""

from __future__ import annotations

import importlib.util
from pathlib import Path

LOCAL = "local:"


def submissions_roots() -> list[Path]:
    """The folders that are `kbsub.submissions` here; none where it is not installed. Nothing of it is imported."""
    spec = importlib.util.find_spec("kbsub.submissions")
    return [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []


def submissions_folder(slug: str) -> Path | None:
    """The folder of a task's candidates in this installation ("level1_40"), or None."""
    return next((root / slug for root in submissions_roots() if (root / slug).is_dir()), None)


def is_local(task: str) -> bool:
    """Whether the text of --task names a reference program of one's own: "local:<path>" or the path of a .py file."""
    return task.startswith(LOCAL) or task.endswith(".py")


def folder_of(task: str) -> Path | None:
    """The folder that goes with the text of --task: beside a local reference program, else under submissions/."""
    return Path(task.removeprefix(LOCAL)).parent if is_local(task) else submissions_folder(task)
