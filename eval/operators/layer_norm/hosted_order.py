"""Native's order on CUDA for CPU tensors, by eval.contract: the reference of a kernel that the host executor runs."""

from __future__ import annotations

from typing import Any

import torch

from kbsub.eval.operators.layer_norm import order as contract


def modelled_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, mean, rstd of eval.contract, the NumPy model of native's order on CUDA (its rsqrt correctly rounded)."""

    def rows(tensor: torch.Tensor, *shape: int) -> Any:
        flat = tensor.detach().reshape(shape)
        return flat.view(torch.uint16).numpy() if flat.dtype == torch.bfloat16 else flat.numpy()

    n = weight.numel()
    found = contract.layer_norm(rows(x, x.shape[0], n), rows(weight, n), rows(bias, n), eps)
    y = torch.from_numpy(found.y)
    y = y.view(torch.bfloat16) if x.dtype == torch.bfloat16 else y
    return y.view(x.shape), torch.from_numpy(found.mean), torch.from_numpy(found.rstd)
