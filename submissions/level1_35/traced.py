"""The task's own program through TorchScript.

Contract: baseline: eager's own operators, called by the interpreter of traces. There is nothing for the fuser here.
Parameters are inputs of the trace, so that what is written into them later counts.
Nothing is traced in the constructor: the harness moves the model afterwards.

Inference only. The experiment this restates is public: see README.md.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Formula(nn.Module):
    """The task's own program."""

    def __init__(self, num_groups: int, eps: float):
        super().__init__()
        self.num_groups, self.eps = num_groups, eps

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class GroupNormParameters(nn.Module):
    """What nn.GroupNorm holds: weight (ones) and bias (zeros) of its channels, and eps."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5):
        super().__init__()
        for name, value in (("num_features", num_channels), ("num_groups", num_groups)):
            if not (isinstance(value, int) and 0 < value < 2**31):
                raise RuntimeError(f"{name}: {value!r} must be a positive integer below 2^31")
        if num_channels % num_groups:
            raise RuntimeError(f"num_features: {num_channels} must be a multiple of num_groups, {num_groups}")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))


def require_supported(x: torch.Tensor, gn: GroupNormParameters):
    """Raises ValueError, naming the tensor and the rule, for every input this file does not take."""
    if gn.weight is None or gn.bias is None:
        raise ValueError("weight, bias: both must be present")
    for name, tensor in (("x", x), ("weight", gn.weight), ("bias", gn.bias)):
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be torch.float32")
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, must be on the device of x ({x.device})")
        if name != "x" and (tuple(tensor.shape) != (gn.num_channels,) or not tensor.is_contiguous()):
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be ({gn.num_channels},), contiguous")
    if x.dim() < 2 or x.shape[1] != gn.num_channels:
        raise ValueError(f"x: shape {tuple(x.shape)}, must be (batch, {gn.num_channels}, *)")


class ModelNew(nn.Module):
    def __init__(self, num_features: int, num_groups: int):
        super().__init__()
        self.gn = GroupNormParameters(num_groups, num_features)
        self.traced = (None, None)  # key, traced formula: in a tuple, so that it is no submodule

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, channels, *) fp32, any device -> the same shape."""
        gn = self.gn
        require_supported(x, gn)
        given = (x, gn.weight, gn.bias)
        key = (tuple((each.device, each.shape, each.stride()) for each in given), gn.eps)  # eps: a constant of it
        if self.traced[0] != key:
            self.traced = (key, torch.jit.trace(Formula(gn.num_groups, gn.eps), given, check_trace=False))
        return self.traced[1](*given)
