"""LayerNorm of quack-kernels (CuTe DSL), where it is installed: pip install quack-kernels.

Its weight and bias are fp32 whatever x is; they are widened at every call, as the task's parameters have x's dtype.
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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden) -> y of that shape and dtype."""
        from quack.rmsnorm import layernorm_fwd

        rows = x.reshape(-1, x.shape[-1])
        y = layernorm_fwd(rows, self.ln.weight.float(), bias=self.ln.bias.float(), eps=self.ln.eps)
        return y.reshape(x.shape)
