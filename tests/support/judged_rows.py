"""Run folders of finished rows, made without a judge: what a batch on an H200 would have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run.batch.job import Job, Settings, row_of
from kbsub.eval.run.batch.rows import official_entry, row_path

ENVIRONMENT = {"gpu": "NVIDIA H200", "torch": "2.9.0"}


def official(correct: bool, ms: float = 1.0, reference: float = 2.0) -> dict[str, Any]:
    words = {"compiled": True, "correctness": correct, "trials": "(5 / 5)", "metadata": {}, "runtime_stats": {}}
    return {**words, "runtime": ms if correct else -1.0, "ref_runtime": reference if correct else -1.0}


def put(folder: Path, level: int, problem: int, sample: int, said: dict[str, Any] | None, **more: Any) -> Path:
    """The row of one sample; `more`: further keys of it, such as guards."""
    name = f"level_{level}_problem_{problem}_sample_{sample}"
    job = Job(name, f"level{level}_{problem}", level, problem, sample, f"x = {problem}", Settings())
    status = Status.OK if said is None or said["correctness"] else Status.INCORRECT_NUMERICAL
    value = {"official": said, "verdict": {"status": status.value, "reason": None}} if said else None
    outcome = Outcome(Status.OK if said else Status.TIMEOUT, value, "" if said else "TIMEOUT", "", 1.0)
    row = {**row_of(job, {"official": outcome}), "environment": ENVIRONMENT, "blind_spots": None, **more}
    path = row_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row))
    entry = official_entry(row)
    assert entry is not None
    return path


def source(overrides: dict[str, Any], own_correct: bool) -> dict[str, Any]:
    return {"overrides": overrides, "own_namespace": official(own_correct), "own_speedup": 0.5, "static": None}


def guards(*names: str) -> dict[str, Any]:
    return {"clean": not names, "findings": [{"guard": name, "message": "caught"} for name in names], "checked": ["a"]}
