"""The task's own program, traced by TorchScript, whose fuser makes one kernel of what surrounds the reduction.

Contract: tolerance. The reduction is eager's own; the fused kernels round elsewhere in half precision, where eager
stores every step. Nothing is traced in the constructor: the harness moves the model afterwards.

Inference only. The experiment this restates is public: see README.md.
"""

import torch
from torch import nn

UNFUSED_RUNS = 3  # the fuser's work is done after these; what they return is rounded otherwise, and is not handed out


class Formula(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) over dimension 1."""

    def __init__(self, eps: float):
        super().__init__()
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + self.eps)


def require_supported(x: torch.Tensor):
    """Raises ValueError, naming the tensor and the rule; what torch's own operators take is taken."""
    if x.layout != torch.strided or x.is_nested:  # before anything else: not all of them have a shape
        raise ValueError(f"x: {'nested' if x.is_nested else x.layout}, must be an ordinary (strided) tensor")
    if x.dim() < 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, must be (batch, channels, *)")
    if not x.is_floating_point():
        raise ValueError(f"x: dtype {x.dtype}, must be a floating-point one")


class ModelNew(nn.Module):
    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        if not (isinstance(num_features, int) and 0 < num_features < 2**31):
            raise RuntimeError(f"num_features: {num_features!r} must be a positive integer below 2^31")
        self.num_features = num_features  # as in the reference, which never looks at it
        self.eps = eps
        self.traced = (None, None)  # key, traced formula

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, channels, *), float of any width, any device -> the same shape and dtype."""
        require_supported(x)
        key = (x.device, x.dtype, x.shape, x.stride(), self.eps)  # eps is a constant of the trace
        if self.traced[0] != key:
            traced = torch.jit.trace(Formula(self.eps), (x,), check_trace=False)
            for _ in range(UNFUSED_RUNS):
                traced(x)
            self.traced = (key, traced)
        return self.traced[1](x)
