"""The referee on a CPU by a clock that counts work: a LayerNorm is a millisecond, a sleep what it says.

The judge runs in this process, which is no risk: it executes no line of the candidate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kbsub.eval.process.cell import candidate_folder
from kbsub.eval.process.isolated import JudgeFailure
from kbsub.eval.remote import ring
from kbsub.eval.verdicts.referee import judge as referee
from support.paths import TESTS

TASK = TESTS / "support" / "small_layer_norm_task" / "reference.py"
CALL_MS = 1.0
COUNTED = """
import os, time, torch
work = os.open(os.path.join(os.environ["HOME"], "work"), os.O_CREAT | os.O_RDWR)
native, counted = torch.nn.functional.layer_norm, [0]
def add(microseconds):
    counted[0] += microseconds
    os.pwrite(work, b"%020d" % counted[0], 0)
def layer_norm(*arguments, **options):
    add(1000)
    return native(*arguments, **options)
torch.nn.functional.layer_norm = layer_norm
sleep = time.sleep
def timed_sleep(seconds):
    add(int(seconds * 1e6))
    sleep(min(seconds, 0.01))
time.sleep = timed_sleep

"""


class NoNull:
    """A null candidate whose batches take no time: nothing of it is counted work."""

    def __init__(self, *arguments: Any) -> None:
        self.before_ms, self.looked_ms = 0.0, 0.0

    def load(self, calls: int) -> None:
        pass

    def match(self, call_ms: float) -> None:
        pass

    def run(self, calls: int, last: Any = None) -> float:
        return 0.0

    def close(self) -> None:
        pass


@contextmanager
def counting(source: str) -> Iterator[str]:
    """The source that counts its work, while the referee's clock reads the count."""
    text = COUNTED + source
    path = candidate_folder(hashlib.sha256(text.encode()).hexdigest()) / "cache" / "home" / "work"

    def read() -> float:
        return int(path.read_bytes() or b"0") * 1e-6

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "clock", read)
        patch.setattr(referee, "Null", NoNull)
        yield text


def refereed(source: str, task: Path = TASK, **more: Any) -> tuple[str, dict[str, Any]]:
    """(how the judge ended, its record) for a candidate of the small LayerNorm task."""
    with counting(source) as text:
        payload = {
            "candidate_source": text,
            "task": f"local:{task}",
            "precision": "fp32",
            "kernelbench": None,
            "device": "cpu",
            "timeout_s": 120.0,
            "referee_rounds": 5,
            **more,
        }
        try:
            return "OK", referee.judge(payload, lambda event: None)
        except JudgeFailure as failure:
            return failure.status.value, failure.value or {}
