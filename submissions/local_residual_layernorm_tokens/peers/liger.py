"""The sum by torch, then LayerNorm of liger-kernel (a Triton kernel), where it is installed: pip install liger-kernel.

liger-kernel fuses a residual with RMSNorm only.
"""

import torch
from torch import nn


class Parameters(nn.Module):
    """What nn.LayerNorm holds: weight (ones), bias (zeros), eps."""

    def __init__(self, normalized_shape, eps: float):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = Parameters(normalized_shape, eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual (..., hidden) -> y of that shape and dtype."""
        from liger_kernel.ops.layer_norm import layer_norm_forward

        return layer_norm_forward(x + residual, self.ln.weight, self.ln.bias, self.ln.eps)[0]
