"""Where the tests find their files, and what a child process needs to find the modules of support/."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent


def child_path() -> dict[str, str]:
    """The environment of a child that is given a target of support/ by name: this folder, before what was there."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))}
