"""The statistics of groups of channels and what follows from them, in float64. Knows no candidate and no order."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kbsub.eval.operators.compare.oracle import OracleError, Truth
from kbsub.eval.operators.layer_norm.formula import layer_norm

PLANE_DIM = 2  # x is (batch, channels, *)


@dataclass(frozen=True)
class Layer:
    """The one normalising module of a Model. groups None: every channel is a group, as in an instance norm.

    path: of the module in its Model, "" or with a dot behind it. weight, bias: (channels,) or None.
    """

    path: str
    groups: int | None
    eps: float
    weight: torch.Tensor | None
    bias: torch.Tensor | None


def layer_of(model: torch.nn.Module, kind: type[torch.nn.Module]) -> Layer:
    """The GroupNorm, or the parameterless InstanceNorm2d, that is all there is in `model`. OracleError otherwise."""
    leaves = [(name, each) for name, each in model.named_modules() if next(each.children(), None) is None]
    if len(leaves) != 1 or not isinstance(leaves[0][1], kind):
        raise OracleError(f"the task declares {kind.__name__}, but its Model is not that module and nothing else")
    name, module = leaves[0]
    own = {id(each) for each in (*module.parameters(), *module.buffers())}
    if {id(each) for each in (*model.parameters(), *model.buffers())} != own:
        raise OracleError(f"the Model has parameters or buffers beside those of its {kind.__name__}")
    path = f"{name}." if name else ""
    if isinstance(module, torch.nn.GroupNorm):
        return Layer(path, module.num_groups, module.eps, module.weight, module.bias)
    if not isinstance(module, torch.nn.InstanceNorm2d) or own or module.track_running_stats:
        raise OracleError("the Model's InstanceNorm2d has parameters or running statistics")
    return Layer(path, None, module.eps, None, None)


def norm_of_groups(x: torch.Tensor, layer: Layer) -> Truth:
    """The float64 answer for x (batch, channels, *), any float dtype: biased variance, as in LayerNorm's formula.

    A group without variance and with eps = 0 is 0/0, NaN.
    """
    if x.dim() < PLANE_DIM:
        raise OracleError(f"input of shape {tuple(x.shape)} has no channels")
    batch, channels, pixels = x.shape[0], x.shape[1], math.prod(x.shape[PLANE_DIM:])
    groups = channels if layer.groups is None else layer.groups
    a_row = channels // groups * pixels
    rows = layer_norm(x.reshape(batch * groups, a_row), None, None, layer.eps, (a_row,))
    y, beta = rows.y.reshape(batch, channels, pixels), None
    if layer.weight is not None:
        y *= layer.weight.detach().double().reshape(1, channels, 1)
    if layer.bias is not None:
        of_channels = layer.bias.detach().double().reshape(channels, 1)
        y += of_channels
        beta = of_channels.expand(channels, pixels).reshape(-1)
    return replace(rows, y=y.reshape(x.shape), beta=beta)
