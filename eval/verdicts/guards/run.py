"""Runs the register's guards on one candidate and collects what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Importing the three modules of guards fills the register.
import kbsub.eval.verdicts.guards.by_behaviour
import kbsub.eval.verdicts.guards.by_isolation as by_isolation
import kbsub.eval.verdicts.guards.by_value  # noqa: F401
from kbsub.adapters.candidate import cuda_source_of, load_candidate
from kbsub.adapters.refusal import modules_of
from kbsub.adapters.task import task_from_payload
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import REGISTER, Finding
from kbsub.eval.verdicts.guards.rig import Rig
from kbsub.eval.verdicts.guards.watch import Watch

DEFAULT_CALLS = 128  # upstream calls 5 + 3 + 1 + 100 times
HOSTED_CALLS = 12  # where every thread of a kernel is executed on the CPU: past the 5 + 3 calls before the timed ones


def judge_candidate(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """See kbsub.eval.verdicts.guards.judge."""
    disabled = set(payload.get("guards_disabled") or ())
    if unknown := disabled - set(REGISTER):
        raise JudgeFailure(
            Status.NOT_RUN, f"no guard is called {', '.join(sorted(unknown))}; there are: {', '.join(REGISTER)}"
        )
    device = torch.device(payload.get("device") or "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "torch sees no GPU; on a machine without one use --device cpu")
    task = task_from_payload(payload)
    modules = modules_of(task)
    before = dict(modules.context)
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # before the watch looks at the CUDA generator and the open descriptors
    watch = Watch(modules.context, tuple(Path(path) for path in payload.get("protected") or ()))
    progress({"stage": "guard", "case": "load"})
    with watch.candidate("the file, while it was executed,"):
        model = load_candidate(payload["candidate_source"], task, modules=modules)
    by_isolation.check_task(watch, modules.context, before)
    hosted = _hosted(payload, device)
    if hosted and "cuda_module" in modules.context:
        from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, adopt

        adopt(modules.context, SMALL_LIMITS, HostExecutor(workers=1))
        model = modules.context["ModelNew"]
    calls = payload.get("guards_calls") or (HOSTED_CALLS if hosted else DEFAULT_CALLS)
    try:
        rig = Rig(task, modules, model, watch, device, calls)
    except NotApplicable as reason:
        raise JudgeFailure(Status.NOT_RUN, str(reason)) from reason
    findings, checked, skipped = _run(rig, disabled, progress)
    return {
        "clean": not findings,
        "findings": [{"guard": finding.guard, "message": finding.message} for finding in findings],
        "checked": checked,
        "not_checked": skipped,
    }


def _run(
    rig: Rig, disabled: set[str], progress: Callable[[dict[str, Any]], None]
) -> tuple[list[Finding], list[str], list[dict[str, str]]]:
    findings: list[Finding] = []
    checked: list[str] = []
    skipped = [{"guard": name, "reason": "disabled"} for name in REGISTER if name in disabled]
    progress({"stage": "guard", "case": "exercise"})
    try:
        by_isolation.exercise(rig)
    except NotApplicable as reason:  # without the reference's own answer there is nothing to hold a candidate to
        raise JudgeFailure(Status.NOT_RUN, str(reason)) from reason
    except ValueError as refusal:
        raise JudgeFailure(Status.NOT_RUN, f"the candidate refuses the task's own input here: {refusal}") from refusal
    # Isolation last: its events are gathered while the others run.
    order = sorted(
        (entry for entry in REGISTER.values() if entry.name not in disabled), key=lambda e: e.family == "isolation"
    )
    for entry in order:
        progress({"stage": "guard", "case": entry.name})
        try:
            messages = entry.guard(rig)
        except NotApplicable as reason:
            skipped.append({"guard": entry.name, "reason": str(reason)})
            continue
        except ValueError as refusal:
            skipped.append({"guard": entry.name, "reason": f"the candidate refuses the probe: {refusal}"})
            continue
        except JudgeFailure:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            messages = [f"forward raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"]
        checked.append(entry.name)
        findings += [Finding(entry.name, message) for message in dict.fromkeys(messages)]
    if not checked:
        raise JudgeFailure(
            Status.NOT_CHECKED, f"no guard was asked, the first: {skipped[0]['guard']}: {skipped[0]['reason']}"
        )
    return findings, checked, skipped


def _hosted(payload: dict[str, Any], device: torch.device) -> bool:
    """Whether the candidate's kernels are executed on the CPU, its forward unmodified."""
    return device.type == "cpu" and cuda_source_of(payload["candidate_source"]) == "CUDA_SOURCE"
