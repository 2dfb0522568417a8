"""What the transport must not change: layer normalisation, its statistics, and outputs of every kind."""

import torch
import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)
        self.calls = 0

    def forward(self, x):
        return self.ln(x)

    def forward_with_stats(self, x):
        return self.ln(x), x.mean(-1), {"rstd": x.var(-1).rsqrt(), "n": 8, "half": 0.5, "none": None, "ok": True}

    def grad_mode(self, x):
        return torch.is_grad_enabled()

    def transposed(self, x):
        return x.transpose(0, 1).contiguous().transpose(0, 1), x.expand(3, *x.shape), x.double(), x.to_sparse(), x[:0]

    def view_of_input(self, x):
        return x[1:]

    def writes_input(self, x, y):
        y.add_(1)
        return x.clone()

    def refuses(self, x):
        raise ValueError(f"x: {tuple(x.shape)}, must be of\n8 dimensions")

    def errs(self, x):
        raise RuntimeError("\x1b[31m no \ud800 good\n::error::x" + "x" * 100_000)

    def no_memory(self, x):
        raise MemoryError("none left")

    def leaves(self, x):
        raise SystemExit(0)

    def addresses(self, x):
        return x.data_ptr() % 256, self.ln.weight.data_ptr() % 256, list(self.ln.weight.stride())

    def deep(self, x):
        value = x
        for _ in range(40):
            value = [value]
        return value

    def strange(self, x):
        return object()
