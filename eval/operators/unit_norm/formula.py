"""x / norm(x) along dimension 1, written out in float64; the norm is one of three. Knows no candidate and no order."""

from __future__ import annotations

import enum
import math

import torch

from kbsub.eval.operators.compare.oracle import CHUNK_ELEMENTS, FLOAT32_MAX, OracleError, Truth

DIM = 1
PROBE = (2, 3, 4)  # of the input on which a Model is compared with the formula


class Norm(enum.Enum):
    """What x is divided by."""

    RMS = "sqrt(mean(x ** 2) + eps)"
    L2 = "sqrt(sum(x ** 2))"
    MEAN_ABS = "mean(|x|)"


def divisor(x: torch.Tensor, norm: Norm, eps: float) -> torch.Tensor:
    """The norm of x (batch, n, *) along dimension 1, kept as a one, float64. eps counts for RMS alone."""
    wide = x.double()
    if norm is Norm.MEAN_ABS:
        return wide.abs().mean(DIM, keepdim=True)
    squares = (wide * wide).sum(DIM, keepdim=True)
    return (squares / x.shape[DIM] + eps).sqrt() if norm is Norm.RMS else squares.sqrt()


def unit_norm(x: torch.Tensor, norm: Norm, eps: float = 0.0) -> Truth:
    """The float64 answer for x (batch, n, *), any float dtype. Zeros with eps = 0 are 0/0, NaN, as in the formula."""
    if x.dim() <= DIM:
        raise OracleError(f"input of shape {tuple(x.shape)} has no dimension {DIM} to normalise")
    y = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    step = max(1, CHUNK_ELEMENTS // max(1, math.prod(x.shape[1:])))
    largest = 0.0  # of the reciprocals
    for start in range(0, x.shape[0], step):
        block = x[start : start + step]
        by = divisor(block, norm, eps)
        y[start : start + step] = block.double() / by
        finite = (1.0 / by)[by > 0]
        if finite.numel():
            largest = max(largest, float(finite.max()))
    rows = x.numel() // x.shape[DIM] if x.shape[DIM] else 0
    return Truth(y, None, True, rows=rows, rstd_max=largest, rstd_overflows=largest > FLOAT32_MAX)


def eps_of(model: torch.nn.Module, norm: Norm) -> float:
    """The eps of a Model that declares `norm`. OracleError where the Model is not that formula and nothing else."""
    eps = vars(model).get("eps", 0.0)
    if any(True for _ in model.parameters()) or not isinstance(eps, float):
        raise OracleError(f"the Model is not x / ({norm.value}): it has parameters, or an eps that is no number")
    if norm is Norm.RMS and "eps" not in vars(model):
        raise OracleError(f"the Model is not x / ({norm.value}): it has no eps")
    x = torch.randn(PROBE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        got = type(model).forward(model, x)
    if not isinstance(got, torch.Tensor) or not torch.allclose(got, x / divisor(x, norm, eps), rtol=1e-12, atol=0):
        raise OracleError(f"the task declares x / ({norm.value}) along dimension {DIM}, but its Model computes another")
    return float(eps)
