"""Judges for test_remote_model.py that run a worker as their child; imported only inside the judge's process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from kbsub.adapters.task import load_task
from kbsub.eval.process.cell import Cell
from kbsub.eval.remote.model import Worker

SLEEPER = """
import os, subprocess, sys, time, torch
class ModelNew(torch.nn.Module):
    def __init__(self, shape): super().__init__()
    def forward(self, x):
        code = "import time; time.sleep(120) # " + MARK
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, env={})
        time.sleep(120)
"""


def hang(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    text = f"MARK = {payload['mark']!r}\n{SLEEPER}"
    cell = Cell(Path(payload["folder"]), level=payload["level"])
    with Worker.start(text, load_task(1, 40, kernelbench=None), cell=cell) as worker:
        model = worker.construct([(8,)])
        progress({"stage": "asked"})
        if payload["dies"]:
            words = {"method": None, "grad": False, "poison": None, "same": False, "touch": False, "keep": None}
            nothing = {"value": {"list": [{"plain": None}]}, "slots": [], "block": 0}
            worker.channel.send({"op": "call", "instance": 1, **words, **nothing}, 5)
            time.sleep(3)
            os._exit(7)
        model(torch.zeros(1, 8))
    return {}
