"""The half of the guards that runs in the candidate's own process, in its cell: a target of process/isolated.py.

What it returns is the word of a process that the candidate shares; run.py checks its form and says whose word it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kbsub.adapters.candidate import CandidateError, load_candidate
from kbsub.adapters.refusal import modules_of, short_error
from kbsub.adapters.task import Task
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.remote.host_cache import seed_host_cache
from kbsub.eval.verdicts.guards import by_isolation
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.asking import Progress, ask
from kbsub.eval.verdicts.guards.findings import REGISTER, Finding, Findings
from kbsub.eval.verdicts.guards.inside_rig import InsideRig
from kbsub.eval.verdicts.guards.watch import Watch


def judge_inside(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Load the candidate here, watched, and ask the guards of isolation.

    Payload: candidate_source, task (the fields of a Task), device, calls, hosted, host_cache, and what the guards' own
    has of guards_disabled and protected. Returns {"findings": [{guard, message}], "checked", "not_checked",
    "problem"}; problem: None, or {"status", "message"} of a candidate that gave no answer here.
    """
    device = torch.device(payload["device"])
    told = payload["task"]
    task = Task(**{**told, "folder": Path(told["folder"]) if told["folder"] else None})
    modules = modules_of(task)
    before = dict(modules.context)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before the watch looks at the CUDA generator and the open descriptors
    if payload["hosted"]:
        seed_host_cache(payload["host_cache"])
    disabled = set(payload.get("guards_disabled") or ())
    watch = Watch(modules.context, tuple(Path(path) for path in payload.get("protected") or ()))
    found, problem = Findings([], [], []), None
    progress({"stage": "guard", "case": "load (inside)"})
    try:
        with watch.candidate("the file, while it was executed,"):
            model = load_candidate(payload["candidate_source"], task, modules=modules)
        by_isolation.check_task(watch, modules.context, before)
        if payload["hosted"]:
            from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, adopt

            adopt(modules.context, SMALL_LIMITS, HostExecutor(workers=1))
            model = modules.context["ModelNew"]
        rig = InsideRig(task, modules, device, payload["calls"], model, watch)
        progress({"stage": "guard", "case": "exercise (inside)"})
        by_isolation.exercise(rig)
        entries = [entry for entry in REGISTER.values() if entry.inside and entry.name not in disabled]
        found = ask(rig, entries, progress)
    except CandidateError as error:
        problem = {"status": str(Status.COMPILE_ERROR), "message": error.message}
    except NotApplicable as reason:  # the reference's, which the other half was to have met first
        raise JudgeFailure(Status.NOT_RUN, str(reason)) from reason
    except JudgeFailure as error:
        problem = {"status": str(error.status), "message": error.message}
    except Exception as error:
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
        problem = {"status": str(status), "message": short_error(error)}
    # Also what the watch saw of guards that were not asked, because there was no answer or they are asked elsewhere.
    known = {(finding.guard, finding.message) for finding in found.findings}
    found.findings += [
        Finding(name, message, True)
        for name, message in watch.events
        if name not in disabled and (name, message) not in known
    ]
    return {
        "findings": [{"guard": finding.guard, "message": finding.message} for finding in found.findings],
        "checked": found.checked,
        "not_checked": found.not_checked,
        "problem": problem,
    }
