"""The identity cases of LayerNorm tasks: level 1 problem 40's are the published ones, another task has its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kbsub.adapters.task import load_local_task, load_task
from kbsub.eval.operators.identity import FULL_SIZE, IdentitySuite, Setting
from kbsub.eval.operators.layer_norm.identity import LayerNormCases, native
from kbsub.eval.operators.operator import Operator
from kbsub.eval.operators.register import operator_of
from support.paths import ROOT

RESULTS = ROOT / "results" / "h200" / "level1_40.json"
TOKENS = ROOT / "submissions" / "local_layernorm_tokens" / "reference.py"
CPU = torch.device("cpu")
PROGRAM = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self, {parameters}):
        super().__init__()
        self.norm = nn.LayerNorm({row}, eps={eps})
    def forward(self, x):
        return self.norm(x)
def get_inputs():
    return [torch.rand({shape})]
def get_init_inputs():
    return [{arguments}]
"""


def setting(contract: str = "bit-identical", full: bool = False, dtype: torch.dtype = torch.float32) -> Setting:
    return Setting(CPU, dtype, contract, full, hosted=False)


def suite_of(folder: Path, **words: str) -> IdentitySuite | None:
    program = folder / "reference.py"
    program.write_text(PROGRAM.format(**{"parameters": "row", "row": "row", "eps": "1e-5", **words}))
    (folder / "task.toml").write_text('operator = "layer_norm"\nreference = "reference.py"\n')
    task = load_local_task(program)
    return operator_of(task).identity(task.modules())


@pytest.mark.parametrize("contract", ["bit-identical", "control"])
def test_level1_40_has_the_cases_of_the_committed_evidence(contract, monkeypatch):
    task = load_task(1, 40, kernelbench=None)
    suite = operator_of(task).identity(task.modules())
    monkeypatch.setattr(LayerNormCases, "_draw", lambda self, setting, name, shape: torch.zeros(1))
    monkeypatch.setattr(LayerNormCases, "_affine", lambda self, setting, shape: _Nothing())
    found = [question.label for question in suite.questions(setting(contract, full=True))]
    assert len(found) == suite.count(setting(contract, full=True)) == {"bit-identical": 61, "control": 55}[contract]
    stem = {"bit-identical": "reference_order", "control": "split_flat"}[contract]
    stored = json.loads(RESULTS.read_text("utf-8"))["candidates"][stem]["bit_identity"]["cases"]
    assert found == [{key: case[key] for key in label} for case, label in zip(stored, found, strict=False)]
    assert len(stored) == len(found) + 1 and stored[-1]["name"] == "graph mutation"


class _Nothing:
    weight = bias = torch.zeros(1)

    def set(self, kind: str) -> None:
        pass


def test_the_token_task_is_asked_at_its_own_shape_with_its_own_input():
    task = load_local_task(TOKENS)
    suite = operator_of(task).identity(task.modules())
    assert suite.count(setting(full=True)) > 3
    questions = suite.questions(setting(full=True))
    torch.manual_seed(0)
    own = task.modules().get_inputs()[0]
    first = next(questions)
    assert first.label["group"] == FULL_SIZE and first.label["shape"] == [4096, 512]
    assert torch.equal(first.inputs[0], own) and first.init_inputs == [512]
    small = next(suite.questions(setting()))
    assert torch.equal(small.inputs[0], own[:16])


def test_every_constructor_argument_and_shape_fits_the_token_model():
    task = load_local_task(TOKENS)
    modules = task.modules()
    for question in operator_of(task).identity(modules).questions(setting()):
        (hidden,) = question.init_inputs
        y = modules.Model(hidden)(question.inputs[0])
        assert isinstance(hidden, int) and y.shape == question.inputs[0].shape, question.label
        assert hidden % 4 == 0, "the reference order is that of the vectorised path"


NAMES = {  # what a task says: (words of its program, its state's keys, its full-size shape)
    "several rows' dimensions": (
        {"row": "row", "shape": "2, 3, 8", "arguments": "8"},
        {"norm.weight", "norm.bias"},
        [2, 3, 8],
    ),
    "a row of two dimensions": (
        {"row": "row", "shape": "5, 4, 8", "arguments": "(4, 8)"},
        {"norm.weight", "norm.bias"},
        [5, 4, 8],
    ),
    "another eps": ({"shape": "5, 8", "arguments": "8", "eps": "1e-3"}, {"norm.weight", "norm.bias"}, [5, 8]),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_shapes_and_eps_are_those_of_the_model(name, tmp_path):
    words, keys, shape = NAMES[name]
    questions = list(suite_of(tmp_path, **words).questions(setting()))
    assert questions[0].label["shape"] == shape
    assert all(set(question.state) == keys for question in questions)
    assert {len(question.inputs[0].shape) for question in questions if question.label["group"] == FULL_SIZE} == {
        len(shape)
    }
    eps = float(words.get("eps", "1e-5"))
    assert {question.attributes["norm.eps"] for question in questions if not question.needs_attributes} == {eps}
    for question in questions:
        y = torch.nn.functional.layer_norm(
            question.inputs[0],
            question.state["norm.weight"].shape,
            *(question.state[f"norm.{key}"] for key in ("weight", "bias")),
            question.attributes["norm.eps"],
        )
        assert torch.equal(question.expected()["output"].nan_to_num(), y.nan_to_num()), question.label


def test_a_constructor_of_another_form_is_asked_for_its_own_rows_only(tmp_path):
    words = {"parameters": "row, unused", "shape": "5, 8", "arguments": "8, 3"}
    questions = list(suite_of(tmp_path, **words).questions(setting()))
    assert {question.label["group"] for question in questions} == {FULL_SIZE}
    assert all(question.init_inputs == [8, 3] for question in questions)


UNKNOWN = {
    "no parameters": {"row": "row, elementwise_affine=False", "shape": "5, 8", "arguments": "8"},
    "two inputs": {"shape": "5, 8), torch.rand(5, 8", "arguments": "8"},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_form_that_is_not_known_gets_the_generic_question(name, tmp_path):
    assert suite_of(tmp_path, **UNKNOWN[name]) is None


def test_an_operator_that_knows_nothing_has_no_cases():
    assert Operator().identity(load_task(1, 40, kernelbench=None).modules()) is None


def test_the_change_is_made_in_place_and_native_sees_it():
    task = load_task(1, 40, kernelbench=None)
    suite = operator_of(task).identity(task.modules())
    question = suite.timed(setting(), with_state=True)
    before = question.expected()["output"]
    places = [question.inputs[0].data_ptr(), *(each.data_ptr() for each in question.state.values())]
    assert suite.change(setting(), question) == {"x": 0.8, "weight": 0.9, "bias": 0.01}
    assert places == [question.inputs[0].data_ptr(), *(each.data_ptr() for each in question.state.values())]
    assert not torch.equal(question.expected()["output"], before)


def test_native_in_the_cuda_order_is_near_native_here():
    torch.manual_seed(1)
    x, weight, bias = torch.randn(6, 64), torch.randn(64), torch.randn(64)
    here, there = native(False, x, weight, bias, 1e-5), native(True, x, weight, bias, 1e-5)
    assert list(here) == list(there) == ["output", "mean", "rstd"]
    for name in here:
        torch.testing.assert_close(here[name], there[name], atol=1e-5, rtol=1e-5)
