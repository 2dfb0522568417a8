"""candidates.toml: read, refused with a reason, and contradicted by a measured verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbsub.eval.tasks.declarations import (
    Declaration,
    DeclarationError,
    declaration_of,
    read_declarations,
)
from support.paths import ROOT

SUBMISSIONS = ROOT / "submissions"
ROW = 'title = "t"\nprecision = ["fp32"]\ncontract = "tolerance"\n'


def folder(tmp_path: Path, toml: str | None, files: tuple[str, ...] = ("mine.py",)) -> Path:
    if toml is not None:
        (tmp_path / "candidates.toml").write_text(toml)
    for file in files:
        (tmp_path / file).write_text("")
    return tmp_path


def test_a_row_is_read_with_its_defaults(tmp_path):
    (row,) = read_declarations(folder(tmp_path, "[mine]\n" + ROW)).values()
    assert (row.title, row.precision, row.contract, row.accurate) == ("t", ("fp32",), "tolerance", False)
    assert (row.expect.official, row.expect.identity, row.expect.beyond_tolerance) == ("pass", "skip", None)


BAD = {  # id: (toml, files, what the message must hold)
    "no file": (None, ("mine.py",), "candidates.toml: cannot be read"),
    "not TOML": ("[mine", ("mine.py",), "is not TOML"),
    "declared, missing": ("[mine]\n" + ROW + "[gone]\n" + ROW, ("mine.py",), "declares gone, but gone.py is not there"),
    "there, undeclared": ("[mine]\n" + ROW, ("mine.py", "extra.py"), "has no row for extra.py; add [extra]"),
    "unknown contract": ("[mine]\n" + ROW.replace("tolerance", "fast"), ("mine.py",), "[mine] contract"),
    "unknown precision": ("[mine]\n" + ROW.replace("fp32", "fp8"), ("mine.py",), "[mine] precision.0"),
    "precision twice": ("[mine]\n" + ROW.replace('"fp32"', '"fp32", "fp32"'), ("mine.py",), "names a precision twice"),
    "no precision": ("[mine]\n" + ROW.replace('"fp32"', ""), ("mine.py",), "[mine] precision"),
    "no title": ("[mine]\n" + ROW.replace('title = "t"', ""), ("mine.py",), "[mine] title"),
    "misspelt key": ("[mine]\n" + ROW + "acurate = true\n", ("mine.py",), "[mine] acurate"),
    "misspelt verdict": ("[mine]\n" + ROW + '[mine.expect]\nidentity = "yes"\n', ("mine.py",), "expect.identity"),
    "not a table": ("mine = 1\n", ("mine.py",), "write [mine]"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_file_row_and_rule(tmp_path, case):
    toml, files, words = BAD[case]
    with pytest.raises(DeclarationError) as caught:
        read_declarations(folder(tmp_path, toml, files))
    assert "candidates.toml" in str(caught.value) and words in str(caught.value), str(caught.value)


def test_reference_programs_and_package_markers_need_no_row(tmp_path):
    assert list(read_declarations(folder(tmp_path, "[mine]\n" + ROW, ("mine.py", "__init__.py", "reference.py")))) == [
        "mine"
    ]


def test_a_candidate_outside_any_task_folder_is_undeclared(tmp_path):
    assert declaration_of(folder(tmp_path, None) / "mine.py") is None


@pytest.mark.parametrize("file", sorted(SUBMISSIONS.glob("*/candidates.toml")), ids=lambda file: file.parent.name)
def test_every_task_folder_of_this_repository_is_declared(file):
    assert read_declarations(file.parent)


CONTRACTS = {  # the published claims; the issue fixes them
    "native_torchscript": "baseline",
    "split_eager": "control",
    "split_torchscript": "control",
    "split_flat": "control",
    "split_interleaved": "control",
    "reference_order": "bit-identical",
    "reference_order_pipelined": "bit-identical",
    "oracle_accurate": "tolerance",
}


@pytest.mark.parametrize("stem", CONTRACTS)
def test_level1_40_declares_the_published_contracts(stem):
    declared = read_declarations(SUBMISSIONS / "level1_40")
    assert declared[stem].contract == CONTRACTS[stem]
    if CONTRACTS[stem] == "control":
        assert declared[stem].expect.beyond_tolerance == ("+1000",), "shown to fail there, and only there"


def test_a_declaration_travels_as_json_and_back():
    declared = read_declarations(SUBMISSIONS / "level1_40")["split_flat"]
    assert Declaration.model_validate_json(declared.model_dump_json()) == declared
