"""Batches on a GPU: answers are looked at as soon as "done" is said, and what is looked at later is held against it."""

from __future__ import annotations

import pytest
import torch

from kbsub.adapters.task import load_task
from kbsub.eval.process.cell import Cell
from kbsub.eval.remote.model import Worker
from kbsub.eval.remote.ring import CallRing

pytestmark = pytest.mark.gpu

SHAPE = (1 << 20,)
COUNT = 8
SOURCE = """
import sys, torch
class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
    def forward(self, x):
        {change}
        return x * 2
"""
LATE = (  # nothing waits for the device any more, which has plenty to do first
    "sys._getframe(3).f_locals['self'].finish = lambda: None\n        x.is_cuda and torch.cuda._sleep(200_000_000)"
)


def ring_of(worker: Worker) -> CallRing:
    made = CallRing(worker.construct([SHAPE]), [torch.zeros(SHAPE, device="cuda")], COUNT, [4 << 20])
    for slot in range(COUNT):
        made.write(slot, [torch.full(SHAPE, float(slot), device="cuda")])
    return made


def start(change: str, tmp_path) -> Worker:
    task = load_task(1, 40, kernelbench=None)
    source = SOURCE.format(change=change)
    return Worker.start(source, task, cell=Cell(tmp_path / "cell"), device="cuda", timeout_s=120)


def test_answers_are_sampled_at_once_where_they_lie_in_memory_that_was_seen(tmp_path):
    with start("pass", tmp_path) as worker:
        ring = ring_of(worker)
        for turn in range(3):
            batch = ring.run([3, 0, 7, 5])
            assert batch.at_once == (turn > 0)
            for call, slot in enumerate(batch.order):
                value, same = ring.taken(batch, call)
                assert same and bool((value == 2.0 * slot).all())
            ring.forget(batch)
        ring.close()


def test_an_answer_that_was_not_there_when_it_was_done_is_told_from_one_that_was(tmp_path):
    with start(LATE, tmp_path) as worker:
        ring = ring_of(worker)
        ring.forget(ring.run(range(COUNT)))
        torch.cuda.synchronize()
        batch = ring.run(range(COUNT)[::-1])
        assert batch.at_once
        assert not any(ring.taken(batch, call)[1] for call in range(COUNT))
        ring.close()
