"""Runs upstream's own evaluator on CPU tensors, in a child process whose `torch.cuda` is idle.

Everything of upstream's code runs as it is, except that its CUDA calls do nothing, its events read a host clock and
its 256 MiB cache flush is left out. So the way its answers are read is tested where there is no GPU; no number or
verdict of such a run means anything about a candidate.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from typing import Any

import torch

from kbsub.adapters import evaluator
from kbsub.eval.process.isolated import JudgeFailure
from kbsub.eval.verdicts.official import judge as official


class HostEvent:
    """Stands where torch.cuda.Event stands; elapsed time in ms."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        return (end.at - self.at) * 1e3


def idle_cuda() -> None:
    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "set_device", "manual_seed"):
        setattr(torch.cuda, name, nothing)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda device=None: "NVIDIA stand-in"
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.Event = HostEvent


def judge_all(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """{name: {"value": ..., "failure": [status, message] or None, "events": [...]}} for payload["sources"]."""
    installed, hidden = importlib.util.find_spec, payload["hide"]  # on machines that have these packages, too
    importlib.util.find_spec = lambda name, package=None: None if name in hidden else installed(name, package)
    evaluator.import_upstream(payload["kernelbench"])  # first: it asks CUDA for a default device
    idle_cuda()
    sys.modules["kernelbench.timing"].clear_l2_cache = lambda device="cuda": None
    found = {}
    for name, source in payload["sources"].items():
        events: list[dict[str, Any]] = []
        failure, value = None, None
        try:
            value = official.judge({**payload, "candidate_source": source}, events.append)
        except JudgeFailure as error:
            failure, value = [error.status.value, error.message], error.value
        found[name] = {"value": value, "failure": failure, "events": events}
    return found
