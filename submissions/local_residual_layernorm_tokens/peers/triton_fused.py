"""Residual and LayerNorm as one Triton kernel, a program a row, written here: a good first version in Triton.

x and the residual are read once into a block of a power of two of elements; mean, then variance about it, then the
output, in fp32.
Triton compiles from a file, and the text of a candidate has none: the kernel goes into a temporary file and is imported
from there on the first forward. Needs triton (it comes with torch on CUDA machines).
"""

import functools
import hashlib
import importlib.util
import pathlib
import tempfile

import torch
from torch import nn

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def residual_layer_norm(x, residual, gamma, beta, y, n, eps, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * n
    at = tl.arange(0, BLOCK)
    inside = at < n
    v = tl.load(x + start + at, mask=inside, other=0.0) + tl.load(residual + start + at, mask=inside, other=0.0)
    v = v.to(tl.float32)  # of a sum in the tensors' own type, as eager stores it
    mean = tl.sum(v, axis=0) / n
    d = tl.where(inside, v - mean, 0.0)
    rstd = 1 / tl.sqrt(tl.sum(d * d, axis=0) / n + eps)
    g = tl.load(gamma + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + start + at, d * rstd * g + b, mask=inside)
"""


@functools.lru_cache(maxsize=None)
def triton_module():
    """The kernel's module. Raises ImportError where triton is not installed."""
    import triton

    digest = hashlib.sha256((KERNEL + triton.__version__).encode()).hexdigest()[:16]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="kbsub-triton-"))
    path = folder / f"residual_layer_norm_{digest}.py"
    path.write_text(KERNEL)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Parameters(nn.Module):
    """What nn.LayerNorm holds: weight (ones), bias (zeros), eps."""

    def __init__(self, normalized_shape, eps: float):
        super().__init__()
        self.normalized_shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = Parameters(normalized_shape, eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual (..., hidden) -> y of that shape and dtype."""
        kernel = triton_module().residual_layer_norm
        n = self.ln.weight.numel()
        rows = x.numel() // n
        y = torch.empty_like(x)
        if rows:
            block = 1 << (n - 1).bit_length()
            warps = min(max(block // 256, 1), 16)
            arguments = (x, residual, self.ln.weight, self.ln.bias, y, n, self.ln.eps)
            kernel[(rows,)](*arguments, BLOCK=block, num_warps=warps)
        return y
