"""Reads a TOML file of a task folder into its record; says which file and key are wrong. Knows no record itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Model = TypeVar("Model", bound=BaseModel)


class FrozenModel(BaseModel):
    """What a task's files say: every key is known, nothing is changed. Built when first used: most verbs use few."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class TaskFolderError(ValueError):
    """A file of a task folder that cannot be believed; the message names the file, the key and the rule."""


def read_record(path: Path | None, record: type[Model]) -> Model:
    """The record in `path`; the record's defaults where there is no such file. Raises TaskFolderError."""
    if path is None or not path.is_file():
        return record()
    try:
        return record.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskFolderError(f"{path}: is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise TaskFolderError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
