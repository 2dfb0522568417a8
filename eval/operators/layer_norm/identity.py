"""The bit-identity cases of a task that is one LayerNorm, with native's own output, mean and rstd.

The cases of identity_cases.py are level 1 problem 40's. Another task gets its own shape and inputs as the full-size
group, and the rest with rows of a single dimension where its constructor takes one number. Must not know candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kbsub.adapters.task import Modules
from kbsub.eval.operators.identity import SECRET, SECRET_INPUTS, IdentitySuite, Outputs, Question, Setting
from kbsub.eval.operators.layer_norm.identity_cases import (
    GROUPS,
    INPUTS,
    OFFICIAL,
    OFFICIAL_SHAPE,
    REPEAT_SEED,
    Group,
    Shape,
    Step,
    count,
    mutation_of,
    own_groups,
    steps,
)
from kbsub.eval.operators.layer_norm.on_cpu import with_statistics


@dataclass(frozen=True)
class _Affine:
    """The parameters of one group: changed in place, and handed out under the names of the Model's state dict."""

    weight: torch.Tensor
    bias: torch.Tensor

    def set(self, kind: str) -> None:
        """(1, 0), or with "random" a draw in fp32 on the device, weight first, then bias."""
        if kind == "random":
            self.weight.copy_(torch.empty(self.weight.shape, device=self.weight.device).normal_())
            self.bias.copy_(torch.empty(self.bias.shape, device=self.bias.device).normal_())
        else:
            self.weight.fill_(1)
            self.bias.zero_()


class LayerNormCases(IdentitySuite):
    """modules: the task's; layer: its Model's LayerNorm, `path` its place there ("ln")."""

    method = "forward_with_stats"
    statistics = ("mean", "rstd")

    def __init__(self, modules: Modules, layer: torch.nn.LayerNorm, path: str, shape: Shape) -> None:
        self.modules, self.shape = modules, shape
        self.eps = layer.eps
        self.prefix = f"{path}." if path else ""
        self.init_inputs = modules.get_init_inputs()
        self.leading = len(shape) - len(layer.normalized_shape)
        if shape == OFFICIAL_SHAPE and self.leading == 1:
            self.groups = GROUPS
        else:
            self.groups = own_groups(shape, self.leading, self._flat, self._resizable(layer), self.eps)

    @property
    def _flat(self) -> bool:
        """Whether ModelNew takes the number of elements of a row, not their shape."""
        return len(self.init_inputs) == 1 and isinstance(self.init_inputs[0], int)

    def _resizable(self, layer: torch.nn.LayerNorm) -> bool:
        """Whether the constructor takes the row's shape and nothing else, so that other rows can be asked for."""
        own = tuple(layer.normalized_shape)
        return len(self.init_inputs) == 1 and self.init_inputs[0] in (own, list(own), *(own if len(own) == 1 else ()))

    def count(self, setting: Setting) -> int:
        return count(self.groups, setting.contract)

    def questions(self, setting: Setting) -> Iterator[Question]:
        for group in self.groups:
            yield from self._group(setting, group)

    def secret(self, setting: Setting, seed: int) -> Iterator[Question]:
        first = replace(self.groups[0], name=SECRET, eps=(self.eps,))
        asked = [("default", first.inputs[0]), *(("random", name) for name in SECRET_INPUTS)]
        for at, (affine, name) in enumerate(asked):
            yield from self._group(setting, replace(first, seeds=(seed + at,), affines=(affine,), inputs=(name,)))

    def _group(self, setting: Setting, group: Group) -> Iterator[Question]:
        shape = self._shape(setting, group)
        init, affine = self._init(shape), self._affine(setting, shape)
        for step in steps(group, setting.contract):
            if step.first_of_seed:
                torch.manual_seed(step.seed)
            if step.draw_affine:
                affine.set(step.affine)
            x = self._draw(setting, step.input, shape)
            for eps in group.eps:
                yield self._question(setting, _label(step, shape, eps), init, affine, x, eps)

    def timed(self, setting: Setting, with_state: bool) -> Question:
        group = self.groups[0]
        shape = self._shape(setting, group)
        affine = self._affine(setting, shape)
        torch.manual_seed(REPEAT_SEED)
        x = self._draw(setting, group.inputs[0], shape)
        kind = "random" if with_state else "default"
        affine.set(kind)
        label = {
            "shape": list(shape),
            "seed": REPEAT_SEED,
            "input": group.inputs[0],
            "affine": kind,
            "eps": self.eps,
        }
        return self._question(setting, label, self._init(shape), affine, x, self.eps)

    def change(self, setting: Setting, question: Question) -> dict[str, Any]:
        mutation = mutation_of(setting.contract)
        question.inputs[0].mul_(mutation.x)
        if question.needs_state:
            question.state[f"{self.prefix}weight"].mul_(mutation.weight)
            question.state[f"{self.prefix}bias"].add_(mutation.bias)
        return dict(vars(mutation))

    def _question(
        self, setting: Setting, label: dict[str, Any], init: list[Any], affine: _Affine, x: torch.Tensor, eps: float
    ) -> Question:
        return Question(
            label=label,
            init_inputs=init,
            state={f"{self.prefix}weight": affine.weight, f"{self.prefix}bias": affine.bias},
            needs_state=label["affine"] == "random",
            attributes={f"{self.prefix}eps": eps},
            needs_attributes=eps != self.eps,
            inputs=[x],
            expected=lambda: native(setting.hosted, x, affine.weight, affine.bias, eps),
        )

    def _shape(self, setting: Setting, group: Group) -> Shape:
        return (group.shape or self.shape) if setting.full else group.small

    def _init(self, shape: Shape) -> list[Any]:
        if shape[self.leading :] == self.shape[self.leading :]:
            return list(self.init_inputs)
        row = shape[self.leading :]
        return [math.prod(row) if self._flat else row]

    def _affine(self, setting: Setting, shape: Shape) -> _Affine:
        weight = torch.ones(shape[self.leading :], dtype=setting.dtype, device=setting.device)
        return _Affine(weight, torch.zeros_like(weight))

    def _draw(self, setting: Setting, name: str, shape: Shape) -> torch.Tensor:
        """One input in the task's dtype. Level 1 problem 40's uniform one of the official shape is the task's own."""
        if name == OFFICIAL or (name == "uniform" and shape == self.shape == OFFICIAL_SHAPE):
            x: torch.Tensor = self.modules.get_inputs()[0][: shape[0]].to(setting.device)
        else:
            x = INPUTS[name](shape, setting.device)
        return x.to(setting.dtype)


def cases_of(modules: Modules, model: torch.nn.Module, layer: torch.nn.LayerNorm) -> LayerNormCases | None:
    """The cases of a Model that is `layer`; None where its form is another: no parameters, or not one input tensor."""
    shape = _input_shape(modules)
    if shape is None or layer.weight is None or layer.bias is None or len(shape) <= len(layer.normalized_shape):
        return None
    path = next(name for name, module in model.named_modules() if module is layer)
    return LayerNormCases(modules, layer, path, shape)


def _input_shape(modules: Modules) -> Shape | None:
    """The shape of the one official input; without its memory where the program allows that."""
    try:
        with torch.device("meta"):
            inputs = modules.get_inputs()
    except Exception:
        inputs = modules.get_inputs()
    if len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        return None
    return tuple(inputs[0].shape)


def native(hosted: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Outputs:
    """The operator's own output with mean and rstd, (rows,) each; hosted: by the NumPy model of its order on CUDA."""
    if hosted:
        y, mean, rstd = with_statistics(x, weight, bias, eps)
    else:
        y, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
    return {"output": y, "mean": mean.reshape(-1), "rstd": rstd.reshape(-1)}


def _label(step: Step, shape: Shape, eps: float) -> dict[str, Any]:
    size = "x".join(map(str, shape))
    name = f"{step.group.name} {size}, seed {step.seed}, {step.affine} affine, {step.input}, eps {eps:g}"
    return {
        "name": name,
        "group": step.group.name,
        "shape": list(shape),
        "seed": step.seed,
        "affine": step.affine,
        "input": step.input,
        "eps": eps,
    }
