"""Run-time checks against known ways to pass an evaluation without doing the work.

    findings.py      the register: what a guard is and may answer (imports no torch)
    applicability.py what a guard raises when it cannot ask
    watch.py         global state, patched functions, files, threads, live objects
    rig.py           a task and a candidate, honest ways to build and call them, the true answers
    by_value.py, by_behaviour.py, by_isolation.py      the guards

`judge` is a child-process target (process/isolated.py). A guard never changes an official verdict. Every guard has
a deliberately bad twin under tests/twins/ that it catches, and that passes unseen when the guard is switched off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def judge(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run every guard on one candidate.

    Payload: the stage payload (candidate_source, task, precision, kernelbench, device), and optionally
    `guards_disabled` (names), `guards_calls` (length of the long run, default 128), `protected` (files that must not
    be written). Returns {"clean": bool, "findings": [{guard, message}], "checked": [names],
    "not_checked": [{guard, reason}]}.
    Raises JudgeFailure: COMPILE_ERROR when the candidate does not load, NOT_RUN where it cannot run here.
    """
    from kbsub.eval.verdicts.guards.run import judge_candidate

    return judge_candidate(payload, progress)
