"""Integers, bools and the form of an output are equal or wrong: no tolerance softens them in this project's checks."""

from __future__ import annotations

import pytest
import torch

from kbsub.eval.suite.judge import judge_many
from kbsub.eval.suite.one_tensor import as_one, exact_problem, row_of_one
from kbsub.eval.tasks.cases import FAIL, OFFICIAL_CASE
from kbsub.eval.verdicts.identity.judge import judge as judge_identity

TASK = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return {returned}
def get_inputs():
    return [torch.rand(4, 50)]
def get_init_inputs():
    return []
"""
CANDIDATE = TASK.partition("def get_inputs")[0].replace("Model(", "ModelNew(")
INDEX = "x.argsort(dim=1) + 20000"  # upstream allows such an index to be off by two
# the reference's answer, a wrong one within every tolerance, words
WRONG = {
    "an index": (INDEX, f"({INDEX}) + 1", "200 of 200 elements of torch.int64 differ"),
    "an index beside values": (f"(x, {INDEX})", f"(x, ({INDEX}) + 1)", "output 1: 200 of 200"),
    "a narrower integer": (INDEX, f"({INDEX}).int()", "torch.int32 of shape (4, 50), the reference's is torch.int64"),
    "a float for an integer": (INDEX, f"({INDEX}).double()", "torch.float64 of shape (4, 50)"),
    "another form": ("(x, x.sum(1))", "(x.reshape(-1), x.sum(1))", "output 0: torch.float32 of shape (200,)"),
    "a tuple of one": ("x.abs()", "(x.abs(),)", "returned a list or tuple of 1, the reference a tensor"),
    "one that is no tuple": ("[x.abs()]", "x.abs()", "returned a tensor, the reference a list or tuple of 1"),
    "flattened": ("(x, x.sum(1))", "torch.cat([x.reshape(-1), x.sum(1)])", "returned 1 tensor(s), the reference 2"),
}


def payload(folder, reference: str, candidate: str) -> dict:
    (folder / "task.py").write_text(TASK.format(returned=reference))
    source = CANDIDATE.format(returned=candidate)
    common = {"task": str(folder / "task.py"), "precision": "fp32", "kernelbench": None, "device": "cpu"}
    return {**common, "candidates": [{"stem": "one", "candidate_source": source}], "candidate_source": source}


@pytest.mark.parametrize("name", WRONG)
def test_what_must_be_equal_is_compared_so_by_identity_stress_and_oracle(tmp_path, name, warm_children):
    reference, wrong, words = WRONG[name]
    told = payload(tmp_path, reference, wrong)
    (row,) = judge_many({**told, "only": [OFFICIAL_CASE]}, lambda event: None)["stress"]["one"]["cases"]
    assert row["class"] == FAIL and words in row["reason"], row
    found = judge_identity(told, lambda event: None)
    assert found["identical"] == 0 and all(words in case["reason"] for case in found["cases"]), found["cases"]


def test_a_right_answer_of_such_a_form_passes_every_case(tmp_path, warm_children):
    told = payload(tmp_path, f"(x, {INDEX})", f"(x, {INDEX})")
    found = judge_many({**told, "calls": 5}, lambda event: None)["stress"]["one"]
    assert found["passed"] > 20 and not found["failed"], [row for row in found["cases"] if row["class"] == FAIL]


def test_what_a_slice_is_of_is_known():
    one, other = as_one(torch.tensor([[20000], [30000]])), as_one(torch.tensor([[20000], [30001]]))
    assert exact_problem(row_of_one(one, 0), row_of_one(other, 0)) is None
    assert "1 of 1 elements" in exact_problem(row_of_one(one, 1), row_of_one(other, 1))
    assert exact_problem(row_of_one(one, 1), as_one(torch.tensor([[30000]]))) is None


def test_a_float_tensor_is_taken_as_it_is():
    value = torch.rand(3)
    assert as_one(value) is value and exact_problem(value, value.clone()) is None
    assert torch.equal(as_one((value,)), value) and exact_problem(as_one((value,)), as_one([value])) is None
    assert exact_problem(value, as_one((value,)))
    assert exact_problem(value, as_one(value)) is None  # nothing was put on the tensor itself
    assert as_one({"a": value}) == {"a": value}
