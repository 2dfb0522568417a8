"""What a batch costs by itself: a candidate that computes nothing, in a cell of its own, by the same protocol.

On a GPU each of its calls has the device write a block of its own memory: a batch then ends with the device, as any
honest one does, and what it costs to set an idle device to work is in the null candidate's batches as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kbsub.adapters.task import Task
from kbsub.eval.process.cell import Cell, candidate_folder
from kbsub.eval.remote.model import Worker
from kbsub.eval.remote.ring import CallRing

SOURCE = """\
import torch


class ModelNew(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.block = torch.zeros(32_000_000, device="cuda") if torch.cuda.is_available() else None

    def forward(self, x):
        if x.is_cuda:
            self.block.add_(1.0)
        return torch.zeros(64, device=x.device)
"""
TASK_SOURCE = """\
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x


def get_inputs():
    return [torch.zeros(64)]


def get_init_inputs():
    return []
"""

ALONE = 8  # batches before there is a candidate; the first is slow


class Null:
    """The null candidate, being started; `load` waits for it. `run` gives the ms of a batch of n of its calls."""

    def __init__(self, device: torch.device, timeout_s: float, like: Mapping[str, Any] | None) -> None:
        digest = hashlib.sha256(TASK_SOURCE.encode()).hexdigest()
        task = Task(0, 0, "null", TASK_SOURCE, digest, "local")
        cell = Cell(candidate_folder(hashlib.sha256(SOURCE.encode()).hexdigest()))
        self.worker = Worker.spawn(SOURCE, task, cell=cell, device=device, timeout_s=timeout_s, like=like)
        self.ring: CallRing | None = None
        self.before_ms: list[float] = []
        self.looked_ms = 0.0  # of the last batch: from "done" until its answers had been sampled

    def load(self, calls: int) -> None:
        """Have it ready for batches of up to so many calls, and take the ms of some of one call (`before_ms`)."""
        self.worker.load()
        device = self.worker.device
        self.ring = CallRing(self.worker.construct([]), [torch.zeros(64, device=device)], calls, [256])
        self.before_ms = [self.run(1) for _ in range(ALONE)][1:]

    def run(self, calls: int, last: Callable[[], None] = lambda: None) -> float:
        """ms of a batch. last: what this side has the device do just before, as before a candidate's batch: a device
        that has worked for one process takes a moment to turn to another."""
        assert self.ring is not None
        self.ring.hold()
        batch = self.ring.run(range(calls), last=last)
        self.ring.forget(batch)
        self.looked_ms = batch.looked_s * 1e3
        return batch.seconds * 1e3

    def close(self) -> None:
        if self.ring is not None:
            self.ring.close()
        self.worker.close()
