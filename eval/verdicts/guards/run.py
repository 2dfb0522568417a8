"""Runs the register's guards on one candidate and collects what they say.

This process executes no line of the candidate. The guards that compare values ask a worker (remote_rig.py); those that
can only ask inside the candidate's own process do so in another one, in the candidate's cell (inside.py).
"""

from __future__ import annotations

import ast
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

# Importing the three modules of guards fills the register.
import kbsub.eval.verdicts.guards.by_behaviour
import kbsub.eval.verdicts.guards.by_isolation
import kbsub.eval.verdicts.guards.by_value  # noqa: F401
from kbsub.adapters.candidate import cuda_source_of
from kbsub.adapters.refusal import modules_of
from kbsub.adapters.task import task_from_payload
from kbsub.eval.process.frames import check, printable
from kbsub.eval.process.isolated import JudgeFailure, Outcome, Status, run_isolated
from kbsub.eval.remote.model import CandidateRefused, RemoteError
from kbsub.eval.suite.confined import Confined, host_cache
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.asking import Progress, ask
from kbsub.eval.verdicts.guards.findings import REGISTER, Finding, Findings
from kbsub.eval.verdicts.guards.remote_rig import RemoteRig

DEFAULT_CALLS = 128  # upstream calls 5 + 3 + 1 + 100 times
HOSTED_CALLS = 12  # where every thread of a kernel is executed on the CPU: past the 5 + 3 calls before the timed ones
INSIDE = "kbsub.eval.verdicts.guards.inside:judge_inside"
SHARE_OF_TIME = 0.9  # of the judge's own limit, for the process inside: what is left tells of a hang
KEPT_WORDS = ("candidate_source", "guards_disabled", "protected")
ANOTHER = "changes_on_call_n"  # the guard that two processes with two answers to the same input speak under
_INSIDE_FORM = {
    "findings": [{"guard": str, "message": str}],
    "checked": [str],
    "not_checked": [{"guard": str, "reason": str}],
    "problem": (dict, None),
}
_PROBLEM_FORM = {"status": str, "message": str}
MOST_FINDINGS = 1000  # of one process: a candidate can make up as many as it likes


def judge_candidate(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """See kbsub.eval.verdicts.guards.judge."""
    started = time.monotonic()
    disabled = set(payload.get("guards_disabled") or ())
    if unknown := disabled - set(REGISTER):
        raise JudgeFailure(
            Status.NOT_RUN, f"no guard is called {', '.join(sorted(unknown))}; there are: {', '.join(REGISTER)}"
        )
    device = torch.device(payload.get("device") or "cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "torch sees no GPU; on a machine without one use --device cpu")
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    hosted = device.type == "cpu" and _runs_hosted(payload["candidate_source"])
    if hosted:
        from kbsub.eval.host_executor.build import require_host

        require_host()
    calls = payload.get("guards_calls") or (HOSTED_CALLS if hosted else DEFAULT_CALLS)
    found = Findings([], [], [{"guard": name, "reason": "disabled"} for name in REGISTER if name in disabled])
    confined = Confined(payload["candidate_source"], task_from_payload(payload), device, hosted, workers=1)
    problem: JudgeFailure | None = None
    try:
        _from_outside(found, confined, calls, disabled, progress)
    except RemoteError as error:
        problem = error
    except JudgeFailure as error:
        if error.status is Status.NOT_RUN:
            raise
        problem = error
    finally:
        confined.close()
    if any(entry.inside for name, entry in REGISTER.items() if name not in disabled):
        words = {key: payload[key] for key in KEPT_WORDS if key in payload}
        folder = confined.task.folder  # whose task.toml names the operator, which knows a size for a CPU
        told = {**asdict(confined.task), "folder": str(folder) if folder else None}
        words |= {"task": told, "device": str(device), "calls": calls, "hosted": hosted}
        words["host_cache"] = host_cache() if hosted else None
        cell = replace(confined.cell, readable=(folder.absolute(),) if folder else ())
        limit = SHARE_OF_TIME * float(payload.get("timeout_s") or 300.0) - (time.monotonic() - started)
        outcome = run_isolated(INSIDE, words, timeout_s=max(5.0, limit), on_progress=progress, cell=cell)
        problem = _from_inside(found, outcome, disabled, problem)
    if problem is not None and not found.findings:
        raise JudgeFailure(problem.status, problem.message)
    if not found.checked and not found.findings:
        first = found.not_checked[0]
        raise JudgeFailure(Status.NOT_RUN, f"no guard was asked, the first: {first['guard']}: {first['reason']}")
    asked = {*found.checked, *(entry["guard"] for entry in found.not_checked)}
    if problem is not None:
        found.not_checked += [{"guard": n, "reason": _reason(problem)} for n in REGISTER if n not in asked]
    return {
        "clean": not found.findings,
        "findings": [asdict(finding) for finding in found.findings],
        "checked": [name for name in REGISTER if name in found.checked],
        "checked_inside": [name for name, entry in REGISTER.items() if entry.inside and name in found.checked],
        "not_checked": found.not_checked,
        "confined": confined.record()["confined"],
    }


def _runs_hosted(source: str) -> bool:
    """Whether its kernels are executed on the CPU, its forward unmodified: it launches by the shared loader lines."""
    if cuda_source_of(source) != "CUDA_SOURCE":
        return False
    return any(getattr(node, "name", "") == "cuda_module" for node in ast.parse(source).body)


def _reason(problem: JudgeFailure) -> str:
    return f"the candidate gave no answer: {problem.status}: {problem.message}"


def _from_outside(found: Findings, confined: Confined, calls: int, disabled: set[str], progress: Progress) -> None:
    """Ask the guards that compare values. JudgeFailure: the candidate has no answer to compare, or lost its process."""
    progress({"stage": "guard", "case": "load"})
    task = confined.task
    try:
        rig = RemoteRig(task, modules_of(task), confined.device, calls, confined)
        progress({"stage": "guard", "case": "exercise"})
        _exercise(rig)
    except NotApplicable as reason:  # without the reference's own answer there is nothing to hold a candidate to
        raise JudgeFailure(Status.NOT_RUN, str(reason)) from reason
    except CandidateRefused as refusal:
        raise JudgeFailure(
            Status.NOT_RUN, f"the candidate refuses the task's own input here: {refusal.text}"
        ) from refusal
    entries = [entry for entry in REGISTER.values() if not entry.inside and entry.name not in disabled]
    asked = ask(rig, entries, progress)
    found.findings += asked.findings
    found.checked += asked.checked
    found.not_checked += asked.not_checked


def _exercise(rig: RemoteRig) -> None:
    """Construct, then three calls under no_grad and three with grad mode on. JudgeFailure: another output shape."""
    pair = rig.build()
    expected = rig.expected(pair, rig.inputs(1))
    for grad in (False, True):
        for seed in (1, 2, 3):
            answer = rig.call(pair, rig.inputs(seed), grad=grad)
            if answer.shape != expected.shape:
                shapes = f"{tuple(answer.shape)}, the reference's is {tuple(expected.shape)}"
                raise JudgeFailure(Status.INCORRECT_SHAPE, f"the output's shape is {shapes}")


def _from_inside(
    found: Findings, outcome: Outcome, disabled: set[str], problem: JudgeFailure | None
) -> JudgeFailure | None:
    """Add what the process inside says, as far as it has the form of an answer; the problem of the whole run."""
    if outcome.status is not Status.OK:
        print(outcome.log, file=sys.stderr)  # it belongs to the log of this stage
        return problem or JudgeFailure(outcome.status, f"inside the candidate's process: {outcome.message}")
    try:
        said = _checked(outcome.value, disabled)
    except ValueError as error:
        return problem or JudgeFailure(Status.CRASHED, f"inside the candidate's process: a malformed answer: {error}")
    found.findings += [Finding(each["guard"], printable(each["message"]), True) for each in said["findings"]]
    found.checked += said["checked"]
    found.not_checked += [{"guard": each["guard"], "reason": printable(each["reason"])} for each in said["not_checked"]]
    told = said["problem"]
    if told is None:
        return problem
    own = JudgeFailure(Status(told["status"]), f"inside the candidate's process: {printable(told['message'])}")
    if problem is None and own.status is not Status.OUT_OF_MEMORY and ANOTHER not in disabled:
        words = f"what it answered in a worker it does not answer where these guards are: {own.status}: {own.message}"
        found.findings.append(Finding(ANOTHER, words, True))
    return problem or own


def _checked(value: Mapping[str, Any] | None, disabled: set[str]) -> dict[str, Any]:
    """What judge_inside returns. ValueError for anything else, such as a guard that is not accounted for."""
    check(value, _INSIDE_FORM)
    said = dict(value or {})
    if said["problem"] is not None:
        check(said["problem"], _PROBLEM_FORM, "the problem")
        Status(said["problem"]["status"])
    if len(said["findings"]) > MOST_FINDINGS:
        raise ValueError(f"{len(said['findings'])} findings")
    wanted = {name for name, entry in REGISTER.items() if entry.inside and name not in disabled}
    named = [*said["checked"], *(each["guard"] for each in said["not_checked"])]
    if {each["guard"] for each in said["findings"]} - (set(REGISTER) - disabled):
        raise ValueError("a finding of a guard that is not asked")
    if set(named) - wanted or len(set(named)) != len(named) or (said["problem"] is None and set(named) != wanted):
        raise ValueError("not every guard that was asked is accounted for, once")
    return said
