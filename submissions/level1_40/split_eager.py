"""Statistics by `torch.var_mean`, everything else by elementwise operators: the obvious way to many blocks a row.

Contract: control. `var_mean` splits a row over many blocks and adds up in another order than native, nearer the true
value. The official uniform input is within 1e-4; on inputs far from zero (+1000) native's own error is larger than
the tolerance, so this fails there, and is declared to.

From `native_affine_split.py`: the statistics leave the one block a row that native gives them.

Inference only. The experiment this restates is public: see README.md.
"""

import torch
from torch import nn


class SplitLayerNorm(nn.Module):
    """The state of nn.LayerNorm (weight ones, bias zeros, eps); statistics apart from the rest."""

    def __init__(self, normalized_shape, eps: float):
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if not (isinstance(sizes, (tuple, list)) and sizes and all(isinstance(n, int) and n > 0 for n in sizes)):
            raise RuntimeError(f"normalized_shape: {normalized_shape!r} must be one or more positive integers")
        self.normalized_shape = tuple(sizes)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dims = tuple(range(1, x.dim()))
        var, mean = torch.var_mean(x, dim=dims, unbiased=False, keepdim=True)
        return ((x - mean) * torch.rsqrt(var + self.eps)) * self.weight + self.bias


def require_supported(x: torch.Tensor, ln: SplitLayerNorm):
    """Raises ValueError, naming the tensor and the rule; what torch's own operators take is taken."""
    if ln.weight is None or ln.bias is None:
        raise ValueError("weight, bias: both must be present (an affine layer norm)")
    sizes = tuple(ln.normalized_shape)  # a list where somebody has replaced it
    for name, tensor in (("x", x), ("weight", ln.weight), ("bias", ln.bias)):
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
    if tuple(x.shape[1:]) != sizes:
        raise ValueError(f"x: shape {tuple(x.shape)} must be (rows, *{sizes})")
    for name, tensor in (("weight", ln.weight), ("bias", ln.bias)):
        if tensor.device != x.device or tensor.dtype != x.dtype:
            have, want = (tensor.device, tensor.dtype), (x.device, x.dtype)
            raise ValueError(f"{name}: on {have[0]} as {have[1]}, must be like x: on {want[0]} as {want[1]}")


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = SplitLayerNorm(normalized_shape, eps)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, *normalized_shape), float of any width, any device -> the same shape and dtype."""
        require_supported(x, self.ln)
        return self.ln(x)
