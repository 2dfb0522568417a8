"""Makes other people's text safe to store and to show: error texts, logs, file names. The one place that does it.

Text of a candidate must not be able to move a terminal's cursor, begin a line of its own, act in a CI log, or be what
a file format cannot hold. What cannot stand as it is becomes a visible escape, as Python's repr writes it. Knows
characters and nothing else: no processes, no tables, no files. The lowest layer; everything may import it.
"""

from __future__ import annotations

import re
import unicodedata

# What the runner of GitHub Actions (and of Azure) acts on: "::" where a line begins, "##[" and "##vso[" anywhere.
_COMMAND_ANYWHERE = re.compile(r"##(?=\[|vso\[)")
_COMMAND_AT_START = re.compile(r"^(\s*):(?=:)")
_LINE_BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_HTML_TAG = re.compile(r"<(?=[A-Za-z/!?])")


def printable(text: str) -> str:
    """The text with its lines and tabs, and every other character that does not show itself as an escape.

    Control characters (ESC, C1), lone surrogates, noncharacters such as U+FFFE, and invisible ones (bidi overrides,
    zero widths) read \\x1b, \\udce9, \\ufffe, \\u202e. No line can begin a workflow command of a CI log. What comes
    out holds for JSON, XML 1.0 and a terminal; given again it stays as it is.
    """
    text = text.replace("\r\n", "\n")
    if not text.isprintable():
        text = "".join(letter if letter in "\n\t" or _shows(letter) else _escape(letter) for letter in text)
    return "\n".join(map(_no_command, text.split("\n")))


def one_line(text: str) -> str:
    """The text on one line, for a table cell, a message or a line of output: line breaks become " | "."""
    lines = (line.strip() for line in _LINE_BREAKS.split(text))
    return printable(" | ".join(line for line in lines if line).replace("\t", " "))


def shown_name(name: object) -> str:
    """A file's name or path as it is shown and stored: one line, nothing left out ("a<line break>b" reads a\\nb).

    Two names may look alike afterwards; whoever uses the result as a key compares the results.
    """
    text = str(name)
    if not text.isprintable():
        text = "".join(letter if _shows(letter) else _escape(letter) for letter in text)
    return _no_command(text)


def table_cell(text: str) -> str:
    """One line for a table that folds its cells: a folded line may begin anywhere, so no "::" is left to begin it."""
    return one_line(text).replace("::", r":\x3a")


def markdown_cell(text: str) -> str:
    """One line for a cell of a Markdown table: no column mark and no HTML tag of the text's own."""
    return _HTML_TAG.sub("&lt;", one_line(text).replace("|", r"\|"))


def _shows(letter: str) -> bool:
    return letter.isprintable() or unicodedata.category(letter) == "Zs"  # Zs: spaces that are wider or do not break


def _escape(letter: str) -> str:
    return repr(letter)[1:-1]


def _no_command(line: str) -> str:
    return _COMMAND_AT_START.sub(r"\1\\x3a", _COMMAND_ANYWHERE.sub(r"#\\x23", line))
