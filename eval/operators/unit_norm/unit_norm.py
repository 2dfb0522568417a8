"""The operator of each of the three norms. A task that declares one for another Model is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kbsub.adapters.task import Modules
from kbsub.eval.operators.compare.oracle import Truth
from kbsub.eval.operators.identity import IdentitySuite
from kbsub.eval.operators.operator import Operator
from kbsub.eval.operators.reduction_order import Device, UnknownOrder, trees_of
from kbsub.eval.operators.unit_norm.faults import UnitNormFaults
from kbsub.eval.operators.unit_norm.formula import Norm, eps_of, unit_norm
from kbsub.eval.operators.unit_norm.identity import UnitNormCases
from kbsub.eval.operators.unit_norm.on_cpu import in_cuda_order

SMALL_DEVICE = Device(multiprocessors=4)  # what the stress suite executes kernels for, on a CPU


class UnitNorm(Operator):
    """norm: what x is divided by, along dimension 1."""

    norm: Norm

    def truth(self, model: torch.nn.Module, inputs: Sequence[Any]) -> Truth:
        return unit_norm(inputs[0], self.norm, eps_of(model, self.norm))

    def in_cuda_order(self, model: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
        eps = eps_of(model, self.norm)
        try:
            trees = trees_of(torch.__version__)
        except UnknownOrder:
            return None
        return lambda x: in_cuda_order(x, self.norm, eps, trees, SMALL_DEVICE)

    def identity(self, modules: Modules) -> IdentitySuite | None:
        eps = eps_of(modules.Model(*modules.get_init_inputs()), self.norm)
        try:
            with torch.device("meta"):
                inputs = modules.get_inputs()
        except Exception:
            inputs = modules.get_inputs()
        return UnitNormCases(modules, tuple(inputs[0].shape), self.norm, eps)

    def faults(self, modules: Modules, init_inputs: list[Any]) -> UnitNormFaults | None:
        return UnitNormFaults(self.norm, eps_of(modules.Model(*init_inputs), self.norm), init_inputs)
