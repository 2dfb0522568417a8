"""Elementwise operations that a starter's kernel can be written with, each in torch, CUDA C++ and Triton.

Every formula is the one of the function's page in PyTorch's documentation; a NaN stays a NaN. Must not know what a task
is. Everything is computed in fp32: CUDA and Triton get floats, torch gets fp32 tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Operation:
    """One operation: {0}, {1}, {2} are its arguments. `parameters`: (name, default) of those behind the first."""

    torch: str
    cuda: str
    triton: str
    parameters: tuple[tuple[str, float | None], ...] = ()


def _same(text: str, *parameters: tuple[str, float | None]) -> Operation:
    return Operation(text, text, text, parameters)


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # as torch.nn.SELU's documentation gives them

BINARY = {"Add": _same("{0} + {1}"), "Sub": _same("{0} - {1}"), "Mult": _same("{0} * {1}"), "Div": _same("{0} / {1}")}

NEGATION = _same("-{0}")

# The power of a literal exponent; others are not elementwise steps here (a negative base needs care in Triton).
POWERS = {2.0: _same("{0} * {0}"), 3.0: _same("{0} * {0} * {0}"), 1.0: _same("{0}")}

UNARY = {
    "relu": Operation("torch.where({0} < 0, 0.0, {0})", "{0} < 0.0f ? 0.0f : {0}", "tl.where({0} < 0.0, 0.0, {0})"),
    "leaky_relu": Operation(
        "torch.where({0} < 0, {0} * {1}, {0})",
        "{0} < 0.0f ? {0} * {1} : {0}",
        "tl.where({0} < 0.0, {0} * {1}, {0})",
        (("negative_slope", 0.01),),
    ),
    "sigmoid": Operation("1 / (1 + torch.exp(-{0}))", "1.0f / (1.0f + expf(-{0}))", "1.0 / (1.0 + tl.exp(-{0}))"),
    "silu": Operation("{0} / (1 + torch.exp(-{0}))", "{0} / (1.0f + expf(-{0}))", "{0} / (1.0 + tl.exp(-{0}))"),
    "tanh": Operation("torch.tanh({0})", "tanhf({0})", "libdevice.tanh({0})"),
    "gelu": Operation(
        "0.5 * {0} * (1 + torch.erf({0} * 0.7071067811865476))",
        "0.5f * {0} * (1.0f + erff({0} * 0.70710678f))",
        "0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476))",
    ),
    "gelu_tanh": Operation(
        "0.5 * {0} * (1 + torch.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))",
        "0.5f * {0} * (1.0f + tanhf(0.79788456f * ({0} + 0.044715f * {0} * {0} * {0})))",
        "0.5 * {0} * (1.0 + libdevice.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0})))",
    ),
    "softplus": Operation(
        "torch.where({0} * {1} > {2}, {0}, torch.log1p(torch.exp({0} * {1})) / {1})",
        "{0} * {1} > {2} ? {0} : log1pf(expf({0} * {1})) / {1}",
        "tl.where({0} * {1} > {2}, {0}, libdevice.log1p(tl.exp({0} * {1})) / {1})",
        (("beta", 1.0), ("threshold", 20.0)),
    ),
    "mish": Operation(
        "{0} * torch.tanh(torch.log1p(torch.exp({0})))",
        "{0} * tanhf(log1pf(expf({0})))",
        "{0} * libdevice.tanh(libdevice.log1p(tl.exp({0})))",
    ),
    "elu": Operation(
        "torch.where({0} > 0, {0}, {1} * torch.expm1({0}))",
        "{0} > 0.0f ? {0} : {1} * expm1f({0})",
        "tl.where({0} > 0.0, {0}, {1} * libdevice.expm1({0}))",
        (("alpha", 1.0),),
    ),
    "selu": Operation(
        f"{_SELU_SCALE} * torch.where({{0}} > 0, {{0}}, {_SELU_ALPHA} * torch.expm1({{0}}))",
        f"{_SELU_SCALE}f * ({{0}} > 0.0f ? {{0}} : {_SELU_ALPHA}f * expm1f({{0}}))",
        f"{_SELU_SCALE} * tl.where({{0}} > 0.0, {{0}}, {_SELU_ALPHA} * libdevice.expm1({{0}}))",
    ),
    "hardsigmoid": Operation(
        "torch.where({0} < -3, 0.0, torch.where({0} > 3, 1.0, {0} / 6 + 0.5))",
        "{0} < -3.0f ? 0.0f : {0} > 3.0f ? 1.0f : {0} / 6.0f + 0.5f",
        "tl.where({0} < -3.0, 0.0, tl.where({0} > 3.0, 1.0, {0} / 6.0 + 0.5))",
    ),
    "hardswish": Operation(
        "torch.where({0} < -3, 0.0, torch.where({0} > 3, {0}, {0} * ({0} + 3) / 6))",
        "{0} < -3.0f ? 0.0f : {0} > 3.0f ? {0} : {0} * ({0} + 3.0f) / 6.0f",
        "tl.where({0} < -3.0, 0.0, tl.where({0} > 3.0, {0}, {0} * ({0} + 3.0) / 6.0))",
    ),
    "softsign": Operation("{0} / (1 + torch.abs({0}))", "{0} / (1.0f + fabsf({0}))", "{0} / (1.0 + tl.abs({0}))"),
    "abs": Operation("torch.abs({0})", "fabsf({0})", "tl.abs({0})"),
    "exp": Operation("torch.exp({0})", "expf({0})", "tl.exp({0})"),
    "log": Operation("torch.log({0})", "logf({0})", "tl.log({0})"),
    "sqrt": Operation("torch.sqrt({0})", "sqrtf({0})", "tl.sqrt({0})"),
    "square": _same("{0} * {0}"),
    "hardtanh": Operation(
        "torch.where({0} < {1}, {1}, torch.where({0} > {2}, {2}, {0}))",
        "{0} < {1} ? {1} : {0} > {2} ? {2} : {0}",
        "tl.where({0} < {1}, {1}, tl.where({0} > {2}, {2}, {0}))",
        (("min_val", -1.0), ("max_val", 1.0)),
    ),
    "at_least": Operation(
        "torch.where({0} < {1}, {1}, {0})",
        "{0} < {1} ? {1} : {0}",
        "tl.where({0} < {1}, {1}, {0})",
        (("min", None),),
    ),
    "at_most": Operation(
        "torch.where({0} > {1}, {1}, {0})",
        "{0} > {1} ? {1} : {0}",
        "tl.where({0} > {1}, {1}, {0})",
        (("max", None),),
    ),
}
UNARY["swish"] = UNARY["silu"]

# torch.nn module -> its operation; the module keeps the operation's parameters as attributes of the same names.
MODULES = {
    "ReLU": "relu",
    "LeakyReLU": "leaky_relu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
    "Tanh": "tanh",
    "GELU": "gelu",
    "Softplus": "softplus",
    "Mish": "mish",
    "ELU": "elu",
    "SELU": "selu",
    "Hardsigmoid": "hardsigmoid",
    "Hardswish": "hardswish",
    "Softsign": "softsign",
    "Hardtanh": "hardtanh",
    "ReLU6": "hardtanh",
}
# torch.add(x, y) and the like.
FUNCTIONS_OF_TWO = {
    "add": "Add",
    "sub": "Sub",
    "subtract": "Sub",
    "mul": "Mult",
    "multiply": "Mult",
    "div": "Div",
    "divide": "Div",
}
