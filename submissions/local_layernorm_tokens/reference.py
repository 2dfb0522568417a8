"""LayerNorm over the hidden dimension of a batch of tokens, with learned gamma and beta, in KernelBench's format."""

import torch
from torch import nn


class Model(nn.Module):
    """x (tokens, hidden) -> y (tokens, hidden): each token normalised over its hidden elements."""

    def __init__(self, hidden: int):
        super().__init__()
        self.ln = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ln(x)


tokens = 4096
hidden = 512


def get_inputs():
    return [torch.randn(tokens, hidden)]


def get_init_inputs():
    return [hidden]
