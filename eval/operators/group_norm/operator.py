"""The operator of a task whose Model is one GroupNorm; instance_norm is the same of another module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from kbsub.adapters.task import Modules
from kbsub.eval.operators.compare.oracle import Truth
from kbsub.eval.operators.group_norm import on_cpu
from kbsub.eval.operators.group_norm.faults import GroupNormFaults
from kbsub.eval.operators.group_norm.formula import layer_of, norm_of_groups
from kbsub.eval.operators.group_norm.identity import GroupNormCases
from kbsub.eval.operators.identity import IdentitySuite
from kbsub.eval.operators.operator import Operator


class GroupNormOperator(Operator):
    """kind: the module that is all of the task's Model."""

    name: ClassVar[str] = "group_norm"
    kind: ClassVar[type[torch.nn.Module]] = torch.nn.GroupNorm

    def truth(self, model: torch.nn.Module, inputs: Sequence[Any]) -> Truth:
        return norm_of_groups(inputs[0], layer_of(model, self.kind))

    def in_cuda_order(self, model: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
        layer = layer_of(model, self.kind)
        groups, weight, bias = layer.groups, layer.weight, layer.bias
        if groups is None:
            return lambda x: on_cpu.instance_norm(x, layer.eps)
        if weight is None or bias is None:
            return None
        return lambda x: on_cpu.group_norm(x, groups, weight, bias, layer.eps)

    def identity(self, modules: Modules) -> IdentitySuite | None:
        layer = layer_of(modules.Model(*modules.get_init_inputs()), self.kind)
        try:
            with torch.device("meta"):
                inputs = modules.get_inputs()
        except Exception:
            inputs = modules.get_inputs()
        return GroupNormCases(modules, tuple(inputs[0].shape), layer)

    def faults(self, modules: Modules, init_inputs: list[Any]) -> GroupNormFaults | None:
        return GroupNormFaults(self.kind, layer_of(modules.Model(*init_inputs), self.kind), init_inputs)


OPERATOR = GroupNormOperator()
