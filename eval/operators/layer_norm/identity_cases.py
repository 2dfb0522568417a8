"""The bit-identity cases of level 1 problem 40 as data, and those of another LayerNorm made from them.

Sources: the published protocol (30 full-size cases, small controls, width 20,672, extra shapes, graph mutation) and
the shapes at which a launch geometry can go wrong. This file must not know candidates, only layer normalisation.
The reference needs N % 4 == 0 in every shape: otherwise native itself takes another path than the one reproduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kbsub.eval.operators.identity import FULL_SIZE

Shape = tuple[int, ...]
OFFICIAL = "official"  # the task's own input, where it is not the uniform one of level 1 problem 40
OFFICIAL_SHAPE: Shape = (16, 64, 256, 256)
EPS = 1e-5
EVERY_EPS = (0.0, 1e-5, 1e-3)


@dataclass(frozen=True)
class Group:
    """Cases that share one random stream: for each seed, for each affine setting, for each input, for each eps.

    `shape` is (rows, *normalized_shape); None is the task's official one, whose uniform input is the task's own
    `get_inputs()`. `small` stands in for it on a CPU, unless the full shapes are asked for.
    """

    name: str
    shape: Shape | None
    small: Shape
    seeds: tuple[int, ...]
    affines: tuple[str, ...]
    inputs: tuple[str, ...]
    eps: tuple[float, ...] = (EPS,)


@dataclass(frozen=True)
class Step:
    """One case of a group; `draw_affine` says that the parameters are set anew before the input is drawn."""

    group: Group
    seed: int
    first_of_seed: bool
    affine: str
    draw_affine: bool
    input: str


# Drawn on the device unless said otherwise; fp32, cast to the precision afterwards, as upstream casts.
INPUTS: dict[str, Callable[[Shape, torch.device], torch.Tensor]] = {
    "uniform": lambda shape, device: torch.rand(shape).to(device),  # on the CPU, as the task does
    "normal": lambda shape, device: torch.randn(shape, device=device),
    "x100": lambda shape, device: torch.randn(shape, device=device) * 100,
    "+1000": lambda shape, device: torch.randn(shape, device=device) + 1000,
    "constant 1e4": lambda shape, device: torch.full(shape, 1e4, device=device),
    "zero": lambda shape, device: torch.zeros(shape, device=device),
    "1e-38 scale": lambda shape, device: torch.randn(shape, device=device) * 1e-38,  # subnormals: seen if ftz is on
    "non-finite": lambda shape, device: _first_of_each_row(shape, device, (float("nan"), float("inf"), -float("inf"))),
}


def _first_of_each_row(shape: Shape, device: torch.device, values: tuple[float, ...]) -> torch.Tensor:
    x = torch.zeros(shape, device=device)
    x.view(shape[0], -1)[: len(values), 0] = torch.tensor(values, device=device)
    return x


FULL_INPUTS = ("uniform", "normal", "x100", "+1000", "constant 1e4")

GROUPS: tuple[Group, ...] = (
    Group(FULL_SIZE, None, (4, 8, 8, 16), (0, 1, 2), ("default", "random"), FULL_INPUTS),
    Group(
        "small control",
        (3, 64, 17, 19),
        (3, 4, 17, 19),
        (7,),
        ("random",),
        ("zero", "constant 1e4", "non-finite", "1e-38 scale"),
        EVERY_EPS,
    ),
    # the width of the controls as a plain matrix: 161.5 vec4 a thread, so that some threads fold one more
    Group("row width 20,672", (16, 20672), (4, 20672), (7,), ("random",), ("uniform", "normal", "x100", "+1000")),
    Group("extra shape", (8, 32, 128, 256), (2, 32, 8, 16), (827,), ("random",), ("uniform", "normal")),
    Group("extra shape", (4096, 1, 1, 1024), (64, 1, 1, 1024), (827,), ("random",), ("uniform", "normal")),
    Group("extra shape", (3, 64, 17, 19), (3, 4, 17, 19), (827,), ("random",), ("uniform", "normal")),
    Group("geometry", (1, 4194304), (1, 65536), (827,), ("random",), ("normal",)),
    Group("geometry", (64, 1048576), (64, 1024), (827,), ("random",), ("normal",)),
    Group("geometry", (8192, 8192), (16, 8192), (827,), ("random",), ("normal",)),
    Group("geometry", (65536, 512), (256, 512), (827,), ("random",), ("normal",)),
    Group("geometry", (65537, 512), (257, 512), (827,), ("random",), ("normal",)),  # one row above the limit of grid y
    Group("geometry", (2, 16777216), (2, 65540), (827,), ("random",), ("normal",)),  # 2^24: 65,536 tiles of 256
    Group("geometry", (5, 4), (5, 4), (827,), ("random",), ("normal",)),  # one vec4: 127 threads carry a count of 0
    Group("geometry", (7, 516), (7, 516), (827,), ("random",), ("normal",)),  # 129 vec4: one thread has two
    Group("geometry", (0, 64, 17, 19), (0, 4, 17, 19), (827,), ("default",), ("zero",)),  # an empty output
)

WIDEST_OF_ANOTHER = 2**16  # elements of a row; wider ones are asked of level 1 problem 40 alone
SMALL_ROWS = 16


def own_groups(shape: Shape, leading: int, flat: bool, resizable: bool, eps: float) -> tuple[Group, ...]:
    """The groups of a LayerNorm of another input `shape`, whose rows begin at dimension `leading`.

    flat: its constructor takes a number, so that the rows of every group are of one dimension. Not resizable: no rows
    but its own. eps: the layer's own, in place of level 1 problem 40's.
    """
    full = GROUPS[0]
    own = replace(
        full,
        small=(min(shape[0], SMALL_ROWS), *shape[1:]),
        inputs=(OFFICIAL, *(name for name in full.inputs if name != "uniform")),
    )
    others = [
        replace(group, shape=_rows_of(group.shape, leading, flat), small=_rows_of(group.small, leading, flat))
        for group in GROUPS[1:]
        if group.shape is not None and math.prod(group.shape[1:]) <= WIDEST_OF_ANOTHER
    ]
    groups = (own, *_distinct(others)) if resizable else (own,)
    return tuple(replace(group, eps=(eps,)) if group.eps == (EPS,) else group for group in groups)


def _rows_of(shape: Shape, leading: int, flat: bool) -> Shape:
    row = (math.prod(shape[1:]),) if flat else shape[1:]
    return (shape[0], *(1,) * (leading - 1), *row)


def _distinct(groups: list[Group]) -> list[Group]:
    """Without a group whose shape, seeds, affine settings and inputs another has had: flat rows make some alike."""
    seen: dict[tuple[object, ...], Group] = {}
    for group in groups:
        seen.setdefault((group.shape, group.seeds, group.affines, group.inputs), group)
    return list(seen.values())


REPEAT_SEED = 42  # the timed input of upstream


@dataclass(frozen=True)
class Mutation:
    """What is changed in place between capture and replay."""

    x: float
    weight: float
    bias: float


# The published values; the split candidates were shown with x alone.
MUTATION = Mutation(x=0.8, weight=0.9, bias=0.01)
SPLIT_MUTATION = Mutation(x=0.5, weight=1.0, bias=0.0)
EXACT_CONTRACTS = ("bit-identical", "baseline")


def inputs_of(group: Group, contract: str) -> tuple[str, ...]:
    """The split candidates' 24 full-size cases leave out the constant, which draws nothing from the stream."""
    if group.name == FULL_SIZE and contract not in EXACT_CONTRACTS:
        return tuple(name for name in group.inputs if name != "constant 1e4")
    return group.inputs


def mutation_of(contract: str) -> Mutation:
    return MUTATION if contract in EXACT_CONTRACTS else SPLIT_MUTATION


def steps(group: Group, contract: str) -> Iterator[Step]:
    """The group's inputs in the order in which they must be drawn."""
    for seed in group.seeds:
        first_of_seed = True
        for affine in group.affines:
            draw_affine = True
            for name in inputs_of(group, contract):
                yield Step(group, seed, first_of_seed, affine, draw_affine, name)
                first_of_seed = draw_affine = False


def count(groups: tuple[Group, ...], contract: str) -> int:
    """How many cases these groups hold for a contract, the graph mutation not counted."""
    return sum(len(group.eps) for group in groups for _ in steps(group, contract))
