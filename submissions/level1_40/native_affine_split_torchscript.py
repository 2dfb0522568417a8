"""`native_affine_split.py` traced by TorchScript, whose fuser makes one kernel of product and sum.

Contract: tolerance, as the rung below it. The fuser may contract the product and the sum into one
rounding or not; either is within the last bit or two of native.

From `native_affine_split.py`: one trip through memory less. Traced on the first call and again when device, dtype,
shape, strides, a parameter's storage or eps changes, and run until the fuser is done: the run before it rounds
otherwise.

Inference only. The experiment this restates is public: see README.md.
"""

import torch
from torch import nn
from torch.nn import functional as F

UNFUSED_RUNS = 1  # of a fresh trace: the executor profiles it, and fuses before the next


class AffineSplit(nn.Module):
    """The state of nn.LayerNorm (weight ones, bias zeros, eps); gamma and beta applied outside it."""

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
        return F.layer_norm(x, self.normalized_shape, None, None, self.eps) * self.weight + self.bias


def require_supported(x: torch.Tensor, ln: AffineSplit):
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
        self.ln = AffineSplit(normalized_shape, eps)
        self.traced = (None, None)  # key, traced ln: in a tuple, so that it is no submodule and not in the state dict

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, *normalized_shape), float of any width, any device -> the same shape and dtype."""
        require_supported(x, self.ln)
        ln = self.ln
        parameters = (ln.weight.data_ptr(), ln.weight.stride(), ln.bias.data_ptr(), ln.bias.stride())
        key = (x.device, x.dtype, x.shape, x.stride(), parameters, ln.eps)  # eps is a constant of the trace
        if self.traced[0] != key:
            traced = torch.jit.trace(ln, (x,), check_trace=False)
            for _ in range(UNFUSED_RUNS):
                traced(x)
            self.traced = (key, traced)
        return self.traced[1](x)
