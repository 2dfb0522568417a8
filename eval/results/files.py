"""Writes a file so that a reader sees the old one or the new one, never a part, whatever interrupts the writer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_text_atomic(path: Path, text: str) -> None:
    """Write `text` (UTF-8) beside `path` and rename it into place. OSError when it cannot be: the old file is whole."""

    def write(draft: Path) -> None:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    replace_atomic(path, write)


def replace_atomic(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a draft in the folder of `path`, then rename it; no draft is left behind when it fails.

    A device, a pipe or a socket at `path` is written into, never replaced.
    The draft does not end as `path` does: whoever lists a folder's *.json must not find half of one.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / "draft"
            write(draft)
            with path.open("wb") as device:
                device.write(draft.read_bytes())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    draft = Path(name)
    try:
        write(draft)
        os.chmod(draft, 0o644)  # mkstemp's 0600 would hide committed evidence from others
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
