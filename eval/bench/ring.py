"""A ring of input buffers larger than any L2 cache, for replays that find nothing of their data on chip.

One CUDA graph runs a program on every buffer of the ring in turn; a buffer's turn comes round when several times the L2
has been moved since. Unlike a flush between two timed calls this also charges every program for writing its output back
to memory, and the time to launch a kernel from the CPU is not measured. Parameters stay in L2, as in real use.
Knows torch and a scene; nothing of candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kbsub.eval.bench.scene import BenchScene

RING_BYTES = 256 << 20  # of inputs; as much again of outputs. Four times an H200's 60 MB of L2, twice a B200's
MOST_BUFFERS = 64


class RingProgram:
    """A captured program whose replay fills one output a buffer; `output` is that of the buffer looked at."""

    def __init__(self, captured: Any, ring: Ring) -> None:
        self.captured, self.ring = captured, ring

    def replay(self) -> None:
        self.captured.replay()

    def output(self) -> Any:
        return self.captured.output()[self.ring.watched]


class Ring:
    """The buffers of one scene; buffer b holds input set b mod S for good. The TimedInputs of its rounds."""

    def __init__(self, scene: BenchScene, ring_bytes: int = RING_BYTES) -> None:
        self.scene, self.sets = scene, len(scene.contents)
        count = math.ceil(ring_bytes / max(scene.input_bytes, 1))
        self.size = min(max(count, 2), MOST_BUFFERS)
        self.buffers = [
            [v.clone() if isinstance(v, torch.Tensor) else v for v in scene.contents[b % self.sets]]
            for b in range(self.size)
        ]
        self.watched = 0

    def over(self, program: Callable[..., Any]) -> Callable[..., Any]:
        """The program called on every buffer in turn: returns the list of its outputs, all of them alive at once."""
        return lambda: [program(*arguments) for arguments in self.buffers]

    def load(self, round_index: int) -> int:
        """Look at another buffer in each round; returns the number of the set it holds."""
        self.watched = round_index % self.size
        return self.watched % self.sets

    def load_pass(self, pass_index: int) -> tuple[list[Any], int]:
        """For upstream's methods; a ring is replayed only."""
        raise NotImplementedError("a ring is replayed, never handed to upstream's methods")

    def check(self, name: str, output: Any, set_index: int) -> str | None:
        """As BenchScene.check, of the watched buffer; a changed input is mended."""
        held, content = self.buffers[self.watched], self.scene.contents[set_index]
        complaint = self.scene.difference(name, output, set_index)
        for kept, original in zip(held, content, strict=True):
            if isinstance(kept, torch.Tensor) and not torch.equal(kept, original):
                kept.copy_(original)
                complaint = complaint or "it changed its input"
        return complaint

    def check_changed(self, name: str, program: Any, set_index: int, seed: int) -> str | None:
        """As BenchScene.check_changed, of the watched buffer."""
        return self.scene.changed(name, program, self.buffers[self.watched], set_index, seed)
