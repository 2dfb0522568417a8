"""LayerNorm in two Triton kernels: sums of slices of a row, then the row. One of `kbsub measure cell`."""

import importlib.util
import os
import tempfile

import torch
import torch.nn as nn

SLICES, BLOCK = 256, 1024

# Triton reads its kernels' text from a file, which a program that is exec'd does not have.
KERNELS = """
import triton
import triton.language as tl


@triton.jit
def slice_sums(x, sums, width, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    lanes = tl.arange(0, BLOCK)
    s = tl.zeros((BLOCK,), tl.float32)
    q = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * BLOCK, width, SLICES * BLOCK):
        v = tl.load(x + row.to(tl.int64) * width + start + lanes, mask=start + lanes < width, other=0.0)
        s += v
        q += v * v
    tl.store(sums + (row * SLICES + part) * 2, tl.sum(s.to(tl.float64), axis=0))
    tl.store(sums + (row * SLICES + part) * 2 + 1, tl.sum(q.to(tl.float64), axis=0))


@triton.jit
def normalise(x, gamma, beta, sums, y, width, eps, SLICES: tl.constexpr, BLOCK: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1)
    lanes, slices = tl.arange(0, BLOCK), tl.arange(0, SLICES)
    mean = tl.sum(tl.load(sums + (row * SLICES + slices) * 2), axis=0) / width
    square = tl.sum(tl.load(sums + (row * SLICES + slices) * 2 + 1), axis=0) / width
    rstd = 1.0 / tl.sqrt((square - mean * mean).to(tl.float32) + eps)
    m = mean.to(tl.float32)
    for start in range(part * BLOCK, width, SLICES * BLOCK):
        here = start + lanes
        inside = here < width
        v = tl.load(x + row.to(tl.int64) * width + here, mask=inside)
        g, b = tl.load(gamma + here, mask=inside), tl.load(beta + here, mask=inside)
        tl.store(y + row.to(tl.int64) * width + here, (v - m) * rstd * g + b, mask=inside)
"""
PATH = os.path.join(tempfile.mkdtemp(), "cell_triton_kernels.py")
with open(PATH, "w") as file:
    file.write(KERNELS)
SPEC = importlib.util.spec_from_file_location("cell_triton_kernels", PATH)
MODULE = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(MODULE)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        y = torch.empty_like(x)
        gamma, beta = self.ln.weight, self.ln.bias
        width = gamma.numel()
        rows = x.numel() // width
        sums = torch.empty(rows, SLICES, 2, dtype=torch.float64, device=x.device)
        MODULE.slice_sums[(SLICES, rows)](x, sums, width, SLICES, BLOCK)
        MODULE.normalise[(SLICES, rows)](x, gamma, beta, sums, y, width, self.ln.eps, SLICES, BLOCK)
        return y
