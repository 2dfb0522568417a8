"""LayerNorm written out in float64, two passes, with the mean corrected once: never torch's layer_norm, whose order of
operations is what is being judged. Memory: about 0.3 GiB of chunks beside the answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from kbsub.eval.operators.compare.oracle import CHUNK_ELEMENTS, FLOAT32_MAX, OracleError, Truth


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    normalized_shape: Sequence[int],
) -> Truth:
    """y = (x - mean) / sqrt(var + eps) * gamma + beta in float64, var the biased variance of each row.

    x: (*, *normalized_shape), any float dtype; weight, bias: normalized_shape or None; eps >= 0. Its error is a few
    float64 roundings: mean and variance are taken twice, the second time about the first mean.
    A zero-variance row with eps = 0 is 0/0, NaN, as in the formula.
    """
    width = math.prod(normalized_shape)
    if tuple(x.shape[x.dim() - len(normalized_shape) :]) != tuple(normalized_shape):
        raise OracleError(f"input of shape {tuple(x.shape)} does not end in normalized_shape {tuple(normalized_shape)}")
    rows = x.numel() // width if width else 0
    flat = x.reshape(rows, width)
    y = torch.empty(rows, width, dtype=torch.float64, device=x.device)
    gamma = None if weight is None else weight.detach().reshape(width).double()
    beta = None if bias is None else bias.detach().reshape(width).double()
    rstd_max = 0.0
    for block in _row_blocks(rows, width):
        mean = _mean(flat[block], width)
        variance = _variance(flat[block], mean, width)
        rstd = 1.0 / (variance + eps).sqrt()
        finite = rstd[rstd.isfinite()]
        if finite.numel():
            rstd_max = max(rstd_max, float(finite.max()))
        for columns in _column_blocks(block, width):
            z = (flat[block, columns].double() - mean) * rstd
            if gamma is not None:
                z *= gamma[columns]
            if beta is not None:
                z += beta[columns]
            y[block, columns] = z
    overflows = rstd_max > FLOAT32_MAX
    return Truth(y.reshape(x.shape), beta, True, rows=rows, rstd_max=rstd_max, rstd_overflows=overflows)


def _row_blocks(rows: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def _column_blocks(block: slice, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, block.stop - block.start))
    for start in range(0, width, step):
        yield slice(start, min(width, start + step))


def _sum(rows: torch.Tensor, mean: torch.Tensor | None, power: int) -> torch.Tensor:
    """Sum over each row of (x - mean) ** power in float64, as a column; rows: (r, width)."""
    total = torch.zeros(rows.shape[0], 1, dtype=torch.float64, device=rows.device)
    for columns in _column_blocks(slice(0, rows.shape[0]), rows.shape[1]):
        part = rows[:, columns].double()
        if mean is not None:
            part = part - mean
        total += (part * part if power == 2 else part).sum(dim=1, keepdim=True)
    return total


def _mean(rows: torch.Tensor, width: int) -> torch.Tensor:
    mean = _sum(rows, None, 1) / width
    # The second look removes the rounding of the first sum; a row with an infinity stays what it is.
    correction = _sum(rows, mean, 1) / width
    return torch.where(correction.isfinite(), mean + correction, mean)


def _variance(rows: torch.Tensor, mean: torch.Tensor, width: int) -> torch.Tensor:
    return _sum(rows, mean, 2) / width


def layer_norm_of(model: torch.nn.Module) -> torch.nn.LayerNorm | None:
    """The LayerNorm that is all there is in this model, else None (the model then answers for itself)."""
    leaves = [module for module in model.modules() if next(module.children(), None) is None]
    if len(leaves) != 1 or not isinstance(leaves[0], torch.nn.LayerNorm):
        return None
    own = {id(each) for each in (*leaves[0].parameters(), *leaves[0].buffers())}
    everything = {id(each) for each in (*model.parameters(), *model.buffers())}
    return leaves[0] if own == everything else None
