"""The faults of LayerNorm: each formula is the true answer where there is no fault, and far from it on its probe."""

from __future__ import annotations

import pytest
import torch

from kbsub.eval.operators.compare.oracle import OracleError
from kbsub.eval.operators.layer_norm.faults import LayerNormFaults, _affine, _statistics, faults_of
from kbsub.eval.operators.operator import Operator
from kbsub.eval.verdicts.guards.run import REGISTER

SHAPE = (4, 8, 8)


def of(eps: float = 1e-5, **more: bool) -> LayerNormFaults:
    found = faults_of(torch.nn.LayerNorm(SHAPE, eps=eps, **more), [SHAPE])
    assert found is not None
    return found


def official() -> torch.Tensor:
    return torch.rand((6, *SHAPE), generator=torch.Generator().manual_seed(1))


def test_every_fault_is_a_guard_of_values() -> None:
    assert {REGISTER[name].family for name in of().names()} == {"value"}


@pytest.mark.parametrize("affine", [True, False])
def test_the_formula_with_the_rows_own_statistics_is_the_true_answer(affine: bool) -> None:
    model = torch.nn.LayerNorm(SHAPE, elementwise_affine=affine).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = official()
    found = _affine(model, x, *_statistics(x, 3), model.eps)
    torch.testing.assert_close(found, model(x.double()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["hard_coded_statistics", "eps_dropped", "unbiased_variance"])
def test_the_faulty_answer_is_far_from_the_true_one(name: str) -> None:
    fault = of().fault(name, official())
    model = torch.nn.LayerNorm(*(fault.init_inputs or [SHAPE])).double()
    assert fault.answer is not None
    wrong, truth = fault.answer(model, fault.x), model(fault.x.double())
    assert wrong.shape == truth.shape and wrong.dtype == torch.float64
    assert (wrong - truth).square().mean().sqrt() > 0.1 * truth.square().mean().sqrt()


def test_where_eps_is_0_it_cannot_be_dropped() -> None:
    with pytest.raises(OracleError, match="the task's eps is 0"):
        of(eps=0.0).fault("eps_dropped", official())


def test_an_unknown_fault_is_named() -> None:
    with pytest.raises(OracleError, match="no fault of a LayerNorm is called typo"):
        of().fault("typo", official())


@pytest.mark.parametrize("arguments", [[8, 1e-5], [], [4], [torch.tensor(8)]])
def test_of_another_constructor_nothing_is_known(arguments: list) -> None:
    assert faults_of(torch.nn.LayerNorm(8), arguments) is None


def test_the_default_operator_knows_no_faults() -> None:
    assert Operator().faults(None, []) is None
