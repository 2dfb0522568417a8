"""The cell of a candidate that is judged against a task: its cache, and the files it must see inside.

Knows where tasks lie; must not know what is judged. Imports no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from kbsub.eval.process.cell import Cell, candidate_folder
from kbsub.eval.tasks.folder import LOCAL


def cell_of(sha256s: Iterable[str], task: str, kernelbench: str | Path | None) -> Cell:
    """The cell of a candidate, by its file's sha256; of several in one process, a cell that these very files share.

    task: as --task names it. kernelbench: the checkout that is read inside. Candidates that run together could write
    each other's cache, so the cell of several has a cache that none of them uses alone.
    """
    names = sorted(set(sha256s))
    name = names[0] if len(names) == 1 else hashlib.sha256("\n".join(names).encode()).hexdigest()
    checkout = [Path(kernelbench).resolve()] if kernelbench else []
    return Cell(candidate_folder(name), readable=(*checkout, *read_with(task)))


def read_with(task: str) -> list[Path]:
    """What is read of a local task: its program, and the whole folder of one that has a task.toml beside it."""
    file = Path(task.removeprefix(LOCAL)).absolute()
    if not file.exists():
        return []  # a problem of the checkout, or of submissions/
    folder = file if file.is_dir() else file.parent
    return [folder] if (folder / "task.toml").exists() else [file]
