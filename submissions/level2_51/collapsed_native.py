"""The whole problem as one matrix-vector product, by torch's own operators: gelu(x @ mean(W) + mean(b) - mean(s)) + x.

Contract: tolerance. x (batch, in_features) fp32. What the algebra of README.md leaves to do, without a kernel.

Inference only.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


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
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.gemm = LinearParameters(in_features, out_features, bias)
        self.subtract = nn.Parameter(torch.randn(out_features))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, in_features) fp32, any device -> the same shape."""
        tensors = {"weight": self.gemm.weight, "subtract": self.subtract, "bias": self.gemm.bias}
        tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        require_supported(x, tensors)
        shift = -self.subtract.mean() if self.gemm.bias is None else self.gemm.bias.mean() - self.subtract.mean()
        return F.gelu(x @ self.gemm.weight.mean(dim=0) + shift).unsqueeze(1) + x
