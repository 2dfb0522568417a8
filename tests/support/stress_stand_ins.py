"""Candidates for the tests of the stress suite: one that is right, and for each kind of wrongness one that is not.

Each is the body of `forward`, with x, weight, bias, eps (float), and the helpers of HEAD at hand; `self.state` is a
dict that lives as long as the model. All compute on the CPU.
"""

from __future__ import annotations

HEAD = '''
import math
import torch


class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape, eps=eps)
        self.state = {}

    def rows(self, x):
        return x.reshape(-1, self.ln.weight.numel())

    def exact(self, x, unbiased=False, eps=None, dtype=torch.float64):
        """The formula in `dtype`, two looks at x."""
        x, layer = x.to(dtype), self.ln
        dims = tuple(range(x.dim() - len(layer.normalized_shape), x.dim()))
        mean = x.mean(dims, keepdim=True)
        mean = mean + torch.nan_to_num((x - mean).mean(dims, keepdim=True), nan=0.0)
        d = x - mean
        width = layer.weight.numel()
        var = (d * d).sum(dims, keepdim=True) / (width - 1 if unbiased else width)
        z = d / torch.sqrt(var + (layer.eps if eps is None else eps))
        return (z * layer.weight.to(dtype) + layer.bias.to(dtype)).float()

    def forward(self, x):
        layer, state = self.ln, self.state
        if x.dtype != torch.float32:
            raise ValueError(f"x: dtype {x.dtype}, must be float32")
'''

RIGHT = "return self.exact(x)"
NATIVE = "return layer(x)"

# name: (body of forward, the case that must not pass it)
WRONG = {
    "ignores gamma and beta": (
        "return torch.nn.functional.layer_norm(x, layer.normalized_shape, eps=layer.eps)",
        "normal/random/eps1e-05",
    ),
    "ignores gamma": (
        "return torch.nn.functional.layer_norm(x, layer.normalized_shape, None, layer.bias, layer.eps)",
        "normal/zero_gamma/eps1e-05",
    ),
    "keeps its own eps": ("return self.exact(x, eps=1e-5)", "subnormal/random/eps0"),
    "drops eps": ("return self.exact(x, eps=0.0)", "zero/random/eps1e-05"),
    "unbiased variance": ("return self.exact(x, unbiased=True)", "handed/width_4_noise_around_2000"),
    "one-pass variance": (
        "r = self.rows(x); mean = r.mean(1, keepdim=True); var = (r * r).mean(1, keepdim=True) - mean * mean\n"
        "z = (r - mean) / torch.sqrt(var.clamp(min=0) + layer.eps)\n"
        "return (z.reshape(x.shape) * layer.weight + layer.bias)",
        "handed/wide_row_std_0.01_around_100",
    ),
    "hard-coded statistics": (
        "return ((x - 0.5) * math.sqrt(12.0)) * layer.weight + layer.bias",
        "x100/initial/eps1e-05",
    ),
    "fp16 inside": ("return layer(x.half().float())", "+1000/random/eps1e-05"),
    "fp16 squares": (
        "r = self.rows(x); d = (r - r.mean(1, keepdim=True)).half()\n"
        "var = (d * d).float().mean(1, keepdim=True)\n"
        "return (d.float() * torch.rsqrt(var + layer.eps)).reshape(x.shape) * layer.weight + layer.bias",
        "handed/values_above_1e4",
    ),
    "changes its input": ("y = self.exact(x); x.mul_(1.0001); return y", "normal/random/eps1e-05"),
    "answers by address": (
        "key = x.data_ptr()\nif key not in state: state.clear(); state[key] = self.exact(x)\nreturn state[key]",
        "after_1000_calls/normal/random",
    ),
    "first answer replayed for a shape": (
        "return state.setdefault(x.shape, self.exact(x))",
        "after_1000_calls/normal/random",
    ),
    "another answer on the second call": (
        "state['n'] = state.get('n', 0) + 1\nreturn self.exact(x) * (1 + 1e-6 * (state['n'] % 2))",
        "run_twice/normal/random",
    ),
    "wrong from call 500": (
        "state['n'] = state.get('n', 0) + 1\nreturn self.exact(x) + (state['n'] > 500)",
        "after_1000_calls/normal/random",
    ),
    "a ring of buffers for its answers": (
        "state['n'] = state.get('n', 0) + 1\nring = state.setdefault('ring', [torch.empty(0) for _ in range(64)])\n"
        "at = state['n'] % 64\nring[at] = ring[at] if ring[at].shape == x.shape else torch.empty(x.shape)\n"
        "return ring[at].copy_(self.exact(x))",
        "after_1000_calls/normal/random",
    ),
    "one NaN spoils all rows": (
        "return self.exact(x) + 0 * x.isnan().any() * x.reshape(-1)[0] + 1e-7 * x.isnan().any()",
        "one_nan/random/eps1e-05",
    ),
    "one Inf spoils other rows": (
        "return self.exact(x) + 1e-6 * x.isinf().any()",
        "handed/one_inf_leaves_other_rows",
    ),
    "hides a NaN": ("return torch.nan_to_num(self.exact(x))", "one_nan/random/eps1e-05"),
    "statistics over the batch": (
        "return (x - x.mean()) / torch.sqrt(x.var(unbiased=False) + layer.eps) * layer.weight + layer.bias",
        "ramp/random/eps1e-05 handed/row_alone",
    ),
    "another answer for one row": (
        "return self.exact(x) + (0.01 if x.shape[0] == 1 else 0.0)",
        "handed/row_alone",
    ),
    "reads a layout as contiguous": (
        "return self.exact(torch.as_strided(x, x.shape, torch.empty(x.shape, device='meta').stride()))",
        "layout_transposed/normal/random",
    ),
    "reads a stride as 1": (
        "return self.exact(torch.as_strided(x, x.shape, torch.empty(x.shape, device='meta').stride()))",
        "layout_strided/normal/random",
    ),
    "rounds addresses down": (
        "return self.exact(torch.as_strided(x, x.shape, x.stride(), x.storage_offset() // 4 * 4))",
        "handed/x_one_element_in",
    ),
    "rounds gamma's address down": (
        "w = layer.weight\nlow = torch.as_strided(w, w.shape, w.stride(), w.storage_offset() // 4 * 4)\n"
        "return torch.nn.functional.layer_norm(x, layer.normalized_shape, low, layer.bias, layer.eps)",
        "handed/gamma_one_element_in",
    ),
    "a RuntimeError for a layout": (
        "if not x.is_contiguous(): raise RuntimeError('view size is not compatible')\nreturn self.exact(x)",
        "layout_strided/normal/random",
    ),
    "a ValueError without a word": (
        "if not x.is_contiguous(): raise ValueError()\nreturn self.exact(x)",
        "layout_strided/normal/random",
    ),
    "refuses the task's own shape": ("raise ValueError('x: not today')", "normal/random/eps1e-05"),
    "grid limit of 65,535 rows": (
        "y = self.exact(x); y[65535:] = 0; return y",
        "handed/65536_rows handed/65537_rows",
    ),
    "loses the last of 65,535 rows": ("y = self.exact(x); y[65534:] = 0; return y", "handed/65535_rows"),
    "only whole vectors of four": (
        "r = self.rows(x); n = r.shape[1] // 4 * 4; y = self.exact(x).reshape(r.shape).clone(); y[:, n:] = 0\n"
        "return y.reshape(x.shape)",
        "handed/width_3_mean_1000 handed/width_17_mean_1000 handed/width_1023_mean_1000",
    ),
    "only whole blocks of 1,024": (
        "r = self.rows(x); n = r.shape[1] // 1024 * 1024; y = self.exact(x).reshape(r.shape).clone(); y[:, n:] = 0\n"
        "return y.reshape(x.shape)",
        "handed/width_1500_mean_1000",
    ),
    "an empty launch fails": (
        "if not x.numel(): raise RuntimeError('invalid configuration argument')\nreturn self.exact(x)",
        "handed/zero_batch",
    ),
    "an empty batch of another shape": (
        "return self.exact(x) if x.numel() else torch.empty(0)",
        "handed/zero_batch",
    ),
    "noise on a constant row": ("return self.exact(x) + 1e-6", "handed/constant_row_is_beta"),
    "eps below what fp32 variance adds": (
        "return self.exact(x) + 1e-6 * (layer.eps < 1e-9)",
        "handed/zero_variance_eps_1e-12",
    ),
    "no tensor": ("return None", "normal/random/eps1e-05"),
    "another dtype": ("return self.exact(x).double()", "normal/random/eps1e-05"),
}


def source(body: str) -> str:
    """A ModelNew whose forward is `body`."""
    return HEAD + "".join(f"        {line}\n" for line in body.splitlines())
