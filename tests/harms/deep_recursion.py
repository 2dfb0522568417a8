"""Recurses until the C stack is gone."""

import sys

import torch.nn as nn

sys.setrecursionlimit(10**8)


class Deep:
    def __repr__(self):
        return repr(Deep())


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        repr(Deep())
        return self.ln(x)
