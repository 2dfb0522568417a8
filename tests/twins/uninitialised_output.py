"""Returns memory it never wrote, hoping for the reference's freed answer (upstream's result-reuse idea)."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return torch.empty_like(x)
