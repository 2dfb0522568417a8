"""x / norm(x) of CPU tensors in the order of PyTorch's CUDA kernels, by the NumPy model of reduction_order.py.

A kernel that the host executor runs is compared with it: the CPU's own operators add in another order.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from kbsub.eval.operators import reduction_order as order
from kbsub.eval.operators.unit_norm.formula import Norm


def in_cuda_order(x: torch.Tensor, norm: Norm, eps: float, trees: order.Trees, device: order.Device) -> torch.Tensor:
    """y of x's shape and dtype, x (batch, n, *) contiguous: eager's steps, rounded to the dtype where it is stored.

    trees, device: of the torch and the GPU that are modelled; they matter where the channels are the fastest dimension.
    """
    batch, n, plane = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    if not x.numel():
        return torch.empty_like(x)

    def stored(values: Any) -> Any:
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(x.dtype).float().numpy()

    wide = x.detach().contiguous().float().numpy().reshape(batch, n, plane)
    share = np.float32(batch * plane) / np.float32(x.numel())
    vector = (
        8 if x.element_size() == 2 and norm is not Norm.L2 else order.VECTOR
    )  # of a mean; as 2.11 and later have it
    how = order.plan(batch * plane, n, plane == 1, plane, device, vector)
    with np.errstate(all="ignore"):
        if norm is Norm.L2:  # one kernel, which reads x itself
            first = x.data_ptr() // x.element_size()
            total = order.reduce(_rows(wide), how, trees, order.add_square, first)
            by = stored(np.sqrt(total))
        else:
            terms = stored(wide * wide) if norm is Norm.RMS else np.abs(wide)
            by = stored(order.reduce(_rows(terms), how, trees) * share)
            if norm is Norm.RMS:
                by = stored(np.sqrt(stored(by + np.float32(eps))))
        y = (wide / by.reshape(batch, 1, plane)).astype(np.float32)
    return torch.from_numpy(y).to(x.dtype).reshape(x.shape)


def _rows(values: Any) -> Any:
    """(batch, n, plane) -> (batch * plane, n), contiguous."""
    return np.ascontiguousarray(values.transpose(0, 2, 1).reshape(-1, values.shape[1]), np.float32)
