"""What several tests read and one makes, also where pytest-xdist gives them to several workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from filelock import FileLock


def kept(base: Path, name: str, make: Callable[[Path], dict[str, Any]]) -> Any:
    """What `make(folder)` returned, as JSON has it, the first time that a worker of this test run asked.

    base: `tmp_path_factory.getbasetemp()`. What skips or fails in `make` is made again for the next who asks.
    """
    base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder = base / name
    with FileLock(f"{folder}.guard"):
        folder.mkdir(exist_ok=True)
        if not (folder / "found.json").exists():
            (folder / "found.json").write_text(json.dumps(make(folder)))
    return SimpleNamespace(**json.loads((folder / "found.json").read_text()))
