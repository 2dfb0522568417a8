"""Eager's linear layer, and what follows it through TorchScript.

Contract: tolerance. x (batch, in_features) fp32. Parameters are inputs of the trace: what is written into
them later counts. Nothing is traced in the constructor: the harness moves the model afterwards.

Inference only. The experiment this restates is public: see README.md.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

UNFUSED_RUNS = 3  # the fuser's work is done after these


def positive(name: str, value) -> int:
    if not (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31):
        raise RuntimeError(f"{name}: {value!r} must be a positive integer below 2^31")
    return value


class LinearParameters(nn.Module):
    """What nn.Linear holds, drawn as it draws it: weight (out, in), bias (out) or None."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features = positive("in_features", in_features)
        self.out_features = positive("out_features", out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if bias:
            nn.init.uniform_(self.bias, -1 / math.sqrt(in_features), 1 / math.sqrt(in_features))


class Formula(nn.Module):
    """What the task does behind the product: a vector added, swish, tanh, gelu, clamped to [-1, 1]."""

    def forward(self, v, add_value):
        v = v + add_value
        v = F.gelu(torch.tanh(torch.sigmoid(v) * v))
        return F.hardtanh(v, min_val=-1.0, max_val=1.0)


def require_supported(x: torch.Tensor, tensors: dict):
    """Raises ValueError, naming the tensor and the rule; what torch's own operators take is taken."""
    for name, tensor in (("x", x), *tensors.items()):
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be torch.float32")
        if tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, must be on the device of x ({x.device})")
    if x.dim() != 2 or x.shape[1] != tensors["weight"].shape[1]:
        raise ValueError(f"x: shape {tuple(x.shape)}, must be (batch, {tensors['weight'].shape[1]})")


class ModelNew(nn.Module):
    def __init__(self, in_features, out_features, add_value_shape):
        super().__init__()
        self.matmul = LinearParameters(in_features, out_features)
        shape = (add_value_shape,) if isinstance(add_value_shape, int) else tuple(add_value_shape)
        if shape != (out_features,):
            raise RuntimeError(f"add_value_shape: {add_value_shape!r} must be ({out_features},)")
        self.add_value = nn.Parameter(torch.randn(add_value_shape))
        self.traced = (None, None)  # key, traced formula: in a tuple, so that it is no submodule

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, in_features) fp32, any device -> (batch, out_features)."""
        tensors = {"weight": self.matmul.weight, "bias": self.matmul.bias, "add_value": self.add_value}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        require_supported(x, tensors)
        given = (
            F.linear(x, self.matmul.weight, self.matmul.bias),
            self.add_value,
        )
        key = (tuple((each.device, each.shape, each.stride()) for each in given),)
        if self.traced[0] != key:
            traced = torch.jit.trace(Formula(), given, check_trace=False)
            for _ in range(UNFUSED_RUNS):
                traced(*given)
            self.traced = (key, traced)
        return self.traced[1](*given)
