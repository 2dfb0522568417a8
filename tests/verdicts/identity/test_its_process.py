"""What the judge keeps to itself, and what it says when the candidate's process does not answer as it should."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest

from kbsub.eval.process.isolated import JudgeFailure, Status
from kbsub.eval.verdicts.identity.judge import judge
from support.paths import TESTS

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = TESTS / "support" / "small_layer_norm_task" / "reference.py"
SOURCE = """
import os, sys, time, torch
sys.candidate_was_here = True
class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(shape)
    def forward(self, x):
        {change}
        return self.ln(x)
"""
SECOND = "row width 20,672 4x20672, seed 7, random affine, uniform, eps 1e-05"  # a case in the middle of the suite


def judged(change: str, source: str = SOURCE, **more: Any) -> dict[str, Any]:
    payload = {
        "candidate_source": source.replace("{change}", change),
        "task": f"local:{TASK}",
        "precision": "fp32",
        "kernelbench": None,
        "device": "cpu",
        "declaration": {"contract": "bit-identical"},
        "timeout_s": 60.0,
        **more,
    }
    return judge(payload, lambda event: None)


def test_the_judges_process_executes_no_line_of_the_candidate():
    found = judged("pass", repeats=1)
    assert found["identical"] == found["total"] > 3
    assert not hasattr(sys, "candidate_was_here")


BROKEN = {  # what it does from the wide rows on: the status of the row
    "leaves with 0": ("os._exit(0)", Status.CRASHED),
    "dies of a signal": ("os.kill(os.getpid(), 11)", Status.CRASHED),
    "calls sys.exit": ("sys.exit(0)", Status.CRASHED),
    "has no memory": ("torch.empty(1 << 50)", Status.OUT_OF_MEMORY),
    "writes into every descriptor": (
        "[os.write(n, b'x' * 64) for n in range(3, 64) if os.path.exists(f'/proc/self/fd/{n}')]",
        Status.CRASHED,
    ),
    "raises": ("raise RuntimeError('launch failed')", Status.RUNTIME_ERROR),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_process_that_breaks_costs_its_row_and_keeps_the_cases_before(name, request):
    change, status = BROKEN[name]
    if "descriptor" in name:  # a forked child has another that it cannot write into
        request.getfixturevalue("cold_children")
    with pytest.raises(JudgeFailure) as caught:
        judged(
            f"{change} if x.shape[-1] == 20672 else None"
            if "raise" not in change
            else f"if x.shape[-1] == 20672: {change}"
        )
    failure = caught.value
    assert failure.status is status, failure.message
    assert SECOND in failure.message
    assert failure.value is not None and failure.value["identical"] == failure.value["total"] == 42
    assert failure.value["confined"]["level"]


def test_a_hang_is_found_before_the_judges_own_time_is_over():
    started = time.monotonic()
    with pytest.raises(JudgeFailure) as caught:
        judged("if x.shape[-1] == 20672: time.sleep(600)", timeout_s=10.0)
    assert time.monotonic() - started < 10.0
    assert caught.value.status is Status.TIMEOUT and SECOND in caught.value.message
    assert caught.value.value is not None and caught.value.value["total"] == 42


def test_a_file_that_does_not_load_is_a_compile_error():
    with pytest.raises(JudgeFailure) as caught:
        judged("", source="raise ImportError('no such package')\n")
    assert caught.value.status is Status.COMPILE_ERROR and "no such package" in caught.value.message


FORMS = {  # what forward returns: words of the reason
    "nothing": ("return None", "NoneType, not one tensor"),
    "a number": ("return 1.5", "float, not one tensor"),
    "a tuple of one": ("return (self.ln(x),)", "tuple of 1, not one tensor"),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_not_one_tensor_is_not_identical_and_says_so(name):
    change, words = FORMS[name]
    with pytest.raises(JudgeFailure) as caught:  # its repeated runs have nothing to compare
        judged(change)
    assert caught.value.value is not None
    cases = caught.value.value["cases"]
    assert cases and not any(case["identical"] for case in cases)
    assert words in cases[0]["reason"]


def test_two_tensors_for_one_are_not_identical_and_say_so():
    found = judged("return self.ln(x), x", repeats=1)
    assert found["identical"] == found["close"] == 0 < found["total"]
    assert "the reference's is" in found["cases"][0]["reason"]


def test_a_task_that_is_not_what_it_declares_is_no_candidates_fault(tmp_path):
    text = TASK.read_text().replace("return self.ln(x)", "return self.ln(x) + self.other")
    text = text.replace("self.ln = ", "self.other = nn.Parameter(torch.zeros(1))\n        self.ln = ")
    (tmp_path / "reference.py").write_text(text)
    (tmp_path / "task.toml").write_text((TASK.parent / "task.toml").read_text())
    with pytest.raises(JudgeFailure, match=r"^the task declares .* its Model is not one LayerNorm") as caught:
        judged("pass", task=f"local:{tmp_path / 'reference.py'}")
    assert caught.value.status is Status.NOT_RUN


def test_an_operator_that_nobody_knows_is_no_candidates_fault(tmp_path):
    (tmp_path / "reference.py").write_text(TASK.read_text())
    (tmp_path / "task.toml").write_text('operator = "no_such"\nreference = "reference.py"\n')
    with pytest.raises(JudgeFailure, match=r"^operator = 'no_such'") as caught:
        judged("pass", task=f"local:{tmp_path / 'reference.py'}")
    assert caught.value.status is Status.NOT_RUN
