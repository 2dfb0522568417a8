"""LayerNorm of CPU tensors in the order of PyTorch's CUDA kernel, by the NumPy model of order.py.

A kernel that the host executor runs is compared with it: the CPU's own native LayerNorm adds in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kbsub.eval.operators.layer_norm import order


def with_statistics(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y of x's shape and dtype, mean and rstd (rows,) fp32. x (rows, ...), weight and bias of one row.

    rsqrt is correctly rounded here. ValueError for a width that PyTorch does not send down its vectorised path.
    """
    n = weight.numel()
    gamma, beta = (_array(each.reshape(-1)) for each in (weight, bias))
    found = order.layer_norm(_array(x.reshape(-1, n)), gamma, beta, eps)
    y = torch.from_numpy(found.y.view(np.int16) if x.dtype == torch.bfloat16 else found.y)
    return y.view(x.dtype).reshape(x.shape), torch.from_numpy(found.mean), torch.from_numpy(found.rstd)


def in_cuda_order(layer: torch.nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    """`layer(x)` in that order; natively where PyTorch would not use that kernel."""
    width = layer.weight.numel()
    if width % order.VECTOR or width > order.MAX_WIDTH or not x.numel():
        with torch.no_grad():
            native: torch.Tensor = torch.nn.LayerNorm.forward(layer, x)
        return native
    return with_statistics(x, layer.weight, layer.bias, layer.eps)[0]


def _array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()
