"""A row costs itself only: `kbsub eval` and `kbsub gate` over honest files and files that do harm by text or size.

The harmful files are in tests/harms; each must get its own right row and leave every other row, the JSON, the JUnit
file and the printed lines whole.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import junitparser
import pytest

from kbsub.eval.process.cell import probe
from support.kept import kept
from support.paths import TESTS

TASK = str(TESTS / "support" / "small_layer_norm_task" / "reference.py")
HONEST = """
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
"""
# Name of the file as bytes, and as the row, the table and the JUnit file show it.
HONEST_NAMES = {
    b"plain": "plain",
    b"plain_too": "plain_too",
    b"\xc3\xb6": "\u00f6",
    b"a [red] b": "a [red] b",  # markup of the library that draws the tables
    b"[bold": "[bold",
    b"two\nlines": r"two\nlines",
    b"red\x1b[31m": r"red\x1b[31m",
    b"caf\xe9": r"caf\udce9",  # not UTF-8
    b"::error::x": r"\x3a:error::x",  # a workflow command at the beginning of a line of a CI log
    b"turned\xe2\x80\xae": r"turned\u202e",  # bidi override
}
# Stem in tests/harms: status of its row, and words of the reason.
HARMS = {
    "surrogate_in_message": ("RUNTIME_ERROR", r"caf\udce9.so"),
    # In a cell there is no token to be found; what such a frame does is tests/process/test_frames.py.
    "frame_that_the_parent_trips_on": ("COMPILE_ERROR", "KBSUB_RUN"),
    "noncharacter_in_message": ("RUNTIME_ERROR", r"byte order mark: \ufffe"),
    "ansi_in_message": ("RUNTIME_ERROR", r"\x1b[1A"),
    "big_stdout": ("OK", "not an official verdict"),
    "writes_on_parents_stdout": ("COMPILE_ERROR", "raised while the file was executed"),
    "exit0_with_fake_verdict": ("CRASHED", "exit code 0"),
    "deep_recursion": ("CRASHED", "SIGSEGV"),
}
MORE_HARMS = {
    "t2_xml_text": ("RUNTIME_ERROR", r"bad tile \ufffe"),
    "t3_surrogate": ("RUNTIME_ERROR", r"bad tile \udcff"),
    "u2_nonascii_error": ("RUNTIME_ERROR", "W\u00f6rter"),
}
pytestmark = [
    pytest.mark.skipif(probe().level == "unconfined", reason="cell: nothing confines a candidate here"),
    pytest.mark.slow,  # 36 children
]
FORGED = "writes_on_parents_stdout: official: pass: compiled True, correct True, trials (5 / 5)"


def kbsub(*arguments: str, folder: Path, **variables: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a `kbsub` process on the CPU path: some cases look for a real file number 1."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", "kbsub.eval.cli", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`kbsub eval` of 18 files, 8 of them harmful, one after each honest one: code, out, err, text of the result."""

    def make(folder: Path) -> dict[str, Any]:
        honest = [folder / os.fsdecode(name + b".py") for name in HONEST_NAMES]
        for file in honest:
            file.write_text(HONEST)
        harmful = [TESTS / "harms" / f"{stem}.py" for stem in HARMS]
        files = [str(file) for pair in zip(honest, harmful, strict=False) for file in pair]
        files += [str(file) for file in honest[len(harmful) :]]
        assert len(files) == 18
        options = ("--task", TASK, "--only", "official", "--out", "result [1].json")
        code, out, err = kbsub("eval", *files, *options, folder=folder)
        kbsub("gate", *files, "--task", TASK, "--require", "official", "--junit", "junit.xml", folder=folder)
        text, junit = (folder / "result [1].json").read_text(), (folder / "junit.xml").read_text()
        return {"code": code, "out": out, "err": err, "text": text, "junit": junit}

    return kept(tmp_path_factory.getbasetemp(), "rows_apart", make)


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`kbsub gate` over the files whose text harms, in a locale of ASCII alone: code, out, err, JUnit and JSON."""

    def make(folder: Path) -> dict[str, Any]:
        (folder / "plain.py").write_text(HONEST)
        stems = ("ansi_in_message", "noncharacter_in_message", *MORE_HARMS)
        files = ["plain.py", *(str(TESTS / "harms" / f"{stem}.py") for stem in stems)]
        options = ("--task", TASK, "--require", "official", "--junit", "junit.xml", "--json", "gate.json")
        ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
        code, out, err = kbsub("gate", *files, *options, folder=folder, **ascii_only)
        junit, answers = (folder / "junit.xml").read_text(), (folder / "gate.json").read_text()
        return {"code": code, "out": out, "err": err, "junit": junit, "json": answers}

    return kept(tmp_path_factory.getbasetemp(), "gate_apart", make)


def test_the_result_has_every_row_and_no_other(evaluated: Any) -> None:
    rows = json.loads(evaluated.text)["candidates"]
    assert sorted(rows) == sorted([*HONEST_NAMES.values(), *HARMS]), evaluated.out + evaluated.err


@pytest.mark.parametrize("name", HONEST_NAMES.values())
def test_an_honest_row_is_intact(evaluated: Any, name: str) -> None:
    row = json.loads(evaluated.text)["candidates"][name]
    assert (row["status"], row["cpu_check"]["trials"]) == ("OK", "(5 / 5)"), row


@pytest.mark.parametrize(("stem", "status", "words"), [(stem, *end) for stem, end in HARMS.items()], ids=list(HARMS))
def test_a_harmful_file_gets_its_own_row(evaluated: Any, stem: str, status: str, words: str) -> None:
    row = json.loads(evaluated.text)["candidates"][stem]
    assert row["status"] == status and words in row["reason"], row["reason"]


def test_the_exit_code_says_that_rows_failed(evaluated: Any) -> None:
    assert evaluated.code == 1 and "Traceback" not in evaluated.out + evaluated.err, evaluated.err


def test_every_row_is_in_the_table(evaluated: Any) -> None:
    table = evaluated.out.partition("Nothing official, local check only")[2].partition("\n\n")[0]
    shown = {re.split(r"\s{2,}|\s(?=OK|CRASHED|RUNTIME|INCORRECT)", line.strip())[0] for line in table.splitlines()}
    assert shown >= {*HONEST_NAMES.values(), *HARMS}, table


def test_the_result_file_is_named_as_it_is(evaluated: Any) -> None:
    assert "written to result [1].json" in evaluated.out.splitlines(), evaluated.out


def unfit(text: str) -> list[str]:
    """Lines that would act on a terminal or in a CI log."""
    lines = text.split("\n")
    return [line for line in lines if not line.isprintable() or line.lstrip().startswith("::") or "##[" in line]


def test_no_line_acts_on_a_terminal_or_in_a_ci_log(evaluated: Any, gated: Any) -> None:
    assert unfit(evaluated.out + evaluated.err + gated.out + gated.err) == []


def test_no_candidates_text_begins_a_line_of_the_gate(gated: Any) -> None:
    assert [line for line in gated.out.splitlines() if "official: pass" in line.split("FAIL")[0]] == [], gated.out


def test_the_gate_fails_what_failed_and_only_that(gated: Any) -> None:
    answers = {key: row["official"]["answer"] for key, row in json.loads(gated.json)["candidates"].items()}
    plain = answers.pop("plain")
    assert (gated.code, plain, set(answers.values())) == (1, "cannot be certified here", {"fail"}), gated.err


@pytest.mark.parametrize(("stem", "words"), [(stem, end[1]) for stem, end in MORE_HARMS.items()], ids=list(MORE_HARMS))
def test_the_gate_says_why(gated: Any, stem: str, words: str) -> None:
    assert words in json.loads(gated.json)["candidates"][stem]["official"]["words"]


def test_the_junit_file_of_all_18_is_whole(evaluated: Any, tmp_path: Path) -> None:
    """A suite a row; what failed failed, and an honest row without a GPU is an error, not a failure."""
    file = tmp_path / "junit.xml"
    file.write_text(evaluated.junit)
    found = {suite.name: next(iter(suite)).result[0] for suite in junitparser.JUnitXml.fromfile(str(file))}
    assert len(found) == 18 and set(HARMS) <= set(found)
    failed = {name for name, result in found.items() if isinstance(result, junitparser.Failure)}
    assert failed == set(HARMS) - {"big_stdout"}  # what it prints is much, and its answer right


def test_the_junit_file_holds_every_candidate(gated: Any, tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    file.write_text(gated.junit)
    suites = {suite.name: suite for suite in junitparser.JUnitXml.fromfile(str(file))}
    assert suites.keys() == {"plain", "ansi_in_message", "noncharacter_in_message", *MORE_HARMS}
    assert r"\ufffe" in suites["noncharacter_in_message"].__iter__().__next__().result[0].message


def test_no_line_on_our_stdout_is_of_a_candidates_own_making(evaluated: Any) -> None:
    assert evaluated.out.count(FORGED) == 0


# ---- names and sizes: refused before anything runs ----


@pytest.mark.parametrize("command", ["eval", "gate"])
def test_an_at_sign_in_a_name_is_refused_before_anything_runs(tmp_path: Path, command: str) -> None:
    (tmp_path / "a_good.py").write_text(HONEST)
    (tmp_path / "a_good@fp16.py").write_text(HONEST)
    code, _, err = kbsub(command, "a_good.py", "a_good@fp16.py", "--task", TASK, "--out", "out.json", folder=tmp_path)
    assert code == 2 and "a_good@fp16.py: a candidate's name may hold no @" in err and "rename" in err, err
    assert not (tmp_path / "out.json").exists()


def test_a_source_beyond_the_limit_is_a_row_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "huge.py").write_text("CUDA_SOURCE = [" + "0," * (2 << 20) + "]\n")
    (tmp_path / "plain.py").write_text(HONEST)
    options = ("--task", TASK, "--only", "official", "--out", "out.json")
    code, out, _ = kbsub("eval", "huge.py", "plain.py", *options, folder=tmp_path)
    rows = json.loads((tmp_path / "out.json").read_text())["candidates"]
    assert (code, rows["huge"]["status"], rows["plain"]["status"]) == (1, "COMPILE_ERROR", "OK"), out
    assert "huge.py: 4194321 bytes of source, the limit is 262144" in rows["huge"]["reason"]
