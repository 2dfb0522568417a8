"""`kbsub gate --require correct-here`: what a machine without a GPU may say, and where a person reads it in CI."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import junitparser
import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.report.annotations import github, line_of, summary
from kbsub.eval.run.gate import Check, Judged, exit_code
from kbsub.eval.run.here import answers_here
from kbsub.eval.verdicts.kind import Answer

pytestmark = pytest.mark.usefixtures("warm_children")

P, F, U, N = Answer.PASS, Answer.FAIL, Answer.UNCERTIFIED, Answer.NOT_HERE
RIGHT = {"cpu_check": {"correctness": True, "trials": "(5 / 5)"}}
REDEFINED = {"source": {"overrides": {"n": {"task": "1", "file": "2"}}}}
TEXT = Check("text", P, "fine")

# (the gate's answers, the row, on a GPU) -> the answers here, and the exit code.
ANSWERS = [
    ({"official": U, "stress": P, "guards": P}, RIGHT, False, {"local-check": P, "stress": P, "guards": P}, 0),
    ({"official": U, "identity": U, "stress": U}, RIGHT, False, {"local-check": P, "identity": N, "stress": N}, 0),
    ({"official": F, "stress": U}, {}, False, {"local-check": F, "stress": N}, 1),
    ({"official": U, "stress": F}, RIGHT, False, {"local-check": P, "stress": F}, 1),
    ({"official": P, "stress": U}, {}, True, {"official": P, "stress": N}, 0),
    # Nothing was executed: guards that read a text, or nothing at all, are no cases.
    ({"official": U, "guards": P}, {}, False, {"local-check": N, "guards": P, "correct-here": F}, 1),
    ({"official": U, "stress": U}, {"cpu_check": {}}, False, {"local-check": N, "stress": N, "correct-here": F}, 1),
    # The file redefines a name of the task: it was judged on other inputs.
    ({"official": U, "source": U}, {**RIGHT, **REDEFINED}, False, {"local-check": P, "source": F}, 1),
    # Upstream's evaluator ran and gave nothing: a check on a CPU is not looked for in the row.
    ({"official": U, "stress": U}, RIGHT, True, {"official": N, "stress": N, "correct-here": F}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("given", "fields", "on_gpu", "expected", "code"), ANSWERS)
def test_answers_are_0_or_1_and_never_official_on_a_cpu(
    given: dict[str, Answer], fields: dict[str, Any], on_gpu: bool, expected: dict[str, Answer], code: int
) -> None:
    checks = [Check(name, answer, "words") for name, answer in given.items()]
    found = answers_here(checks, fields, TEXT, on_gpu=on_gpu)
    assert {check.name: check.answer for check in found} == {"text": P, **expected}
    assert exit_code(found) == code


SOURCE = """import torch


def helper(x):
    return x + torch.ones(3)


class ModelNew(torch.nn.Module):
    def forward(self, x):
        if x.numel() > 3:
            return helper(x)
        return x
"""
LOG = 'File "<string>", line 13, in forward\n  File "<string>", line 7, in helper\n  File "torch/x.py", line 3, in y\n'
LINES = [
    ("line 4: expected ':'", "", 4),
    ("COMPILE_ERROR: line 2: invalid syntax", "", 2),
    ("RuntimeError: in line 9: of another text", LOG, 5),  # the frame in helper, two lines up
    ("RuntimeError: no", LOG.replace("line 7", "line 5"), 5),  # a worker that puts no lines first
    ("NOT close", "", 12),  # what forward returns last
    ("line 400: x", "", 12),
]


@pytest.mark.parametrize(("words", "log", "line"), LINES)
def test_the_line_is_the_one_that_failed(words: str, log: str, line: int) -> None:
    assert line_of(SOURCE, words, log) == line


def test_a_text_that_does_not_parse_has_a_line_too() -> None:
    assert line_of("class ModelNew(:\n", "no", "") == 1


def test_words_of_a_candidate_are_no_markup_and_no_second_command() -> None:
    """A message with line ends, workflow commands, table signs and tags stays one cell and one line."""
    nasty = "a | b\n::error file=other.py::forged\r\n<img src=x> `code` ![x](http://x)"
    judged = [Judged(Path("evil,:.py"), SOURCE, {}, [Check("stress", F, nasty)])]
    (line,) = github(judged)
    assert line.startswith("::error file=evil%2C%3A.py,line=12,title=")
    assert "\n" not in line and "\r" not in line
    table = summary(judged, ["stress"], {"task": "x"})
    row = next(each for each in table.splitlines() if "stress |" in each)
    assert len(re.findall(r"(?<!\\)\|", row)) == 5
    assert "<img" not in table and "::error" not in [each[:7] for each in table.splitlines()]


TASK = """import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return torch.relu(x)
def get_inputs():
    return [torch.randn(16, 64)]
def get_init_inputs():
    return []
"""
GOOD = (
    "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return torch.clamp(x, min=0)\n"
)
PLANTED = {
    "wrong.py": (GOOD.replace("min=0)", "min=0) + 0.01"), 4, "local-check"),
    "raises.py": (SOURCE, 5, "local-check"),
    "syntax.py": (GOOD.replace("self, x):", "self, x)"), 3, "text"),
    "falls_back.py": (GOOD + "try:\n    x = 1\nexcept ValueError:\n    x = 2\n", 5, "text"),
    "gpu_only.py": ("import cupy\n" + GOOD, 5, "correct-here"),
}


def written(folder: Path) -> None:
    (folder / "own.py").write_text(TASK)
    (folder / "good.py").write_text(GOOD)
    for name, (text, _, _) in PLANTED.items():
        (folder / name).write_text(text)


def annotated(output: str) -> dict[str, str]:
    return dict(re.findall(r"^::error file=([^,]+),line=(\d+),", output, re.MULTILINE))


def test_faults_of_the_official_check_are_annotated_where_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong numbers, an exception in a helper, a syntax error: the line of each, from real judges' words."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    files = ["wrong.py", "raises.py", "syntax.py"]
    judged = CliRunner().invoke(app, ["gate", *files, "--task", "own.py", "--require", "official", "--annotate"])
    assert judged.exit_code == 1, judged.output
    assert annotated(judged.output) == {name: str(PLANTED[name][1]) for name in files}


def test_here_an_honest_file_passes_and_one_that_cannot_run_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    call = ["gate", "good.py", "gpu_only.py", "--task", "own.py", "--require", "correct-here"]
    judged = CliRunner().invoke(app, [*call, "--junit", "gate.xml", "--json", "gate.json", "--summary", "summary.md"])
    assert judged.exit_code == 1, judged.output
    answers = json.loads((tmp_path / "gate.json").read_text())["candidates"]
    assert {check["answer"] for check in answers["good"].values()} == {"pass", "not checked here"}, answers["good"]
    assert answers["gpu_only"]["correct-here"]["answer"] == "fail"
    assert "nothing of it was executed" in answers["gpu_only"]["correct-here"]["words"]
    passed = "good: local-check: pass: (5 / 5) trials within the official tolerance on the CPU; no official verdict"
    assert passed in judged.output
    assert not re.search(r"official (OK|NOT_RUN)|: official:", judged.output), "a CPU was called official"
    cases = {f"{s.name}.{c.name}": c.result for s in junitparser.JUnitXml.fromfile("gate.xml") for c in s}
    assert not cases["good.local-check"] and cases["gpu_only.correct-here"]
    assert (tmp_path / "summary.md").read_text().startswith("### kbsub gate: failed\n")


@pytest.mark.slow
@pytest.mark.kernelbench  # the static checker is upstream's
def test_planted_faults_fail_here_and_the_honest_file_alone_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    call = ["gate", *PLANTED, "--task", "own.py", "--require", "correct-here", "--annotate", "--json", "gate.json"]
    judged = CliRunner().invoke(app, call)
    assert judged.exit_code == 1, judged.output
    lines = annotated(judged.output)
    answers = json.loads((tmp_path / "gate.json").read_text())["candidates"]
    for name, (_, line, check) in PLANTED.items():
        assert answers[Path(name).stem][check]["answer"] == "fail", name
        assert lines[name] == str(line), name
    alone = CliRunner().invoke(app, ["gate", "good.py", "--task", "own.py", "--require", "correct-here"])
    assert alone.exit_code == 0, alone.output


def test_correct_here_stands_alone() -> None:
    mixed = CliRunner().invoke(app, ["gate", "good.py", "--require", "correct-here,stress"])
    assert mixed.exit_code == 2
    assert "stands alone" in mixed.output
