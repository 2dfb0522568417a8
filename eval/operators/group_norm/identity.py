"""The bit-identity cases of both norms: thirty at the task's own shape, and small shapes of every path of the order.

Must not know candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kbsub.adapters.task import Modules
from kbsub.eval.operators.group_norm import on_cpu
from kbsub.eval.operators.group_norm.formula import Layer
from kbsub.eval.operators.identity import FULL_SIZE, SECRET, SECRET_INPUTS, Question, Setting
from kbsub.eval.operators.unit_norm.identity import (
    FULL_INPUTS,
    MUTATION,
    OFFICIAL,
    TIMED_SEED,
    DrawnCases,
    NormGroup,
    Shape,
)

HOST_ELEMENTS = 1 << 16  # the NumPy model folds an element a thread at a time
HARD_INPUTS = ("zero", "constant 1e4", "non-finite", "1e-38 scale", "1e25 scale")
EVERY_EPS = (None, 0.0, 1e-3)
PLANES: tuple[tuple[int, ...], ...] = ((64, 64), (17, 19), (96, 96), (512, 512), (5, 7), (16, 8))
PARAMETER_MUTATION = 0.9


class GroupNormCases(DrawnCases):
    """modules: the task's; shape: of its one input (batch, channels, *); layer: of its Model.

    A layer with parameters has three seeds with its own and with random ones, one without has six.
    """

    def __init__(self, modules: Modules, shape: Shape, layer: Layer) -> None:
        self.modules, self.shape, self.layer = modules, shape, layer
        self.init_inputs = modules.get_init_inputs()
        channels = shape[1]
        seeds = (0, 1, 2, 3, 4, 5) if layer.weight is None else (0, 1, 2)
        small = (1, channels, 32, 32)
        others = tuple((2, channels, *plane) for plane in PLANES)
        self.groups = (
            NormGroup(FULL_SIZE, None, seeds, FULL_INPUTS, small=small),
            NormGroup("hard values", (2, channels, 8, 12), (7,), HARD_INPUTS, EVERY_EPS),
            *(NormGroup("another shape", each, (827,), ("uniform", "normal")) for each in others),
            NormGroup("another shape", (0, channels, 8, 8), (827,), ("uniform",)),
        )

    def _cases(self, setting: Setting) -> Iterator[tuple[NormGroup, Shape, int, bool, str, float]]:
        for group in self.groups:
            shape = group.shape or (self.shape if setting.full else group.small)
            if not setting.full and torch.Size(shape).numel() > HOST_ELEMENTS:
                continue
            for seed in group.seeds:
                for random in self._affines(group):
                    for name in group.inputs:
                        for eps in group.eps:
                            yield group, shape, seed, random, name, self.layer.eps if eps is None else eps

    def _affines(self, group: NormGroup) -> tuple[bool, ...]:
        if self.layer.weight is None:
            return (False,)
        return (False, True) if group.name == FULL_SIZE else (True,)

    def count(self, setting: Setting) -> int:
        return sum(1 for _ in self._cases(setting))

    def questions(self, setting: Setting) -> Iterator[Question]:
        drawn: tuple[Any, torch.Tensor] | None = None
        for group, shape, seed, random, name, eps in self._cases(setting):
            key = (shape, seed, random, name)
            state = self._state(setting, random, seed)
            if drawn is None or drawn[0] != key:
                drawn = None  # the last one goes before the next is made
                torch.manual_seed(seed)
                drawn = key, self._draw(setting, name, shape, seed == 0)
            yield self._question(setting, group.name, shape, seed, random, name, eps, state, drawn[1])

    def secret(self, setting: Setting, seed: int) -> Iterator[Question]:
        shape = self.shape if setting.full else self.groups[0].small
        for at, name in enumerate((OFFICIAL, *SECRET_INPUTS)):
            random = bool(at) and self.layer.weight is not None
            state = self._state(setting, random, seed + at)
            torch.manual_seed(seed + at)
            x = self._draw(setting, name, shape, own=False)
            yield self._question(setting, SECRET, shape, seed + at, random, name, self.layer.eps, state, x)

    def timed(self, setting: Setting, with_state: bool) -> Question:
        shape = self.shape if setting.full else self.groups[0].small
        random = with_state and self.layer.weight is not None
        state = self._state(setting, random, TIMED_SEED)
        torch.manual_seed(TIMED_SEED)
        x = self._draw(setting, OFFICIAL, shape, own=False)
        return self._question(setting, FULL_SIZE, shape, TIMED_SEED, random, OFFICIAL, self.layer.eps, state, x)

    def change(self, setting: Setting, question: Question) -> dict[str, Any]:
        question.inputs[0].mul_(MUTATION)
        changed = {"x": MUTATION}
        if question.needs_state:
            for name, tensor in question.state.items():
                tensor.mul_(PARAMETER_MUTATION)
                changed[name] = PARAMETER_MUTATION
        return changed

    def _state(self, setting: Setting, random: bool, seed: int) -> dict[str, torch.Tensor]:
        """The layer's parameters, in the task's dtype: as constructed, or drawn from a generator of their own."""
        found = {}
        for at, (name, own) in enumerate((("weight", self.layer.weight), ("bias", self.layer.bias))):
            if own is not None:
                drawn = torch.randn(own.shape, generator=torch.Generator().manual_seed(2 * seed + at))
                tensor = drawn if random else own.detach().clone()
                found[f"{self.layer.path}{name}"] = tensor.to(device=setting.device, dtype=setting.dtype)
        return found

    def _question(
        self,
        setting: Setting,
        group: str,
        shape: Shape,
        seed: int,
        random: bool,
        name: str,
        eps: float,
        state: dict[str, torch.Tensor],
        x: torch.Tensor,
    ) -> Question:
        affine = "" if self.layer.weight is None else f", {'random' if random else 'default'} affine"
        words = f"{group} {'x'.join(map(str, shape))}, seed {seed}{affine}, {name}, eps {eps:g}"
        label = {"name": words, "group": group, "shape": list(shape), "seed": seed, "input": name, "eps": eps}
        if affine:
            label["affine"] = "random" if random else "default"
        return Question(
            label=label,
            init_inputs=self.init_inputs,
            state=state,
            needs_state=random,
            attributes={f"{self.layer.path}eps": eps},
            needs_attributes=eps != self.layer.eps,
            inputs=[x],
            expected=lambda: {"output": self._native(setting, x, state, eps)},
        )

    def _native(self, setting: Setting, x: torch.Tensor, state: dict[str, torch.Tensor], eps: float) -> torch.Tensor:
        groups, path = self.layer.groups, self.layer.path
        if groups is None:
            return on_cpu.instance_norm(x, eps) if setting.hosted else torch.nn.functional.instance_norm(x, eps=eps)
        weight, bias = state[f"{path}weight"], state[f"{path}bias"]
        if setting.hosted:
            return on_cpu.group_norm(x, groups, weight, bias, eps)
        return torch.nn.functional.group_norm(x, groups, weight, bias, eps)
