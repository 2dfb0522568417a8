"""The formula of the teaching text, operator by operator: (x - mean) * (1 / std(x)) * g + b.

`torch.std` is the unbiased one (n - 1) and there is no eps: this is not LayerNorm. A constant row gives NaN or inf,
a hidden size of 1 NaN, and at fp32 the missing n / (n - 1) alone is beyond the official tolerance. `unfused.py` is the
correct formula, written as plainly.
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
        mean = x.mean(dim=-1, keepdim=True)
        return (x - mean) * (1 / torch.std(x, dim=-1, keepdim=True)) * self.ln.weight + self.ln.bias
