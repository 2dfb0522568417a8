"""What a batch costs by itself: a candidate that computes nothing, in a cell of its own, by the same protocol.

On a GPU each of its calls has the device write a block of its own memory, about as long as the candidate's calls take
it: a batch then ends with the device, as any honest one does. What it costs to set an idle device to work, and to wait
for it, is in the null candidate's batches as well. (Seen on an H200: a null that leaves the device idle costs 0.3 ms a
batch less than an honest file, which were then taken for time that the file had moved there.)
"""

from __future__ import annotations

import hashlib
import math
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

    def forward(self, x, times):
        if x.is_cuda:
            for _ in range(times):
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

ALONE = 6  # batches of each size before there is a candidate; the first is slow
LONGEST = 7  # times that the block is written in a call: half a millisecond on an H200; longer waits cost no more


class Null:
    """The null candidate, being started; `load` waits for it. `run` gives the ms of a batch of n of its calls."""

    def __init__(self, device: torch.device, timeout_s: float, like: Mapping[str, Any] | None) -> None:
        digest = hashlib.sha256(TASK_SOURCE.encode()).hexdigest()
        task = Task(0, 0, "null", TASK_SOURCE, digest, "local")
        cell = Cell(candidate_folder(hashlib.sha256(SOURCE.encode()).hexdigest()))
        self.worker = Worker.spawn(SOURCE, task, cell=cell, device=device, timeout_s=timeout_s, like=like)
        self.ring: CallRing | None = None
        self.calls, self.once_ms, self.before_ms = 0, 0.0, math.inf
        self.looked_ms = 0.0  # of the last batch: from "done" until its answers had been sampled

    def load(self, calls: int) -> None:
        """Have it ready for batches of up to so many calls, and take what a batch costs by itself while there is no
        candidate (`before_ms`, of the quickest batches): nobody can have delayed that."""
        self.worker.load()
        self.model, self.calls = self.worker.construct([]), calls
        self._writes(LONGEST)
        one, three = (min([self.run(size) for _ in range(ALONE)][1:]) for size in (1, min(3, calls)))
        each = (three - one) / 2 if calls >= 3 else 0.0
        self.before_ms, self.once_ms = one - each, each / LONGEST

    def match(self, call_ms: float) -> None:
        """From now on keep the device in a call as long as one of the candidate's does, or as long as matters."""
        self._writes(max(1, min(LONGEST, round(call_ms / self.once_ms))) if self.once_ms > 0 else 1)

    def _writes(self, times: int) -> None:
        """A new ring, of calls that write the block so often."""
        if self.ring is not None:
            self.ring.close()
        self.ring = CallRing(self.model, [torch.zeros(64, device=self.worker.device), times], self.calls, [256])

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
