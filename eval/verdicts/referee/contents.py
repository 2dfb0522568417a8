"""What the slots hold: draws of the task's own get_inputs, another for every call, made again from a seed to compare.

Nothing that a candidate's process sees is needed to know what it was given. Knows no candidate and no clock.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kbsub.adapters.task import Modules, Task

# Just before the clock starts, one element in so many of every input is drawn once more: answers that were begun
# before are wrong everywhere, and at places that only reading everything again can tell.
NUDGE_STRIDE, NUDGED_AT_LEAST, SMALLEST = 4096, 64, 3
SLOW_DRAW_S = 0.03  # beyond that, contents are mixed from a few draws
POOL = 3
LEAST_SCALE = 0.25
LEAST_OF_POOL = 0.75  # what is mixed from a few draws is scaled too, or a memo of as many values an element knows it


class Nudge:
    """Elements `places[k]` of the flattened k-th tensor are those of `spare`: one somewhere in every NUDGE_STRIDE."""

    def __init__(self, spare: Sequence[torch.Tensor], settled: Sequence[bool]) -> None:
        self.spare = [each.reshape(-1) for each in spare]
        self.places = [
            None if fixed or each.numel() < SMALLEST else _one_in_each(each)
            for each, fixed in zip(self.spare, settled, strict=True)
        ]

    def apply(self, tensors: Sequence[torch.Tensor]) -> None:
        """Change the last dimension of each (of which rows of slots have two, a flattened tensor one) in place."""
        for tensor, spare, places in zip(tensors, self.spare, self.places, strict=True):
            if places is not None:
                tensor[..., places] = spare[places]


def _one_in_each(flat: torch.Tensor) -> torch.Tensor:
    """Indices: at a secret place in every stretch of NUDGE_STRIDE elements, fewer where there are not many."""
    stride = max(SMALLEST, min(NUDGE_STRIDE, flat.numel() // NUDGED_AT_LEAST))
    count = flat.numel() // stride
    inside = np.random.default_rng(secrets.randbits(128)).integers(0, stride, size=count)
    return torch.from_numpy(np.arange(count) * stride + inside).to(flat.device)


class Contents:
    """Draws for `device`, as the task makes and upstream casts them; the same seed, the same content.

    `scaled`: floating inputs are multiplied by a number in [1/4, 1) of their own, for tasks whose predicate takes the
    answer to one draw for that to another. `way`: how they are drawn, in words.
    """

    def __init__(self, task: Task, modules: Modules, device: torch.device) -> None:
        self.task, self.modules, self.device = task, modules, device
        self.scaled = False
        self._pool: list[list[Any]] = []
        self._place: torch.device = device
        self.way = "drawn on the device"
        try:
            first = self._drawn(1)
            started = time.monotonic()
            again = self._drawn(1)
            self._synchronise()
            slow = time.monotonic() - started > SLOW_DRAW_S and device.type == "cuda"
            same = _same(first, again)
        except Exception:  # a program that names its device, or reads values: drawn where upstream draws it
            slow, same = True, False
            self._place = torch.device("cpu")
            first = self._drawn(1)
        if slow or not same:
            self._place = torch.device("cpu")
            self._pool = [self._drawn(secrets.randbits(31)) for _ in range(POOL)]
            self.way = f"mixed from {POOL} draws"
        self.template = first
        # A matrix that equals its transpose in every draw stays so: it is not nudged.
        self._settled = [_symmetric(each) for each in tensors_of(first)]

    def draw(self, seed: int) -> list[Any]:
        """Arguments of one call, in memory of their own."""
        if self._pool:
            return self._mixed(seed)
        found = self._drawn(seed)
        if self.scaled:
            _scale(found, seed)
        return found

    def nudge(self) -> Nudge:
        """A new one, for all slots of one batch."""
        return Nudge(tensors_of(self.draw(secrets.randbits(31))), self._settled)

    def nudged(self, seed: int, nudge: Nudge) -> list[Any]:
        """What a slot held when it was called."""
        found = self.draw(seed)
        nudge.apply([each.view(-1) for each in tensors_of(found)])
        return found

    def _drawn(self, seed: int) -> list[Any]:
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(seed)
        with torch.device(self._place), torch.no_grad():
            values = list(self.modules.get_inputs())
        found = self.task.cast(values, self.device)
        return [each.detach().contiguous().clone() if isinstance(each, torch.Tensor) else each for each in found]

    def _mixed(self, seed: int) -> list[Any]:
        chance = random.Random(seed)
        first, second = chance.sample(range(len(self._pool)), 2)
        found = [each.clone() if isinstance(each, torch.Tensor) else each for each in self._pool[first]]
        stride = chance.randrange(3, 61)
        offset = chance.randrange(stride)
        for held, other in zip(tensors_of(found), tensors_of(self._pool[second]), strict=True):
            held.view(-1)[offset::stride] = other.view(-1)[offset::stride]
        _scale(found, seed, LEAST_SCALE if self.scaled else LEAST_OF_POOL)
        return found

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    return [each for each in values if isinstance(each, torch.Tensor)]


def _scale(values: list[Any], seed: int, least: float = LEAST_SCALE) -> None:
    factor = random.Random(seed ^ 0x5CA1E).uniform(least, 1.0)
    for each in tensors_of(values):
        if each.is_floating_point():
            each.mul_(factor)


def _same(first: list[Any], second: list[Any]) -> bool:
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def _symmetric(value: torch.Tensor) -> bool:
    if value.dim() < 2 or value.shape[-1] != value.shape[-2] or value.shape[-1] < 2:
        return False
    return bool(torch.equal(value, value.transpose(-1, -2)))
