"""A stand-in for the official judge in test_batch.py: the "candidate" is a list of words that say what to do.

Imported only inside child processes; PYTHONPATH points here. `ledger` (KBSUB_TEST_LEDGER) gets a line a judgement.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def judge(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    words = dict(word.split("=") for word in payload["candidate_source"].split())
    ledger = Path(os.environ["KBSUB_TEST_LEDGER"])
    with ledger.open("a") as file:
        file.write(f"{payload['stem']} {os.environ.get('CUDA_VISIBLE_DEVICES', '-')} {os.getppid()}\n")
    if "kill_worker" in words:
        marker = ledger.with_name(f"killed-{payload['stem']}")
        if not marker.exists():
            marker.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # until the death of the parent takes this process along
    if "kill_always" in words:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    time.sleep(float(words.get("sleep", 0)))
    if "exit" in words:
        os._exit(int(words["exit"]))
    metadata = {"hardware": "stand-in", "padding": "x" * int(words.get("padding", 0))}
    runtime = float(words.get("ms", 1))
    official = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": metadata, "runtime": runtime}
    return {"official": {**official, "runtime_stats": {"mean": runtime}}, "verdict": {"status": "OK", "reason": None}}
