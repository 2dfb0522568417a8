"""The child that executes a candidate so that its extensions are built. Runs in the candidate's cell, without a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kbsub.adapters.candidate import CandidateError, load_candidate
from kbsub.adapters.evaluator import build_folder
from kbsub.adapters.task import task_from_payload

NICE = 10  # whoever judges meanwhile goes first


def judge(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target for run_isolated: {"built": what lies in the build folder, "error": why the file could not be executed}.

    A file that asks for a GPU while it is executed cannot be built ahead; what it built before that stays.
    """
    os.nice(NICE)
    source = payload["candidate_source"]
    folder = build_folder(source)
    tidy(folder)
    if payload.get("only_tidy"):
        return {"built": [], "error": None}
    error = None
    try:
        load_candidate(source, task_from_payload(payload), build_dir=folder)
    except CandidateError as failure:
        error = failure.message[:2000]
    return {"built": sorted(path.name for path in folder.glob("*/*.so"))[:100], "error": error}


def tidy(folder: Path) -> None:
    """Remove what a killed build left: torch waits for its lock file without end.

    Inside the candidate's cell, before anything of it runs: no build of this folder can be under way.
    """
    for lock in folder.glob("*/lock"):
        lock.unlink(missing_ok=True)
