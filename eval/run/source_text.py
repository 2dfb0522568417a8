"""Reads a candidate's file once: its digest, its text, or what is wrong with it in words. Runs nothing of it."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

from kbsub.adapters.source import SourceError, read_limited


def read_source(file: Path) -> tuple[str, str | None]:
    """(text, None), or ("", what is wrong): a file that is no text is a row, not a failure of the run."""
    return read_with_digest(file)[1:]


def read_with_digest(file: Path) -> tuple[str, str, str | None]:
    """(sha256, text, what is wrong) of one reading of the file."""
    data = b""
    try:
        data = read_limited(file)
        text, problem = io.TextIOWrapper(io.BytesIO(data), "utf-8").read(), None
    except SourceError as error:  # the sha256 is then that of nothing: the file was not read
        text, problem = "", str(error)
    except (OSError, UnicodeDecodeError) as error:
        text, problem = "", f"cannot be read as UTF-8 text: {error}"
    return hashlib.sha256(data).hexdigest(), text, problem
