"""rms_norm, l2_norm and mean_abs_norm: the float64 answer, the identity cases, the faults, and what is refused."""

from __future__ import annotations

import pytest
import torch

from kbsub.adapters.task import load_local_task
from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.identity import FULL_SIZE, Setting
from kbsub.eval.operators.reduction_order import Device, trees_of
from kbsub.eval.operators.register import known, operator, operator_of
from kbsub.eval.operators.unit_norm.formula import Norm, unit_norm
from kbsub.eval.operators.unit_norm.on_cpu import in_cuda_order

PROGRAM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, {parameters}):
        super().__init__()
        {own}
    def forward(self, x):
        return {formula}
def get_inputs():
    return [torch.rand({shape})]
def get_init_inputs():
    return [{arguments}]
"""
RMS = {"parameters": "n, eps=1e-5", "own": "self.eps = eps", "arguments": "6", "shape": "3, 6, 4, 8"}
NONE = {"parameters": "*_", "own": "", "arguments": "", "shape": "9, 40"}
MODELS = {  # operator: the program that it is declared for
    "rms_norm": {**RMS, "formula": "x / torch.sqrt(torch.mean(x ** 2, dim=1, keepdim=True) + self.eps)"},
    "l2_norm": {**NONE, "formula": "x / torch.norm(x, p=2, dim=1, keepdim=True)"},
    "mean_abs_norm": {**NONE, "formula": "x / torch.mean(torch.abs(x), dim=1, keepdim=True)"},
}
NORMS = {"rms_norm": Norm.RMS, "l2_norm": Norm.L2, "mean_abs_norm": Norm.MEAN_ABS}
every = pytest.mark.parametrize("name", MODELS)
CPU = torch.device("cpu")


def task_of(folder, name, **changed):
    (folder / "reference.py").write_text(PROGRAM.format(**{**MODELS[name], **changed}))
    (folder / "task.toml").write_text(f'operator = "{name}"\nreference = "reference.py"\n')
    return load_local_task(folder / "reference.py")


def setting(full=False, dtype=torch.float32, hosted=False):
    return Setting(CPU, dtype, "bit-identical", full, hosted)


def test_all_three_are_found():
    assert set(MODELS) <= set(known())


@every
def test_the_answer_is_the_model_in_float64(tmp_path, name):
    task = task_of(tmp_path, name)
    modules = task.modules()
    model, (x,) = modules.Model(*modules.get_init_inputs()), modules.get_inputs()
    truth = operator_of(task).truth(model, [x])
    torch.testing.assert_close(truth.y, model(x.double()), rtol=1e-14, atol=0)
    assert truth.normalised and truth.rows == x.numel() // x.shape[1] and not truth.rstd_overflows


@every
def test_what_fp32_cannot_hold_is_answered_and_marked(name):
    x = torch.tensor([[[3e30], [4e30]], [[3e-41], [4e-41]], [[0.0], [0.0]]])
    truth = unit_norm(x, NORMS[name])
    expected = {"rms_norm": 3 / 12.5**0.5, "l2_norm": 0.6, "mean_abs_norm": 3 / 3.5}[name]
    assert float(truth.y[0, 0]) == pytest.approx(expected) and truth.rstd_overflows
    assert truth.y[2].isnan().all()


@every
@pytest.mark.parametrize(
    "changed",
    [
        {"formula": "x / torch.norm(x, p=2, dim=0, keepdim=True)"},
        {"formula": "x * 2"},
        {"own": "self.w = torch.nn.Parameter(torch.ones(1))"},
    ],
    ids=["another dimension", "another formula", "parameters"],
)
def test_another_model_is_refused(tmp_path, name, changed):
    task = task_of(tmp_path, name, **changed)
    modules = task.modules()
    with pytest.raises(OracleError, match=r"the Model|its Model"):
        operator_of(task).truth(modules.Model(*modules.get_init_inputs()), modules.get_inputs())


@every
@pytest.mark.parametrize("hosted", [False, True], ids=["native", "in CUDA's order"])
def test_identity_cases(tmp_path, name, hosted):
    task = task_of(tmp_path, name)
    suite = operator_of(task).identity(task.modules())
    found = list(suite.questions(setting(hosted=hosted)))
    assert len(found) == suite.count(setting()) and len({each.label["name"] for each in found}) == len(found)
    groups = [each.label["group"] for each in found]
    assert groups.count(FULL_SIZE) == 30 and "hard values" in groups and "another shape" in groups
    for each in found[::7]:
        y = each.expected()["output"]
        truth = unit_norm(each.inputs[0], NORMS[name], each.attributes.get("eps", 0.0)).y
        if each.label["input"] in ("normal", "x100", "official"):
            torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-6)
    question = suite.timed(setting(), with_state=True)
    before = question.inputs[0].clone()
    assert suite.change(setting(), question) == {"x": 0.8} and torch.equal(question.inputs[0], before * 0.8)


def test_the_cases_at_full_size_are_the_tasks_own(tmp_path):
    task = task_of(tmp_path, "rms_norm")
    suite = operator_of(task).identity(task.modules())
    first = next(suite.questions(setting(full=True)))
    torch.manual_seed(0)
    assert torch.equal(first.inputs[0], task.modules().get_inputs()[0])
    assert suite.count(setting(full=True)) > suite.count(setting())


@every
def test_the_order_differs_from_the_cpus_and_is_as_near(name):
    torch.manual_seed(4)
    x = torch.randn((5, 70, 6, 4) if name == "rms_norm" else (16, 9000))
    truth = unit_norm(x, NORMS[name], 1e-5).y
    y = in_cuda_order(x, NORMS[name], 1e-5, trees_of("2.11"), Device())
    torch.testing.assert_close(y.double(), truth, rtol=2e-6, atol=0)
    model = operator(name).in_cuda_order  # what the stress suite calls
    assert callable(model)


@every
def test_faults_are_far_from_the_truth(tmp_path, name):
    task = task_of(tmp_path, name)
    modules = task.modules()
    faults = operator_of(task).faults(modules, modules.get_init_inputs())
    (x,) = modules.get_inputs()
    there = []
    for fault in ("hard_coded_statistics", "eps_dropped", "unbiased_variance"):
        try:
            found = faults.fault(fault, x)
        except OracleError:
            continue
        there.append(fault)
        model = modules.Model(*(found.init_inputs or modules.get_init_inputs())).double()
        truth = operator_of(task).truth(model, [found.x]).y
        away = (found.answer(model, found.x) - truth).square().mean().sqrt() / truth.square().mean().sqrt()
        assert away > 0.05, f"{fault}: {away}"
    assert (
        there
        == {
            "rms_norm": ["hard_coded_statistics", "eps_dropped", "unbiased_variance"],
            "l2_norm": ["hard_coded_statistics"],
            "mean_abs_norm": ["hard_coded_statistics", "unbiased_variance"],
        }[name]
    )
    assert faults.fault("half_inside", x).x.min() >= 1024
    with pytest.raises(OracleError, match="no fault of"):
        faults.fault("cancelling_variance", x)
