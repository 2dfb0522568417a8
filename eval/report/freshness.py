"""Which measured rows are of a version of their file that is no longer there. Knows result rows and folders of files.

A number stays true of the file that gave it; what a reader must be told is that the file beside it is another one now.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kbsub.eval.report.tables import Table, programs
from kbsub.eval.results.manifest import digest
from kbsub.eval.results.model import Candidate, Result

MARK = "†"
PEERS = "peers"  # submissions/<task>/peers: programs of other people, called as candidates
SHOWN = 8  # digits of a sha256 that a footnote shows
NAME = re.compile(r"`([\w.-]+)`")  # how a table names a candidate: tables.title_of


@dataclass(frozen=True)
class Outdated:
    """A candidate whose file is not the measured one; `now` is None when the file is gone."""

    stem: str
    measured: str
    now: str | None
    precision: str = "fp32"

    def words(self, folder: str, options: str) -> str:
        """The footnote: what was measured, and how it is renewed (`options`: of kbsub eval, such as "--out FILE")."""
        version = f"`{self.stem}` was measured on an earlier version of the file: sha256 {self.measured[:SHOWN]}…"
        if self.now is None:
            return f"{version}; {folder} has no such file any more."
        call = f"{self.stem}{'' if self.precision == 'fp32' else f' --precision {self.precision}'} {options}".strip()
        renewal = f"run `kbsub eval {call}` and `kbsub bench {call}` on a GPU to renew it"
        return f"{version}; {renewal}."


def digest_of(path: Path) -> str | None:
    """sha256 of a file as it is; None when there is none."""
    return digest(path) if path.is_file() else None


def digest_now(folder: Path, stem: str) -> str | None:
    """sha256 of the candidate's file as it is in this checkout; None when there is none."""
    return digest_of(folder / f"{stem}.py") or digest_of(folder / PEERS / f"{stem}.py")


def outdated(
    result: Result, folder: Path | None, precisions: Iterable[str] = ("fp32",), *, gone: bool = True
) -> list[Outdated]:
    """The rows of `result` at these precisions whose measured sha256 is not that of the file in `folder`.

    Nothing without such a folder: then there is no file to differ from. `gone` False leaves absent files out, for
    results that may hold files which were never in the folder.
    """
    if folder is None or not folder.is_dir():
        return []
    found: dict[tuple[str, str], Outdated] = {}
    for precision in precisions:
        for stem, row in programs(result, precision).items():
            now = digest_now(folder, stem)
            if isinstance(row, Candidate) and now != row.sha256 and (gone or now is not None):
                found.setdefault((stem, row.sha256), Outdated(stem, row.sha256, now, precision))
    return list(found.values())


def mark(table: Table, stale: Sequence[Outdated], folder: str, options: str) -> Table:
    """The table with a dagger at each outdated candidate it shows (row, column or note), and a footnote for each."""
    versions: dict[str, list[Outdated]] = {}
    for each in stale:
        versions.setdefault(each.stem, []).append(each)
    shown: dict[Outdated, None] = {}

    def dagger(name: re.Match[str]) -> str:
        shown.update(dict.fromkeys(versions.get(name[1], [])))
        return name[0] + (MARK if name[1] in versions else "")

    def marked(cell: str) -> str:
        return NAME.sub(dagger, cell, count=1) if NAME.match(cell) else cell

    table.headers = [marked(header) for header in table.headers]
    table.rows = [[marked(row[0]), *row[1:]] for row in table.rows]
    if table.rows:  # a comparison names the one that it is about, and who is left out, only there
        table.notes = [NAME.sub(dagger, note) for note in table.notes]
    table.notes = [*table.notes, *footnotes(shown, folder, options)]
    return table


def footnotes(stale: Iterable[Outdated], folder: str, options: str) -> list[str]:
    return [f"{MARK} {each.words(folder, options)}" for each in stale]
