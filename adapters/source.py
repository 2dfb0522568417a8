"""Reads a candidate's file: how large it may be, what it may be called. Must not know what is in it, nor run it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kbsub.adapters.printable import shown_name

# The parent parses sources (cuda_source_of). The worst file that was tried, "a;" over and over, costs Python 3.11's ast
# 1.1 s and 240 MB at this size, 6 s and 930 MB at 1 MiB. The largest file of this repository has 43 KB.
SOURCE_LIMIT = 256 << 10  # bytes


class SourceError(ValueError):
    """A candidate's file is too large, or its name cannot be that of a row. Says which file, the rule, the way out."""


def read_limited(path: Path) -> bytes:
    """The bytes of a candidate's file. Raises SourceError beyond SOURCE_LIMIT (no more than that is read), OSError."""
    with path.open("rb") as file:
        data = file.read(SOURCE_LIMIT + 1)
        if len(data) > SOURCE_LIMIT:
            size = max(path.stat().st_size, len(data))
            raise SourceError(
                f"{shown_name(path.name)}: {size} bytes of source, the limit is {SOURCE_LIMIT} (256 KiB); compute "
                "tables and constants in the constructor instead of writing them out"
            )
    return data


def check_names(paths: Iterable[Path]) -> None:
    """Raise SourceError when the rows of these candidates would not keep apart: one name twice, or an @ in a name.

    The key of a row is the name without .py, in fp16 and bf16 with @fp16 or @bf16 behind it.
    """
    seen: dict[str, Path] = {}
    for path in paths:
        name = shown_name(path.stem)
        if "@" in name:
            raise SourceError(
                f"{shown_name(path)}: a candidate's name may hold no @: {name} could replace the row of another "
                "candidate in another precision; rename the file"
            )
        if name in seen:
            raise SourceError(
                f"{shown_name(seen[name])} and {shown_name(path)}: two files of one name would share a row; rename "
                "one, or run them one after the other into two files"
            )
        seen[name] = path
