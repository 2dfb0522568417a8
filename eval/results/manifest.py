"""The manifest of a result folder: the sha256 of every file, in the format of `sha256sum`.

Knows files only. `sha256sum -c MANIFEST.sha256` inside the folder checks the same thing without this project.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from kbsub.eval.results.files import write_text_atomic

NAME = "MANIFEST.sha256"


class ManifestError(Exception):
    """A manifest that is not there or cannot be read; the message says what to do."""


@dataclass(frozen=True)
class Problem:
    """One file that is not as the manifest says: what is wrong with it."""

    file: str
    what: str


def files_of(folder: Path) -> list[str]:
    """Every file below the folder but the manifest and hidden ones, as sorted posix paths relative to it."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = [path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts)]
    return sorted(name for name in names if name != NAME)


def digest(path: Path) -> str:
    """sha256 of a file, as `sha256sum` writes it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def manifest_text(folder: Path) -> str:
    return "".join(f"{digest(folder / name)}  {name}\n" for name in files_of(folder))


def write_manifest(folder: Path) -> Path:
    """Write the folder's manifest, atomically; returns its path."""
    path = folder / NAME
    write_text_atomic(path, manifest_text(folder))
    return path


def read_manifest(folder: Path) -> dict[str, str]:
    """File name -> sha256. Raises ManifestError when there is none, or a line that is not of `sha256sum`."""
    path = folder / NAME
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(
            f"{path}: cannot be read ({error}); write it with: kbsub verify --write {folder}"
        ) from error
    entries = {}
    for number, line in enumerate(lines, start=1):
        sha256, separator, name = line.partition("  ")
        if not separator or len(sha256) != 64 or not name:
            raise ManifestError(f"{path}: line {number} is not of the form '<sha256>  <file>': {line[:80]!r}")
        entries[name] = sha256
    return entries


def check_manifest(folder: Path) -> list[Problem]:
    """Every file that is missing, altered or not listed; [] when the folder is as its manifest says."""
    listed = read_manifest(folder)
    present = set(files_of(folder))
    problems = [Problem(name, "is listed and not there") for name in sorted(listed.keys() - present)]
    for name in sorted(listed.keys() & present):
        found = digest(folder / name)
        if found != listed[name]:
            problems.append(Problem(name, f"has sha256 {found[:16]}..., the manifest says {listed[name][:16]}..."))
    problems += [Problem(name, "is there and not listed") for name in sorted(present - listed.keys())]
    return problems
