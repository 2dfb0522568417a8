"""submissions/<task>/task.toml: what a task says of itself. A task without one gets the defaults.

Must not know what an operator is or how a size is used: it hands on what the file says.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from kbsub.eval.tasks.folder import submissions_folder
from kbsub.eval.tasks.toml_file import TaskFolderError, read_record

TASK_FILE = "task.toml"


class Sizes(BaseModel):
    """Sizes of the task other than its own, each as new values for integers that the reference program defines.

    check: about 512 MB in all; small: for a CPU and the host executor. {}: as written; None: not stated.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    check: dict[str, int] | None = None
    small: dict[str, int] | None = None


class TaskFile(BaseModel):
    """The task.toml of a task folder.

    operator: the package under eval/operators that knows its mathematics; None: nothing is known but its Model.
    reference: "level<L>_<id>" of KernelBench, or the name of a reference program in the folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    title: str = ""
    operator: str | None = None
    reference: str | None = None
    sizes: Sizes = Field(default_factory=Sizes)


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
