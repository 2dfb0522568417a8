"""`torch.linalg.vector_norm` in the place of `torch.norm`, which calls it.

Contract: baseline. The same reduction and the same division as eager, so it must be bit-identical.

Inference only. The experiment this restates is public: see README.md.
"""

import torch
from torch import nn


def require_supported(x: torch.Tensor):
    """Raises ValueError, naming the tensor and the rule; what torch's own operators take is taken."""
    if x.layout != torch.strided or x.is_nested:  # before anything else: not all of them have a shape
        raise ValueError(f"x: {'nested' if x.is_nested else x.layout}, must be an ordinary (strided) tensor")
    if x.dim() < 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, must be (rows, n, *)")
    if not x.is_floating_point():
        raise ValueError(f"x: dtype {x.dtype}, must be a floating-point one")


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, n, *), float of any width, any device -> the same shape and dtype."""
        require_supported(x)
        return x / torch.linalg.vector_norm(x, 2, dim=1, keepdim=True)
