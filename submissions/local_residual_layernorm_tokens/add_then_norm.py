"""Native as it is: the sum stored, then torch.native_layer_norm of it. Five trips of a row's bytes, two launches.

Contract: baseline, bit-identical to the task's own program: the same two operators on the same tensors.
"""

import torch
from torch import nn


class AffineParameters(nn.Module):
    """What nn.LayerNorm holds: weight (ones) and bias (zeros) of `normalized_shape`, and eps."""

    def __init__(self, normalized_shape, eps: float):
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if not (isinstance(sizes, (tuple, list)) and sizes and all(isinstance(n, int) and n > 0 for n in sizes)):
            raise RuntimeError(f"normalized_shape: {normalized_shape!r} must be one or more positive integers")
        self.normalized_shape = tuple(sizes)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))


def require_supported(x: torch.Tensor, residual: torch.Tensor, ln: AffineParameters):
    """Raises ValueError, naming the tensor and the rule; what torch's own operators take is taken."""
    if ln.weight is None or ln.bias is None:
        raise ValueError("weight, bias: both must be present (an affine layer norm)")
    sizes = tuple(ln.normalized_shape)  # a list where somebody has replaced it
    tensors = (("x", x), ("residual", residual), ("weight", ln.weight), ("bias", ln.bias))
    for name, tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
    if x.dim() <= len(sizes) or tuple(x.shape[-len(sizes) :]) != sizes or residual.shape != x.shape:
        shapes = f"{tuple(x.shape)} and {tuple(residual.shape)}"
        raise ValueError(f"x, residual: shapes {shapes}, must be one, (tokens..., *{sizes})")
    for name, tensor in tensors[1:]:
        if tensor.device != x.device or tensor.dtype != x.dtype:
            have, want = (tensor.device, tensor.dtype), (x.device, x.dtype)
            raise ValueError(f"{name}: on {have[0]} as {have[1]}, must be like x: on {want[0]} as {want[1]}")


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = AffineParameters(normalized_shape, eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual (tokens..., *normalized_shape), float of any width, any device -> y of that shape and dtype."""
        ln = self.ln
        require_supported(x, residual, ln)
        return torch.native_layer_norm(x + residual, tuple(ln.normalized_shape), ln.weight, ln.bias, ln.eps)[0]
