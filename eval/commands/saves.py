"""`kbsub eval --watch`: says when a candidate was saved. Judges nothing.

Files are looked at, not waited for: editors rename, truncate and touch, and a network drive sends no events.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

PERIOD_S = 0.3

Stamp = tuple[tuple[int, int] | None, ...]  # (mtime in ns, bytes) a file; None while it is not there


class SaveWatch:
    """The saves of some files: `saves()` yields at once and then after every change, `changed()` asks in between."""

    def __init__(self, files: Sequence[Path], pause: Callable[[float], None] = time.sleep) -> None:
        self.files, self.pause = tuple(files), pause
        self.seen: Stamp = ()

    def stamp(self) -> Stamp:
        found: list[tuple[int, int] | None] = []
        for file in self.files:
            try:
                facts = file.stat()
                found.append((facts.st_mtime_ns, facts.st_size))
            except OSError:
                found.append(None)
        return tuple(found)

    def changed(self) -> bool:
        """Whether a file was saved since the last yield; one that is away for a moment, as editors do, is no save."""
        now = self.stamp()
        return None not in now and now != self.seen

    def saves(self) -> Iterator[int]:
        """1, 2, ...: one for every state of the files that is to be judged."""
        count = 0
        while True:
            while not self.changed():
                self.pause(PERIOD_S)
            self.seen = self.stamp()
            count += 1
            yield count
