"""The variants of small references written here: what each one changes, and that it changes nothing else."""

from __future__ import annotations

import time

import pytest
import torch

from kbsub.adapters.task import Task
from kbsub.eval.blindspots import arithmetic, judge, variants
from kbsub.eval.blindspots.reference import NotTried, Reference, seeds_of
from kbsub.eval.results.blindspots import BlindSpots

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
class Model(nn.Module):
"""
MLP = (
    HEAD
    + """
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.ones(width))
    def forward(self, x, y):
        x = self.linear(x)
        x = torch.clamp(x, -100.0, 100.0)
        x = self.norm(x) * self.scale
        x = x + 0.0 * y
        return torch.max(x, dim=1, keepdim=True).values.relu_()
width = 64
def get_inputs():
    return [torch.rand(32, width), torch.rand(32, width)]
def get_init_inputs():
    return [width]
"""
)
RECURRENT = (
    HEAD
    + """
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
    def forward(self, x):
        return self.lstm(x)[0]
def get_inputs():
    return [torch.rand(3, 6, 4)]
def get_init_inputs():
    return []
"""
)
IN_PLACE = (
    HEAD
    + """
    def forward(self, x):
        x.mul_(2.0)
        return x.sum(dim=1)
def get_inputs():
    return [torch.rand(16, 32)]
def get_init_inputs():
    return []
"""
)
CANCELS = (
    HEAD
    + """
    def forward(self, x):
        return (x + 4096.0) - 4096.0
def get_inputs():
    return [torch.rand(64, 32)]
def get_init_inputs():
    return []
"""
)
DROPS = (
    HEAD
    + """
    def forward(self, x):
        return F.dropout(x, 0.5)
def get_inputs():
    return [torch.rand(64, 32)]
def get_init_inputs():
    return []
"""
)
RAISES = CANCELS.replace("return (x + 4096.0) - 4096.0", 'raise ValueError("no such shape")')
SEEDS, ANOTHER = seeds_of()


def task(source: str) -> Task:
    return Task(0, 0, "local.py", source, "sha", "local")


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def set_up(source: str):
    reference = Reference(task(source), "cpu", ANOTHER)
    elsewhere = reference.profile()
    return reference, elsewhere, reference.trial(SEEDS[0])


def by_name(found):
    return {each.name: each for each in found}


def test_calls_are_named_and_moved_data_is_none():
    reference, _, _ = set_up(MLP)
    assert [call.name for call in reference.calls] == [
        "linear",
        "clamp",
        "layer_norm",
        "mul",
        "mul#2",
        "add",
        "max",
        "relu",
    ]
    assert [call.plain for call in reference.calls][-2:] == [False, True]
    assert reference.calls[6].axes == (1,)
    assert not reference.mutates


def test_operators_left_out_and_as_constants():
    reference, _, trial = set_up(MLP)
    model, (x, y) = reference.model, trial.inputs
    found = by_name(variants.operators(reference).chosen)
    normed = model.norm(model.linear(x)) * model.scale
    assert torch.equal(found["call 2 clamp: left out, argument 1"].make(trial), trial.output)
    assert torch.equal(
        found["call 1 linear: left out, argument 1"].make(trial),
        (model.norm(x) * model.scale + 0.0 * y).max(1, keepdim=True).values.relu(),
    )
    assert torch.equal(found["call 6 add: left out, argument 2"].make(trial), (0.0 * y).max(1, keepdim=True).values)
    assert torch.equal(found["call 7 max: zeros"].make(trial), torch.zeros(32, 1))
    half = torch.cat([normed[:, :32]] * 2, 1)
    assert torch.equal(found["call 7 max: first 1/2 of axis 1"].make(trial), half.max(1, keepdim=True).values.relu())
    assert "call 8 relu: its mean" not in found  # the output as a constant is another variant's
    assert torch.equal(trial.run(), trial.output)


def test_parameters_are_put_back_and_equal_ones_are_free():
    reference, _, trial = set_up(MLP)
    found = by_name(variants.parameters(reference).chosen)
    assert {name for name, each in found.items() if each.free} == {
        "parameter scale: ones",
        "parameter scale: another seed's",
        "parameter norm.weight: ones",
        "parameter norm.weight: another seed's",
        "parameter norm.bias: zeros",
        "parameter norm.bias: another seed's",
    }
    before = {name: each.clone() for name, each in reference.model.named_parameters()}
    assert not torch.equal(found["parameter linear.weight: another seed's"].make(trial), trial.output)
    assert torch.equal(found["parameter scale: zeros"].make(trial), torch.zeros(32, 1))
    assert all(torch.equal(before[name], each) for name, each in reference.model.named_parameters())


def test_a_recurrent_layers_parameters_are_really_replaced():
    """nn.LSTM keeps a list of its own: a functional_call would leave it as it is, and every variant would pass."""
    reference, _, trial = set_up(RECURRENT)
    found = by_name(variants.parameters(reference).chosen)
    assert len(found) == 12
    for name, each in found.items():
        assert not torch.equal(each.make(trial), trial.output), name


def test_inputs():
    reference, _, trial = set_up(MLP)
    found = by_name(variants.inputs(trial.inputs))
    assert torch.equal(found["input 2: zeros"].make(trial), trial.output)
    assert not torch.allclose(found["input 1: zeros"].make(trial), trial.output)
    assert not torch.allclose(found["input 1: another draw's"].make(trial), trial.output)
    rows = found["inputs: first 1/4 of the rows"].make(trial)
    assert torch.equal(rows, torch.cat([trial.output[:8]] * 4))
    assert torch.equal(trial.inputs[0], reference.trial(SEEDS[0]).inputs[0])


def test_outputs():
    reference, elsewhere, trial = set_up(MLP)
    found = by_name(variants.outputs(reference, elsewhere))
    other = found["output: another draw's"]
    first, second = other.make(trial), other.make(trial)  # kept at first, then made again
    assert torch.equal(first, second) and not torch.equal(first, trial.output)
    assert torch.equal(found["output: rows shifted"].make(trial)[1:], trial.output[:-1])
    assert found["output: its mean"].make(trial)[0, 0] == pytest.approx(float(elsewhere.mean()))
    assert torch.equal(found["output: first element"].make(trial), trial.output[:1].expand(32, 1))


def test_a_forward_that_writes_into_its_input_gets_copies():
    reference, _, trial = set_up(IN_PLACE)
    assert reference.mutates
    kept = trial.inputs[0].clone()
    twice = trial.run()  # as upstream: the candidate gets what the reference left
    assert torch.equal(twice, trial.run())
    assert torch.equal(trial.inputs[0], kept)
    assert torch.equal(twice, 2 * trial.output)


def test_rounding_and_sums():
    x = torch.tensor([1.0, 1 + 2**-11, 1 + 2**-12, -1 - 2**-11, 3e38])
    assert arithmetic.to_tf32(x).tolist()[:4] == [1.0, 1 + 2**-10, 1.0, -1 - 2**-10]
    assert torch.equal(arithmetic.to_bf16(x), x.bfloat16().float())
    reference, _, trial = set_up(MLP)
    found = by_name(arithmetic.arithmetic(reference))
    assert "operands rounded to tf32" in found and "inputs rounded to tf32" not in found
    assert not torch.equal(found["sums in bf16"].make(trial), trial.output)
    assert torch.allclose(found["sums in bf16"].make(trial), trial.output, atol=0.2)
    with pytest.raises(NotTried, match="no sum that can be split"):
        by_name(arithmetic.arithmetic(set_up(CANCELS)[0]))["sums in bf16"].make(set_up(CANCELS)[2])


def record(source: str, limit_s: float = 60.0) -> BlindSpots:
    found = judge._Run(task(source), {}, "cpu", 1e-4, time.monotonic() + limit_s).record()
    return BlindSpots.model_validate(found)


def test_where_float64_fails_the_reference_is_off():
    found = record(CANCELS)
    assert found.severities()[0] == "hostile"
    truth = next(row for row in found.variants if row.name == "truth: float64")
    assert truth.whole and truth.share > 1 and truth.failing is not None and 0 < truth.failing[0] <= 64 * 32


def test_a_reference_of_other_random_numbers_is_unstable_and_nothing_else_about_it():
    assert record(DROPS).severities()[0] == "unstable"
    assert "hostile" not in record(DROPS).severities()


def test_a_reference_that_raises_fails_every_candidate():
    found = record(RAISES)
    assert found.severities() == ["unstable"]
    assert found.error == "the reference raises on upstream's inputs: ValueError: no such shape"


def test_the_time_limit_and_memory_cost_their_own_rows(monkeypatch):
    late = record(MLP, limit_s=-1.0)
    assert not late.variants and {row.why for row in late.not_tried} == {"time limit"}

    def too_much(trial):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(arithmetic, "_truth", too_much)
    found = record(MLP)
    assert [row.name for row in found.not_tried if row.why == "out of memory"] == ["truth: float64"]
    assert found.out_of_memory and len(found.variants) > 30


def test_of_many_the_first_of_each_kind_and_then_evenly():
    items = [f"{kind}{number}" for kind in "ab" for number in range(50)] + ["c0"]
    chosen = variants.spread(items, 10, lambda item: item[0])
    assert len(chosen) == 10 and {"a0", "b0", "c0"} <= set(chosen)
    assert chosen == sorted(chosen, key=items.index)
    assert variants.spread(items, 200, lambda item: item) == items
