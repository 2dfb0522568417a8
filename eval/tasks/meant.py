"""Which task a call means where --task is not given: what the candidates say of themselves, else level1_40.

A file says it in its header, the comment lines above everything else:

    # kbsub: task=level1_19

(`kbsub new` writes that line first), by its name, as KernelBench's scripts name candidates (level_1_problem_19_...), or
by lying in a task's folder of this repository, submissions/level1_36.
Only a problem of KernelBench is taken from a file: the path of a reference program is a person's to name, since a
candidate that chose its own judge would always be right. Executes nothing, imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kbsub.adapters.task import TaskError
from kbsub.eval.process.printable import shown_name
from kbsub.eval.tasks.folder import submissions_roots

DEFAULT_TASK = "level1_40"
NAMED = re.compile(r"level_(\d+)_problem_(\d+)(?=[_.])")  # how KernelBench's scripts name a candidate
MARKER = "# kbsub: task="
_SAID = re.compile(r"#\s*kbsub:\s*task\s*=\s*(.*?)\s*")
_KERNELBENCH = re.compile(r"level\d+_\d+")
_HEADER_BYTES = 4096  # a header is a few lines; the rest of a file of any size is not read here


@dataclass(frozen=True)
class Meant:
    """The task as --task would name it. `note`: what to say where nothing named it; "" where something did."""

    task: str
    note: str = ""


def meant_task(task: str, candidates: Sequence[str]) -> Meant:
    """`task`, the text of --task; where it is "", what the candidates (paths or names, as given) say.

    Raises TaskError where they say different tasks, or where a header names a reference program by its path.
    """
    if task:
        return Meant(task)
    said = {name: said_by(Path(name)) for name in candidates}
    tasks = sorted({each or DEFAULT_TASK for each in said.values()})
    if len(tasks) > 1:
        raise TaskError(f"the files are of several tasks ({', '.join(tasks)}): name one with --task")
    silent = [name for name, each in said.items() if each is None and Path(name).is_file()]
    if not silent:
        return Meant(next(iter(tasks), DEFAULT_TASK))
    words = f"no --task: judged as {DEFAULT_TASK}; {shown_name(silent[0])} names no task"
    return Meant(DEFAULT_TASK, f"{words}. If it is of another, add --task level<L>_<id> or the path of a reference")


def said_by(file: Path) -> str | None:
    """The problem of KernelBench that the file says it is for, "level1_19"; None where it says none, or is not there.

    Raises TaskError where its name and its header say different ones, and for a header that names anything else.
    """
    match = NAMED.match(file.name)
    place = f"level{int(match[1])}_{int(match[2])}" if match else _home(file)
    written = header(file)
    if written is None:
        return place
    if _KERNELBENCH.fullmatch(written) is None:
        raise TaskError(
            f"{shown_name(file)}: its header says task={shown_name(written[:80])}; a file may name level<L>_<id> only: "
            "name a reference program of your own with --task"
        )
    if place not in (None, written):
        words = f"the files are of several tasks ({shown_name(file)}: {place} by its name, {written} by its header)"
        raise TaskError(f"{words}: name one with --task")
    return written


def header(file: Path) -> str | None:
    """What stands behind `task=` in the comment lines above everything else; None without such a line or file."""
    try:
        with file.open("rb") as stream:
            lines = stream.read(_HEADER_BYTES).decode("utf-8-sig", "replace").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.strip() and not line.startswith("#"):
            return None
        if (match := _SAID.fullmatch(line)) and match[1]:
            return match[1]
    return None


def _home(file: Path) -> str | None:
    """The problem whose folder of this repository the file lies in."""
    where = file.resolve()
    for root in submissions_roots():
        if root.resolve() in where.parents:
            name = where.relative_to(root.resolve()).parts[0]
            return name if _KERNELBENCH.fullmatch(name) else None
    return None
