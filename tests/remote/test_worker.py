"""The worker's loop: no reply goes out while the device is still at work on what was asked."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
import torch

from kbsub.adapters.task import Task
from kbsub.eval.process.cell import Cell
from kbsub.eval.process.frames import Channel, FrameError
from kbsub.eval.remote import worker
from kbsub.eval.remote.model import Worker


class Recorder(worker.Session):
    """A session that says it is on a GPU; its requests only queue something."""

    def __init__(self, events: list[str]) -> None:
        self.device, self.events, self.held, self.blocks = torch.device("cuda"), events, None, {}

    def load_state(self, request: dict[str, Any], state: Any) -> dict[str, Any]:
        self.events.append("copy queued")
        return {}

    def repeat(self, request: dict[str, Any], inputs: Any) -> dict[str, Any]:
        self.events.append("call queued")
        raise ValueError("refused after it had launched")


@pytest.mark.parametrize(("op", "queued"), [("load_state", "copy queued"), ("repeat", "call queued")])
def test_a_reply_waits_for_the_device(monkeypatch: pytest.MonkeyPatch, op: str, queued: str) -> None:
    """The next request overwrites the same shared memory: a copy still under way would read the new contents."""
    events: list[str] = []
    monkeypatch.setattr(worker, "_synchronize", lambda device: events.append("waited"))
    mine, theirs = socket.socketpair()
    judge, channel = Channel(mine, 1 << 20), Channel(theirs, 1 << 20)

    def loop() -> None:
        with pytest.raises(FrameError):  # when the judge is gone
            worker.serve(Recorder(events), channel)

    thread = threading.Thread(target=loop)
    thread.start()
    judge.send({"op": op}, 10.0)
    judge.receive(Any, 10.0)
    seen = list(events)
    judge.close()
    thread.join(10)
    assert seen == [queued, "waited"]


TASK = """
import torch
class Model(torch.nn.Module):
    pass
def get_inputs():
    return [torch.zeros(1)]
def get_init_inputs():
    return []
"""
THREADS = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return torch.full((1,), float(torch.get_num_threads()))
"""


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_worker_adds_with_as_many_threads_as_its_judge(threads: int, tmp_path, warm_children) -> None:
    """BatchNorm on the CPU has other bits on two threads than on one: nobody's fault, and was a failed case."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        task = Task(0, 0, "threads", TASK, "0" * 64, "local")
        with Worker.start(THREADS, task, cell=Cell(tmp_path / "cell"), timeout_s=60) as started:
            assert started.construct([])(torch.zeros(1)).item() == threads
    finally:
        torch.set_num_threads(before)
