"""Text of others is shown as it is where it can be, as a visible escape where not, and never acts on its reader."""

from __future__ import annotations

import json
import xml.etree.ElementTree
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kbsub.eval.process.printable import markdown_cell, one_line, printable, shown_name, table_cell
from kbsub.eval.report.gate_report import as_junit
from kbsub.eval.report.tables import Table
from kbsub.eval.results.model import jsonable, write_json_atomic
from kbsub.eval.run.gate import Answer, Check

# text, printable text
CASES = [
    ("W\u00f6rter, \u4e2d\u6587, \U0001f600", "W\u00f6rter, \u4e2d\u6587, \U0001f600"),
    ("two\nlines\tand a tab", "two\nlines\tand a tab"),
    ("a\r\nb", "a\nb"),
    ("no\u00a0break", "no\u00a0break"),
    ("\x1b[31m", r"\x1b[31m"),
    ("\x00\x07\x0b\x7f\x9b", r"\x00\x07\x0b\x7f\x9b"),
    ("progress 1\rprogress 2", r"progress 1\rprogress 2"),
    ("caf\udce9", r"caf\udce9"),
    ("\ufffe\uffff\ufdd0\U0001fffe", r"\ufffe\uffff\ufdd0\U0001fffe"),
    ("\u202e\u2066\u200b\u2028", r"\u202e\u2066\u200b\u2028"),
    ("::error::x", r"\x3a:error::x"),
    ("a\n \t::stop-commands::x", "a\n \t\\x3a:stop-commands::x"),
    ("\u00a0::error::x", "\u00a0\\x3a:error::x"),  # the runner trims what Unicode calls white space
    ("x ##[error]y ##vso[task]", r"x #\x23[error]y #\x23vso[task]"),  # acts anywhere in a line
    ("std::bad_alloc", "std::bad_alloc"),
    ("# heading, ## heading", "# heading, ## heading"),
    ("[red]", "[red]"),
]


@pytest.mark.parametrize(("text", "shown"), CASES, ids=[ascii(text) for text, _ in CASES])
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_every_character_can_be_stored_and_shown() -> None:
    """All 1,114,112 of them: in UTF-8, in XML 1.0, and none that moves a cursor."""
    text = printable("".join(map(chr, range(0x110000))))
    xml.etree.ElementTree.fromstring(f"<a>{text.replace('&', '').replace('<', '')}</a>".encode())
    assert {letter for letter in text if ord(letter) < 32 or 127 <= ord(letter) < 160} == {"\n", "\t"}


@pytest.mark.parametrize(("text", "shown"), [("a\n\n  b\r\nc\u2028d", "a | b | c | d"), ("a\n::error", "a | ::error")])
def test_one_line(text: str, shown: str) -> None:
    assert one_line(text) == shown


def test_a_name_keeps_all_of_itself() -> None:
    assert shown_name("a\nb\tc \udce9") == r"a\nb\tc \udce9"


def test_a_cell_that_is_folded_begins_no_command() -> None:
    assert "::" not in table_cell("x" * 40 + "::error::y")


def test_a_markdown_cell_stays_one_cell() -> None:
    assert markdown_cell("a | b\n</td><b>, 1 < 2") == r"a \| b \| &lt;/td>&lt;b>, 1 < 2"


def test_a_table_of_hostile_cells_is_whole() -> None:
    cells = ["[red]\x1b[1A\n| x |", "::error::", "\ufffe"]
    table = Table("t [x]\n::error::", ["a [b]", "c", "d"], [cells, cells], ["note\n::stop"])
    markdown = table.markdown().splitlines()
    assert len(markdown) == 6 and len({line.replace(r"\|", "").count("|") for line in markdown[:4]}) == 1, markdown
    out = StringIO()
    Console(file=out, width=100).print(table.rich())
    assert "[red]" in out.getvalue() and "a [b]" in out.getvalue() and "t [x]" in out.getvalue()
    assert [line for line in out.getvalue().split("\n") if not line.isprintable() or line.strip()[:2] == "::"] == []


def test_a_surrogate_does_not_keep_a_result_from_being_written(tmp_path: Path) -> None:
    write_json_atomic(tmp_path / "x.json", {"caf\udce9": ["\udcff \ufffe"]})
    assert json.loads((tmp_path / "x.json").read_text("utf-8")) == {r"caf\udce9": ["\\udcff \\ufffe"]}


def test_other_text_is_stored_unchanged() -> None:
    assert jsonable({"a": ["\x1b\n"]}) == {"a": ["\x1b\n"]}


def test_junit_of_hostile_words_is_xml() -> None:
    checks = [Check("official", answer, "\ufffe\x00\udce9</failure>\n]]>") for answer in Answer]
    document = as_junit({"caf\udce9\n": checks}, {"task": "\ufffe", "device": "\x1b"})
    text = document.tostring()
    asked = [check for check in checks if check.answer is not Answer.NOT_REQUIRED]  # the others are a property
    assert len(list(xml.etree.ElementTree.fromstring(text).iter("testcase"))) == len(asked) == 4
