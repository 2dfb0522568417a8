"""Which candidate files a person means: paths, names of the task's own candidates, folders that declare theirs.

Every command asks here, so that one name means one file everywhere. Reads no candidate, imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kbsub.adapters.source import SourceError, check_names
from kbsub.adapters.task import TaskError
from kbsub.eval.tasks.declarations import FILE_NAME, NOT_CANDIDATES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def candidate_files(names: Sequence[str], folder: Path | None) -> tuple[Path, ...]:
    """The files called `names` for a task whose folder is `folder`; without names every candidate of that folder.

    A name is the path of a file, the path of a folder with a candidates.toml (all its candidates), or, where no such
    file exists, a candidate of the task's own folder, with or without ".py". Raises TaskError for a name that is none
    of these, for two files of one stem, and when there is nothing to choose from.
    """
    if names:
        files = [file for name in names for file in _named(name, folder)]
    elif folder is None:
        raise TaskError("this task has no folder under submissions/: name the candidate files")
    elif not (folder / FILE_NAME).is_file():
        raise TaskError(f"{folder}: declares no candidates ({FILE_NAME}): name the candidate files")
    else:
        files = folder_files(folder)
    try:
        check_names(files)
    except SourceError as error:
        raise TaskError(str(error)) from error
    return tuple(files)


def folder_files(folder: Path) -> list[Path]:
    """The candidate files of a folder: those that its candidates.toml names in its order, then any others by name.

    Whether that file can be believed is not asked here: read_declarations says so, in words.
    """
    files = {file.stem: file for file in sorted(folder.glob("*.py")) if file.name not in NOT_CANDIDATES}
    try:
        order = list(tomllib.loads((folder / FILE_NAME).read_text("utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        order = []
    return [files[stem] for stem in dict.fromkeys([*order, *files]) if stem in files]


def _named(name: str, folder: Path | None) -> list[Path]:
    path = Path(name)
    if path.is_file():
        return [path]
    if path.is_dir() and (path / FILE_NAME).is_file():
        return folder_files(path)
    if folder is not None and path.parent == Path(".") and (folder / f"{path.stem}.py").is_file():
        return [folder / f"{path.stem}.py"]
    if path.is_dir():
        raise TaskError(f"{name}: a folder that declares no candidates ({FILE_NAME}); name the candidate files")
    there = ", ".join(file.stem for file in folder_files(folder)) if folder is not None and folder.is_dir() else ""
    own = f", and none of that name in {folder.name} (there: {there or 'none'})" if folder is not None else ""
    raise TaskError(f"{name}: no such candidate file{own}")
