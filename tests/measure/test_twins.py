"""The record of the twins: which rows of an earlier file are kept, and where the twins are looked for."""

from __future__ import annotations

import hashlib
import json

import pytest

from kbsub.eval.measure.twins import kept
from support.paths import TESTS

FOLDER = TESTS / "twins"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": null}'])
def test_twins_are_not_added_to_a_file_that_is_no_record_of_them(text: str) -> None:
    with pytest.raises(ValueError, match="--out: no record of twins"):
        kept(text, {"gpu": "NVIDIA H200"}, set(), FOLDER)


def test_rows_of_another_machine_or_an_older_twin_are_not_kept() -> None:
    machine = {"gpu": "NVIDIA H200", "torch": "2.11"}
    now = hashlib.sha256((FOLDER / "zeros.py").read_bytes()).hexdigest()
    rows = {"zeros": {"sha256": now}, "constant": {"sha256": now}, "gone": {"sha256": now}}
    text = json.dumps({"environment": machine, "twins": rows})
    assert kept(text, machine, set(), FOLDER) == {"zeros": {"sha256": now}}
    assert kept(text, machine, {"zeros"}, FOLDER) == {}
    assert kept(text, {**machine, "torch": "2.12"}, set(), FOLDER) == {}
    assert kept(json.dumps({"environment": None, "twins": rows}), machine, set(), FOLDER) == {}
