"""Run-time checks against known ways to pass an evaluation without doing the work.

    findings.py      the register: what a guard is and may answer (imports no torch)
    applicability.py what a guard raises when it cannot ask
    rig.py           a task, honest ways to build and call a candidate, the true answers
    remote_rig.py    the candidate in a worker (eval/remote), for by_value.py and by_behaviour.py
    inside_rig.py    the candidate in this process, for by_isolation.py: what can only be asked there
    watch.py         global state, patched functions, files, threads, live objects, inside
    asking.py, run.py, inside.py   ask them; the judge, and its half in the candidate's own process

The judge executes no line of the candidate. Guards of isolation run in the candidate's process, in its cell, and the
record says which they are (`checked_inside`): a file that sets out to can write their answers.

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
    be written). Returns the fields of registration.Guards.
    Raises JudgeFailure: COMPILE_ERROR when the candidate does not load, NOT_RUN where it cannot run here, and what
    became of its process; but where a guard has found something, that is the answer.
    """
    from kbsub.eval.verdicts.guards.run import judge_candidate

    return judge_candidate(payload, progress)
