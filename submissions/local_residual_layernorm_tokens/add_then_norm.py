"""Native as it is: the sum stored, then torch.native_layer_norm of it. Five trips of a row's bytes.

Contract: baseline, bit-identical to the task's own program.
"""

import torch
from torch import nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape, eps=eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual (tokens..., *normalized_shape) -> y of that shape and dtype."""
        ln = self.ln
        return torch.native_layer_norm(x + residual, ln.normalized_shape, ln.weight, ln.bias, ln.eps)[0]
