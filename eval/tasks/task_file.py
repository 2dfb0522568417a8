"""submissions/<task>/task.toml: what a task says of itself. A task without one gets the defaults.

Must not know what an operator is or how a size is used: it hands on what the file says.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field

from kbsub.eval.tasks.folder import LOCAL, is_local, submissions_folder, submissions_roots
from kbsub.eval.tasks.grid import GridShape
from kbsub.eval.tasks.toml_file import FrozenModel, TaskFolderError, read_record

TASK_FILE = "task.toml"
EMBEDDED = "level1_40"  # the one KernelBench problem that needs no checkout


class Sizes(FrozenModel):
    """Sizes of the task other than its own, each as new values for integers that the reference program defines.

    check: about 512 MB in all; small: for a CPU and the host executor. {}: as written; None: not stated.
    """

    check: dict[str, int] | None = None
    small: dict[str, int] | None = None


class TaskFile(FrozenModel):
    """The task.toml of a task folder.

    operator: the package under eval/operators that knows its mathematics; None: nothing is known but its Model.
    reference: "level<L>_<id>" of KernelBench, or the name of a reference program in the folder.
    grid: how a number of rows and a width become a call; a task without one is in no sweep.
    """

    title: str = ""
    operator: str | None = None
    reference: str | None = None
    sizes: Sizes = Field(default_factory=Sizes)
    grid: tuple[GridShape, ...] = ()


def read_task_file(folder: Path | None) -> TaskFile:
    """The task folder's task.toml; the defaults where there is none. TaskFolderError when it cannot be believed."""
    found = read_record(None if folder is None else folder / TASK_FILE, TaskFile)
    if folder is None or found.reference is None:
        return found
    if re.fullmatch(r"level\d+_\d+", found.reference):
        if found.reference != folder.name:
            raise TaskFolderError(
                f"{folder / TASK_FILE}: reference = {found.reference!r}, but the folder is {folder.name}: a folder is "
                "named after its task"
            )
    elif not (folder / found.reference).is_file():
        raise TaskFolderError(
            f"{folder / TASK_FILE}: reference = {found.reference!r} is neither level<L>_<id> nor a file of the folder"
        )
    return found


def task_file(slug: str) -> TaskFile:
    """What the task of this name ("level1_40") says of itself in this installation; the defaults for any other."""
    return read_task_file(submissions_folder(slug))


def task_text(folder: Path) -> str | None:
    """What --task would say for the task of this folder; None where its task.toml names no reference."""
    reference = read_task_file(folder).reference
    if reference is None or re.fullmatch(r"level\d+_\d+", reference):
        return reference
    return f"{LOCAL}{folder / reference}"


def needs_checkout(task: str) -> bool:
    """Whether the program of the task that --task names is in a KernelBench checkout alone."""
    return not is_local(task) and task != EMBEDDED


def swept_folders() -> dict[str, Path]:
    """{name: path} of the folders under submissions/ whose task has a grid. TaskFolderError where there is none."""
    tables = [table for root in submissions_roots() for table in root.glob(f"*/{TASK_FILE}")]
    swept = {table.parent.name: table.parent for table in sorted(tables) if read_task_file(table.parent).grid}
    if not swept:
        raise TaskFolderError(f"no folder under submissions/ of this installation has a {TASK_FILE} with a [[grid]]")
    return swept
