"""Eager's matrix product, whose roundings are the reference's answer, then one sum; no 8 million halves.

Contract: tolerance; passes where the truth does not. x (batch, input_size) fp32. The halves are exact: a sum of halves
is half the sum, rounding by rounding, unless something overflows or falls among the subnormal numbers. So the division
can wait until a row is one number, and the bits are still eager's (README.md has what that is worth).

Inference only.
"""

import torch
from torch import nn


def positive(name: str, value) -> int:
    if not (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31):
        raise RuntimeError(f"{name}: {value!r} must be a positive integer below 2^31")
    return value


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
    def __init__(self, input_size, hidden_size, scaling_factor):
        super().__init__()
        positive("input_size", input_size)
        self.weight = nn.Parameter(torch.randn(positive("hidden_size", hidden_size), input_size))
        self.scaling_factor = scaling_factor

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, input_size) fp32, any device -> (batch, 1)."""
        require_supported(x, {"weight": self.weight})
        return torch.sum(torch.matmul(x, self.weight.T), dim=1, keepdim=True) / 2 * self.scaling_factor
