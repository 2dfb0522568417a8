"""What is known of LayerNorm: its float64 formula, the order of PyTorch's CUDA kernel, constant rows, its faults.

A reference that is one LayerNorm and nothing else; a task that declares this operator for another Model is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from kbsub.adapters.task import Modules
from kbsub.eval.operators.compare.oracle import OracleError, Truth
from kbsub.eval.operators.identity import IdentitySuite
from kbsub.eval.operators.layer_norm.faults import LayerNormFaults, faults_of
from kbsub.eval.operators.layer_norm.formula import layer_norm, layer_norm_of
from kbsub.eval.operators.layer_norm.identity import cases_of
from kbsub.eval.operators.layer_norm.on_cpu import in_cuda_order
from kbsub.eval.operators.operator import Operator


class LayerNormOperator(Operator):
    name: ClassVar[str] = "layer_norm"

    def layer(self, model: torch.nn.Module) -> torch.nn.LayerNorm:
        """The Model's one LayerNorm. OracleError: it is not one LayerNorm, whatever its task.toml says."""
        layer = layer_norm_of(model)
        if layer is None:
            raise OracleError('the task declares operator = "layer_norm", but its Model is not one LayerNorm')
        return layer

    def truth(self, model: torch.nn.Module, inputs: Sequence[Any]) -> Truth:
        layer = self.layer(model)
        return layer_norm(inputs[0], layer.weight, layer.bias, layer.eps, layer.normalized_shape)

    def in_cuda_order(self, model: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
        layer = self.layer(model)
        return None if layer.weight is None or layer.bias is None else functools.partial(in_cuda_order, layer)

    def of_constant_rows(self, model: torch.nn.Module, output: torch.Tensor) -> torch.Tensor | None:
        layer = self.layer(model)
        return None if layer.bias is None else layer.bias.detach().expand_as(output).contiguous()

    def identity(self, modules: Modules) -> IdentitySuite | None:
        model = modules.Model(*modules.get_init_inputs())
        return cases_of(modules, model, self.layer(model))

    def faults(self, modules: Modules, init_inputs: list[Any]) -> LayerNormFaults | None:
        return faults_of(self.layer(modules.Model(*init_inputs)), init_inputs)


OPERATOR = LayerNormOperator()
