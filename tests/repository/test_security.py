"""SECURITY.md: every promise names tests, and the tests are there."""

from __future__ import annotations

import ast
import re

import pytest

from support.paths import ROOT

TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
TABLE = TEXT.partition("| promise | test |\n|---|---|\n")[2].partition("\n\n")[0]
PROMISES = {line.split("|")[1].strip(): re.findall(r"`(tests/[^`]+)`", line) for line in TABLE.splitlines()}


@pytest.mark.parametrize("promise", PROMISES)
def test_a_promise_names_tests_that_are_there(promise: str) -> None:
    assert PROMISES[promise], f"{promise}: no test"
    for name in PROMISES[promise]:
        file, _, function = name.partition("::")
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in there, f"SECURITY.md: {promise}: {name} is not there"


def test_promises_of_every_kind_are_in_the_table() -> None:
    assert len(PROMISES) >= 14
