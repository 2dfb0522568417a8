"""What a file redefines of the task is read from both texts; in a namespace of its own it changes nothing."""

from __future__ import annotations

import pytest
import torch

from kbsub.adapters.candidate import load_candidate
from kbsub.adapters.overrides import in_its_own_namespace, overrides
from kbsub.adapters.task import load_local_task
from kbsub.eval.process.isolated import JudgeFailure, Status
from kbsub.eval.results.model import Official
from kbsub.eval.verdicts.kind import Answer, Asked
from kbsub.eval.verdicts.source.judge import judge
from kbsub.eval.verdicts.source.registration import KIND, Source

TASK = """
import torch
batch_size = 4
depth, height = 3, 5
class Model(torch.nn.Module):
    def forward(self, x):
        return x
def get_inputs():
    return [torch.rand(batch_size, height)]
def get_init_inputs():
    return []
"""
NEW = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
# the file's own lines -> what they redefine
FILES = {
    "": {},
    "batch_size = 4\nown = 9": {},
    "batch_size = 128": {"batch_size": {"task": "4", "file": "128"}},
    "depth, height = 3, 7": {"height": {"task": "5", "file": "7"}},
    "def get_inputs():\n    'in other words'\n    return [torch.rand(batch_size, height)]": {},
    "def get_inputs():\n    return [torch.zeros(1)]": {"get_inputs": {"task": "def", "file": "def"}},
    "Model = None": {"Model": {"task": "class", "file": "None"}},
    "def (": {},
}


@pytest.mark.parametrize("lines", FILES)
def test_names_that_are_defined_otherwise(lines):
    assert overrides(TASK, f"{NEW}\n{lines}\n") == FILES[lines]


def test_in_its_own_namespace_a_file_changes_no_input(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    task = load_local_task(tmp_path / "task.py")
    text = NEW + "batch_size = 128\n"
    shapes = []
    for source in (text, in_its_own_namespace(text)):
        modules = task.modules()
        model = load_candidate(source, task, build_dir=True, modules=modules)()
        shapes.append(tuple(model(modules.get_inputs()[0]).shape))
    assert shapes == [(128, 5), (4, 5)] and torch.is_tensor(modules.get_inputs()[0])


def test_without_a_gpu_what_is_redefined_is_said_and_not_certified(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    payload = {"task": str(tmp_path / "task.py"), "device": "cpu", "candidate_source": NEW}
    assert judge(payload, None) == {"overrides": {}}
    with pytest.raises(JudgeFailure, match=r"redefines batch_size \(4 -> 9\); .* needs an NVIDIA GPU") as caught:
        judge({**payload, "candidate_source": NEW + "batch_size = 9\n"}, None)
    assert caught.value.status is Status.NOT_RUN and caught.value.value["overrides"]["batch_size"]["file"] == "9"


@pytest.mark.kernelbench
def test_upstream_s_static_checker_is_called_from_the_checkout(kernelbench, tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    payload = {"task": str(tmp_path / "task.py"), "device": "cpu", "kernelbench": str(kernelbench.path)}
    fine = judge({**payload, "candidate_source": NEW}, None)["static"]
    assert fine["valid"] and fine["backend"] == "cupy"
    rejected = judge({**payload, "candidate_source": NEW + "try:\n    pass\nexcept ValueError:\n    pass\n"}, None)[
        "static"
    ]
    assert not rejected["valid"] and rejected["errors"]


SAID = {"trials": "(5 / 5)", "metadata": {}}
OVERRIDDEN = {"batch_size": {"task": "4", "file": "9"}}
ANSWERS = {
    "nothing redefined": (Source(overrides={}), Answer.PASS),
    "no GPU": (Source(overrides=OVERRIDDEN), Answer.UNCERTIFIED),
    "right": (
        Source(overrides=OVERRIDDEN, own_namespace=Official(compiled=True, correctness=True, **SAID)),
        Answer.PASS,
    ),
    "wrong": (
        Source(overrides=OVERRIDDEN, own_namespace=Official(compiled=True, correctness=False, **SAID)),
        Answer.FAIL,
    ),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_gate_asks_for_the_task_s_own_inputs(name):
    found, expected = ANSWERS[name]
    assert KIND.answer(found, Asked({}, {}, {}))[0] is expected
    assert bool(KIND.problems(found)) is (name == "wrong")
