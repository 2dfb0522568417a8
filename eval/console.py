"""What every command prints through: words come out as they are, on any terminal, in any encoding.

A path may hold "[x]" or ":x:", which rich takes for markup; it may be longer than the terminal is wide; and stdout may
know ASCII only. Knows nothing of what is printed.
"""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from rich.console import Console

LOG_WIDTH = 160  # a log file has no width of its own; 80 columns would fold every table


class PlainConsole(Console):
    """A rich console whose `print` takes a string for words: no markup, no emoji, no colours of its own, no folding.

    Tables and other renderables keep rich's markup; whoever puts a name into one escapes it.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if all(isinstance(each, str) for each in objects):
            options = {"markup": False, "emoji": False, "highlight": False, "soft_wrap": True, **options}
        super().print(*objects, **options)


def console_for_stdout() -> PlainConsole:
    """The console of a command: as wide as the terminal, LOG_WIDTH where there is none."""
    console = PlainConsole(emoji=False)
    return console if console.is_terminal else PlainConsole(emoji=False, width=LOG_WIDTH)


def accept_any_encoding() -> None:
    """From now on a character that stdout or stderr cannot encode is written as \\xe9 or \\u884c, and ends nothing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):  # closed, or detached by somebody: then nobody reads it
                stream.reconfigure(errors="backslashreplace")
