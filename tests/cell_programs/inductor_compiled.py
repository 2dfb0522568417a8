"""LayerNorm as torch.compile's inductor makes it. One of `kbsub measure cell`."""

import torch
import torch.nn as nn


def layer_norm(x, gamma, beta, shape: tuple[int, ...], eps: float):
    return nn.functional.layer_norm(x, shape, gamma, beta, eps)


COMPILED = torch.compile(layer_norm)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return COMPILED(x, self.ln.weight, self.ln.bias, self.ln.normalized_shape, self.ln.eps)
