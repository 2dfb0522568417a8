"""An error text with a lone surrogate, as os.fsdecode makes them of a file name."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        raise RuntimeError("cannot open " + b"caf\xe9.so".decode("utf-8", "surrogateescape"))
