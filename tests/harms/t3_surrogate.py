"""Another error type with a lone surrogate that nothing decoded."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        raise ValueError("bad tile \udcff in the source")
