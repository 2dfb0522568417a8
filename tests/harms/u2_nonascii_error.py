"""An error text outside ASCII, for a machine whose locale knows nothing else."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        print("W\u00f6rter")
        raise RuntimeError("W\u00f6rter")
