"""The bit-identity cases of x / norm(x): the task's own shape on inputs of five kinds, small shapes of every path.

Thirty full-size cases, as level 1 problem 40 has: six seeds of the kinds used there (it has no parameters to vary).
Must not know candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.adapters.task import Modules
from kbsub.eval.operators.identity import FULL_SIZE, SECRET, SECRET_INPUTS, IdentitySuite, Outputs, Question, Setting
from kbsub.eval.operators.reduction_order import Device, trees_of
from kbsub.eval.operators.unit_norm.formula import Norm
from kbsub.eval.operators.unit_norm.on_cpu import in_cuda_order

Shape = tuple[int, ...]
OFFICIAL = (
    "official"  # uniform, as the task's own input; that itself for the first seed (a CPU takes seconds to draw it)
)
OFFICIAL_SEED = 0
TIMED_SEED = 42  # of upstream's timed input
MUTATION = 0.8
HOSTED_DEVICE = Device()  # the identity judge executes kernels for an H200


@dataclass(frozen=True)
class NormGroup:
    """Cases of one shape: for each seed, for each input, for each eps (None: the Model's own).

    shape None: the task's own, for which `small` stands in on a CPU; other shapes are taken as they are where they have
    at most `HOST_ELEMENTS`, and left out there where they have more.
    """

    name: str
    shape: Shape | None
    seeds: tuple[int, ...]
    inputs: tuple[str, ...]
    eps: tuple[float | None, ...] = (None,)
    small: Shape = ()


HOST_ELEMENTS = 1 << 18
INPUTS: dict[str, Callable[[Shape, torch.device], torch.Tensor]] = {
    "uniform": lambda shape, device: torch.rand(shape, device=device),
    "normal": lambda shape, device: torch.randn(shape, device=device),
    "x100": lambda shape, device: torch.randn(shape, device=device) * 100,
    "+1000": lambda shape, device: torch.randn(shape, device=device) + 1000,
    "constant 1e4": lambda shape, device: torch.full(shape, 1e4, device=device),
    "zero": lambda shape, device: torch.zeros(shape, device=device),
    "1e-38 scale": lambda shape, device: torch.randn(shape, device=device) * 1e-38,  # subnormals: seen if ftz is on
    "1e25 scale": lambda shape, device: torch.randn(shape, device=device) * 1e25,  # squares overflow
    "non-finite": lambda shape, device: _specials(shape, device),
}
FULL_INPUTS = (OFFICIAL, "normal", "x100", "+1000", "constant 1e4")
HARD_INPUTS = ("zero", "constant 1e4", "non-finite", "1e-38 scale", "1e25 scale")
EVERY_EPS = (0.0, 1e-5, 1e-3)


def _specials(shape: Shape, device: torch.device) -> torch.Tensor:
    x = torch.randn(shape, device=device)
    flat = x.view(-1)
    flat[0], flat[flat.numel() // 2], flat[-1] = float("nan"), float("inf"), -float("inf")
    return x


def _planes() -> tuple[NormGroup, ...]:
    """Shapes of (batch, channels, plane): each another path of the reduction order, or of a kernel."""
    shapes: tuple[Shape, ...] = (
        (4, 64, 512, 512),  # the published scene
        (3, 64, 17, 19),  # an odd plane: one output a thread
        (2, 64, 6, 5),  # two outputs a thread
        (2, 32, 16, 16),  # a thread an output
        (2, 128, 16, 12),
        (1, 64, 8),  # few outputs: a narrow block
        (2, 5, 7, 9),
        (3, 130, 4, 8),
        (2, 1, 8, 8),
        (0, 64, 8, 8),
    )
    small = (2, 64, 8, 12)
    return (
        NormGroup(FULL_SIZE, None, (0, 1, 2, 3, 4, 5), FULL_INPUTS, small=small),
        NormGroup("hard values", (3, 64, 8, 12), (7,), HARD_INPUTS, EVERY_EPS),
        *(NormGroup("another shape", shape, (827,), ("uniform", "normal")) for shape in shapes),
    )


def _rows() -> tuple[NormGroup, ...]:
    """Shapes of (rows, n), likewise."""
    shapes: tuple[Shape, ...] = (
        (64, 65535),
        (19, 65536),
        (16, 8191),
        (3, 20001),  # few rows: another block
        (40, 1003),  # a warp a row
        (7, 100),  # no vectors
        (600, 20),
        (0, 1024),
    )
    return (
        NormGroup(FULL_SIZE, None, (0, 1, 2, 3, 4, 5), FULL_INPUTS, small=(16, 8191)),
        NormGroup("hard values", (17, 8200), (7,), HARD_INPUTS),
        *(NormGroup("another shape", shape, (827,), ("uniform", "normal")) for shape in shapes),
    )


class DrawnCases(IdentitySuite):
    """Cases of one input, drawn by the names of INPUTS."""

    modules: Modules
    shape: Shape

    def _draw(self, setting: Setting, name: str, shape: Shape, own: bool) -> torch.Tensor:
        """own: the task's own draw, where this is its own kind of input and shape."""
        if own and name == OFFICIAL and shape == self.shape:
            x: torch.Tensor = self.modules.get_inputs()[0].to(setting.device)
        else:
            x = INPUTS["uniform" if name == OFFICIAL else name](shape, setting.device)
        return x.to(setting.dtype)


class UnitNormCases(DrawnCases):
    """modules: the task's; shape: of its one input; norm, eps: of its Model."""

    def __init__(self, modules: Modules, shape: Shape, norm: Norm, eps: float) -> None:
        self.modules, self.shape, self.norm, self.eps = modules, shape, norm, eps
        self.init_inputs = modules.get_init_inputs()
        self.groups = _planes() if len(shape) > 2 else _rows()

    def _cases(self, setting: Setting) -> Iterator[tuple[NormGroup, Shape, int, str, float]]:
        for group in self.groups:
            shape = group.shape or (self.shape if setting.full else group.small)
            if not setting.full and torch.Size(shape).numel() > HOST_ELEMENTS:
                continue
            for seed in group.seeds:
                for name in group.inputs:
                    for eps in group.eps:
                        yield group, shape, seed, name, self.eps if eps is None else eps

    def count(self, setting: Setting) -> int:
        return sum(1 for _ in self._cases(setting))

    def questions(self, setting: Setting) -> Iterator[Question]:
        drawn: tuple[Any, torch.Tensor] | None = None
        for group, shape, seed, name, eps in self._cases(setting):
            if drawn is None or drawn[0] != (shape, seed, name):
                drawn = None  # the last one goes before the next is made
                torch.manual_seed(seed)
                drawn = (shape, seed, name), self._draw(setting, name, shape, seed == OFFICIAL_SEED)
            yield self._question(setting, group.name, shape, seed, name, eps, drawn[1])

    def secret(self, setting: Setting, seed: int) -> Iterator[Question]:
        shape = self.shape if setting.full else self.groups[0].small
        for at, name in enumerate((OFFICIAL, *SECRET_INPUTS)):
            torch.manual_seed(seed + at)
            x = self._draw(setting, name, shape, own=False)
            yield self._question(setting, SECRET, shape, seed + at, name, self.eps, x)

    def timed(self, setting: Setting, with_state: bool) -> Question:
        shape = self.shape if setting.full else self.groups[0].small
        torch.manual_seed(TIMED_SEED)
        x = self._draw(setting, OFFICIAL, shape, own=False)
        return self._question(setting, FULL_SIZE, shape, TIMED_SEED, OFFICIAL, self.eps, x)

    def change(self, setting: Setting, question: Question) -> dict[str, Any]:
        question.inputs[0].mul_(MUTATION)
        return {"x": MUTATION}

    def _question(
        self, setting: Setting, group: str, shape: Shape, seed: int, name: str, eps: float, x: torch.Tensor
    ) -> Question:
        words = f"{group} {'x'.join(map(str, shape))}, seed {seed}, {name}"
        label = {"group": group, "shape": list(shape), "seed": seed, "input": name}
        if self.norm is Norm.RMS:
            words, label = f"{words}, eps {eps:g}", {**label, "eps": eps}
        return Question(
            label={"name": words, **label},
            init_inputs=self.init_inputs,
            state={},
            needs_state=False,
            attributes={"eps": eps} if self.norm is Norm.RMS else {},
            needs_attributes=eps != self.eps,
            inputs=[x],
            expected=lambda: self._native(setting, x, eps),
        )

    def _native(self, setting: Setting, x: torch.Tensor, eps: float) -> Outputs:
        if setting.hosted:
            return {"output": in_cuda_order(x, self.norm, eps, trees_of(torch.__version__), HOSTED_DEVICE)}
        model = self.modules.Model(*self.init_inputs)
        if self.norm is Norm.RMS:
            vars(model)["eps"] = eps
        with torch.no_grad():
            return {"output": model(x)}
