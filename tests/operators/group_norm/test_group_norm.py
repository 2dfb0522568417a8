"""group_norm and instance_norm: the float64 answer, the orders, the identity cases, the faults, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kbsub.adapters.task import load_local_task
from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.group_norm import on_cpu
from kbsub.eval.operators.identity import FULL_SIZE, Setting
from kbsub.eval.operators.register import known, operator_of

PROGRAM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, {parameters}):
        super().__init__()
        self.norm = {module}
    def forward(self, x):
        return self.norm(x){more}
def get_inputs():
    return [torch.rand(3, 6, 8, 16)]
def get_init_inputs():
    return [{arguments}]
"""
MODELS = {
    "group_norm": {"parameters": "c, g", "module": "torch.nn.GroupNorm(g, c)", "arguments": "6, 2", "more": ""},
    "instance_norm": {"parameters": "c", "module": "torch.nn.InstanceNorm2d(c)", "arguments": "6", "more": ""},
}
every = pytest.mark.parametrize("name", MODELS)
CPU = torch.device("cpu")


def task_of(folder, name, **changed):
    (folder / "reference.py").write_text(PROGRAM.format(**{**MODELS[name], **changed}))
    (folder / "task.toml").write_text(f'operator = "{name}"\nreference = "reference.py"\n')
    return load_local_task(folder / "reference.py")


def setting(full=False, hosted=False):
    return Setting(CPU, torch.float32, "bit-identical", full, hosted)


def model_of(task):
    modules = task.modules()
    model = modules.Model(*modules.get_init_inputs())
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return modules, model


def test_both_are_found():
    assert set(MODELS) <= set(known())


@every
def test_the_answer_is_the_model_in_float64(tmp_path, name):
    task = task_of(tmp_path, name)
    modules, model = model_of(task)
    (x,) = modules.get_inputs()
    truth = operator_of(task).truth(model, [x])
    torch.testing.assert_close(truth.y, model.double()(x.double()).detach(), rtol=1e-12, atol=1e-12)
    assert truth.normalised and truth.rows == (6 if name == "group_norm" else 18)
    assert (truth.beta is None) == (name == "instance_norm")


@every
@pytest.mark.parametrize(
    "changed",
    [{"module": "torch.nn.BatchNorm2d(c)"}, {"module": "torch.nn.Sequential(torch.nn.ReLU(), torch.nn.GELU())"}],
    ids=["another module", "two modules"],
)
def test_another_model_is_refused(tmp_path, name, changed):
    task = task_of(tmp_path, name, **changed)
    modules, model = model_of(task)
    with pytest.raises(OracleError, match="its Model is not that module"):
        operator_of(task).truth(model, modules.get_inputs())


def test_an_instance_norm_with_parameters_is_refused(tmp_path):
    task = task_of(tmp_path, "instance_norm", module="torch.nn.InstanceNorm2d(c, affine=True)")
    modules, model = model_of(task)
    with pytest.raises(OracleError, match="parameters or running statistics"):
        operator_of(task).truth(model, modules.get_inputs())


@every
@pytest.mark.parametrize("hosted", [False, True], ids=["native", "in CUDA's order"])
def test_identity_cases(tmp_path, name, hosted):
    task = task_of(tmp_path, name)
    suite = operator_of(task).identity(task.modules())
    found = list(suite.questions(setting(hosted=hosted)))
    assert len(found) == suite.count(setting()) and len({each.label["name"] for each in found}) == len(found)
    groups = [each.label["group"] for each in found]
    assert groups.count(FULL_SIZE) == 30 and "hard values" in groups and "another shape" in groups
    for each in found[:: 7 if not hosted else 17]:
        if each.label["input"] in ("normal", "x100", "official") and each.inputs[0].numel():
            y, x = each.expected()["output"], each.inputs[0]
            eps = each.attributes["norm.eps"]
            state = {key: tensor.double() for key, tensor in each.state.items()}
            want = (
                F.instance_norm(x.double(), eps=eps)
                if name == "instance_norm"
                else F.group_norm(x.double(), 2, state["norm.weight"], state["norm.bias"], eps)
            )
            torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)
    question = suite.timed(setting(), with_state=True)
    before = question.inputs[0].clone()
    assert suite.change(setting(), question)["x"] == 0.8 and torch.equal(question.inputs[0], before * 0.8)
    assert suite.count(setting(full=True)) > suite.count(setting())


def test_the_orders_differ_from_each_other_and_are_as_near():
    torch.manual_seed(4)
    x = torch.randn(2, 3, 40, 40) + 3
    group = on_cpu.group_norm(x, 3, torch.ones(3), torch.zeros(3), 1e-5)
    instance = on_cpu.instance_norm(x, 1e-5)
    truth = F.instance_norm(x.double())
    for y in (group, instance):
        torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)
    assert not torch.equal(group, instance)


def test_an_instance_norm_has_no_negative_zero():
    x = torch.tensor([1.0, 2.0, 3.0, 2.0]).reshape(1, 1, 2, 2)
    y = on_cpu.instance_norm(x, 1e-5)
    assert (y == 0).any() and not y[y == 0].signbit().any()


@every
def test_faults_are_far_from_the_truth(tmp_path, name):
    task = task_of(tmp_path, name)
    modules, _ = model_of(task)
    faults = operator_of(task).faults(modules, modules.get_init_inputs())
    (x,) = modules.get_inputs()
    for fault in ("hard_coded_statistics", "eps_dropped", "unbiased_variance"):
        found = faults.fault(fault, x)
        model = modules.Model(*(found.init_inputs or modules.get_init_inputs())).double()
        truth = operator_of(task).truth(model, [found.x]).y
        away = (found.answer(model, found.x) - truth).square().mean().sqrt() / truth.square().mean().sqrt()
        assert away > 0.02, f"{fault}: {away}"
    assert faults.fault("half_inside", x).x.min() >= 1024 and faults.fault("cancelling_variance", x).x.min() >= 3e4
    with pytest.raises(OracleError, match="no fault of"):
        faults.fault("typo", x)
