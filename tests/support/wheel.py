"""The wheel of this repository, as a user gets it, for tests that install it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

SOURCES = (
    "pyproject.toml",
    "setup.py",
    "MANIFEST.in",
    "KERNELBENCH_COMMIT",
    "README.md",
    "LICENSE",
    "NOTICE",
    "action.yml",
)
FOLDERS = ("adapters", "eval", "submissions", "licenses", "docs/ci")


def copy_sources(target: Path) -> Path:
    """The packaged files only: a build in the repository itself would leave a build/ folder behind."""
    for name in SOURCES:
        shutil.copy2(ROOT / name, target / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"pip {' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"


def build_wheel(source: Path, target: Path) -> Path:
    """The wheel of a copy of the sources in `source`, built into `target` with this interpreter's setuptools."""
    copy_sources(source)
    pip("wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source))
    (built,) = target.glob("kb_submissions-*.whl")
    return built
