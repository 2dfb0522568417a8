"""Inert modules for client packages that upstream imports: in this process, and in a folder for its scripts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kbsub.adapters import evaluator


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """One client that is not installed, one that is."""
    found = {"kbsub_no_such_client": "call", "json": "loads"}
    monkeypatch.setattr(evaluator, "CLIENTS", found)
    yield found
    sys.modules.pop("kbsub_no_such_client", None)


def test_a_stand_in_of_this_process_does_not_count_as_installed(clients: dict[str, str], tmp_path: Path) -> None:
    for _ in range(2):  # the second time it stands in sys.modules, where nothing finds a spec of it
        assert evaluator.stand_in_for_missing_clients() == ("kbsub_no_such_client",)
        folder = evaluator.write_stand_ins(tmp_path / "stand_ins")
        assert [each.name for each in folder.iterdir()] == ["kbsub_no_such_client.py"]
    assert "def call(" in (folder / "kbsub_no_such_client.py").read_text()
