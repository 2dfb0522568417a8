"""Any task: state that calls change, inputs that are no floats, several answers, in place, by chance."""

from __future__ import annotations

import pytest

from support.refereed import refereed

pytestmark = pytest.mark.slow  # a worker for each task

TASK = """
import torch, torch.nn as nn, torch.nn.functional as F
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {built}
    def forward(self, {names}):
        return {answer}
def get_inputs():
    return [{inputs}]
def get_init_inputs():
    return []
"""
SAME = "class ModelNew(Model):\n    pass\n"
NORM = "self.bn = nn.BatchNorm1d(8)"
WITHOUT_STATE = "self.bn = nn.BatchNorm1d(8)\n        self.bn.eval()"
X = "torch.rand(20, 8)"

# task: what it builds, its arguments, its answer, its inputs
TASKS = {
    "statistics that calls change": (NORM, "x", "self.bn(x)", X),
    "classes": ("pass", "x, t", "F.cross_entropy(x, t.long())", f"{X}, torch.randint(0, 8, (20,))"),
    "two answers": ("pass", "x", "(x * 2, x.sum(-1))", X),
    "a list with a number": ("pass", "x", "[x + 1, 3]", X),
    "in place": ("pass", "x", "x.relu_()", "torch.randn(20, 8)"),
    "a scalar": ("pass", "x", "x.mean()", "torch.rand(1 << 12)"),
    "an argument that is no tensor": ("pass", "x, n", "x * n", f"{X}, 3"),
    "a view": ("pass", "x", "x.view(8, 20)", X),
    "a matrix that is its transpose": ("pass", "a", "a @ a", "(lambda a: a + a.T)(torch.rand(20, 20))"),
}


def task_file(tmp_path, name: str):
    built, names, answer, inputs = TASKS[name]
    file = tmp_path / "task.py"
    file.write_text(TASK.format(built=built, names=names, answer=answer, inputs=inputs))
    return file


@pytest.mark.parametrize("name", TASKS)
def test_an_honest_file_is_right_at_any_task(name, tmp_path):
    status, found = refereed(SAME, task_file(tmp_path, name))
    assert status == "OK" and found["wrong"] == 0 and not found["problems"], found
    assert found["outputs"] > 30 and found["tells_apart"]


# task: a candidate for it that does something else, and the words
UNLIKE = {
    "statistics that calls change": (
        "class ModelNew(Model):\n    def forward(self, x):\n        self.bn.train()\n"
        "        return F.batch_norm(x, None, None, self.bn.weight, self.bn.bias, True)\n",
        "its state 'bn.running_mean' is not what the calls make of the reference's",
    ),
    "two answers": (
        "class ModelNew(Model):\n    def forward(self, x):\n        return x * 2\n",
        "a Tensor, not 2 values",
    ),
    "a scalar": (
        "class ModelNew(Model):\n    def forward(self, x):\n        return torch.tensor(0.5)\n",
        "differs from the reference",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_another_function_is_found_out(name, tmp_path):
    source, words = UNLIKE[name]
    status, found = refereed(source, task_file(tmp_path, name))
    assert status == "OK" and any(words in problem for problem in found["problems"]), found


def test_a_reference_that_answers_by_chance_judges_nobody(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK.format(built="pass", names="x", answer="F.dropout(x, 0.5, True)", inputs=X))
    assert refereed(SAME, file)[0] == "NOT_RUN"
