"""Runs candidates through stages, one child process each, and owns the result file, which is written after every stage.

Must not know what a stage finds out, nor how it is shown. Imports no torch: the parent never touches a candidate.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kbsub.adapters import environment
from kbsub.adapters.candidate import cuda_source_of
from kbsub.adapters.task import BROKEN_REFERENCE, OFFICIAL_SIZE, Task, TaskError
from kbsub.eval.process.isolated import MEMORY_LIMIT_VARIABLE, Outcome, Status, run_isolated
from kbsub.eval.process.printable import shown_name
from kbsub.eval.results.blindspots import known as known_blind_spots
from kbsub.eval.results.model import (
    Candidate,
    Result,
    ResultError,
    TaskFacts,
    check_writable,
    read_result,
    row_key,
    update_result,
)
from kbsub.eval.results.record import Environment
from kbsub.eval.results.timing import Floors
from kbsub.eval.run.machine_facts import display_path, memory_limit_bytes
from kbsub.eval.run.phases import Phases
from kbsub.eval.run.shared import SHARES, SharedStages
from kbsub.eval.run.sizes import Choice, RunSizes, sizes_for
from kbsub.eval.run.source_text import read_source, read_with_digest
from kbsub.eval.run.stage_values import is_environment, keep_reference, stage_problem, without_a_gpu
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.tasks.declarations import Declared, read_declared
from kbsub.eval.verdicts.kind import VerdictKind
from kbsub.eval.verdicts.register import ENDS_THE_ROW, HONEST, KINDS, NOT_FAILED, OFFICIAL

NOTHING: Mapping[str, Any] = MappingProxyType({})
CONTROL = "control"  # the contract of a file that is declared to be wrong
ENVIRONMENT_TARGET = "kbsub.adapters.environment:judge"


@dataclass(frozen=True)
class Plan:
    """What one invocation does. `kernelbench` is a verified checkout or None; `device` "cuda", "cuda:1" or "cpu".

    `host_executor` lets the stages run CUDA candidates on the CPU. `size`: the size that every stage is to judge at
    (but the official one on a GPU); "": the largest that fits, stage by stage.
    `secret_seed`: of a record whose secret cases are made again; None: each judge draws its own.
    `declared`: what counts of the candidates' declarations; by default that of this repository's own files. It is read
    when the plan is made, so that nothing which runs later can change it.
    """

    task: Task
    task_text: str
    candidates: tuple[Path, ...]
    stages: tuple[str, ...]
    precision: str
    device: str
    kernelbench: Path | None
    timeout_s: float
    host_executor: bool = False
    size: str = ""
    gpu: str | None = None
    secret_seed: int | None = None
    declared: Declared | None = None
    sizes: RunSizes | None = None  # found out when the run begins

    def __post_init__(self) -> None:
        if self.declared is None:
            object.__setattr__(self, "declared", read_declared(self.candidates))

    def declaration_for(self, file: Path) -> tuple[dict[str, Any], str | None]:
        """({contract, ...}, None); ({}, None) for a file of one's own; ({}, what is wrong with candidates.toml)."""
        assert self.declared is not None  # __post_init__ saw to that
        return self.declared.of(file), self.declared.wrong.get(file)

    def choice(self, stage: VerdictKind, source: str) -> Choice:
        """The size at which a stage judges the candidate of this text."""
        if self.sizes is None:
            return Choice(OFFICIAL_SIZE)
        hosted = self.device == "cpu" and self.host_executor and cuda_source_of(source) == "CUDA_SOURCE"
        return self.sizes.of(stage, hosted=hosted)

    def shares_a_child(self, file: Path) -> bool:
        """Whether the file may be run in one process with others: only this repository's own declared ones."""
        assert self.declared is not None
        return file in self.declared.ours and file in self.declared.rows


@dataclass
class Row:
    """One candidate while it is judged: what goes into the file, and how each stage ended.

    `source`, `unreadable`: the file when the row began: one edited meanwhile gives no row verdicts of two versions.
    """

    file: Path
    key: str
    fields: dict[str, Any]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    environment: dict[str, Any] | None = None
    source: str = ""
    unreadable: str | None = None
    sizes: dict[str, dict[str, Any]] = field(default_factory=dict)  # stage -> the size that it judged at
    phases: dict[str, dict[str, float]] = field(default_factory=dict)  # stage -> where its seconds went

    @property
    def status(self) -> Status:
        return Status(self.fields["status"])

    @property
    def failed(self) -> bool:
        """Whether it or a stage ended neither well nor honestly unasked, or has undeclared failed cases or findings."""
        ends = [self.status, *(outcome.status for outcome in self.outcomes.values())]
        return any(end not in NOT_FAILED for end in ends) or any(self.problems(name) for name in self.outcomes)

    @property
    def unchecked(self) -> bool:
        """Whether one of its stages could ask nothing, or next to nothing."""
        return any(outcome.status is Status.NOT_CHECKED for outcome in self.outcomes.values())

    def problems(self, stage: str) -> list[str]:
        """What a stage holds against a candidate that declares nothing, each "name: reason"."""
        kind, found = KINDS[stage], self.fields.get(KINDS[stage].key)
        contract = self.fields.get("contract")
        declared = contract is not None and (contract == CONTROL or not kind.undeclarable)
        if declared or stage == OFFICIAL or not found:
            return []
        return kind.problems(kind.record.model_validate(found))


Report = Callable[[Row, str, Mapping[str, Any]], None]  # (row, stage, progress event)


def run(plan: Plan, out: Path, report: Report, finished: Callable[[Row], None]) -> tuple[list[Row], Result]:
    """Judge every candidate of the plan; returns the rows and the result as written to `out`.

    Raises ResultError before anything is run when `out` holds something else, TaskError when the reference is broken.
    """
    check_joinable(plan, out)
    check_writable(out)
    rows: list[Row] = []
    known: dict[str, Any] | None = None  # the environment block, once a child has reported it
    result: Result | None = None
    there = read_result(out) if out.exists() else None  # before any candidate can touch it
    own: set[str] = set()
    checkout = str(plan.kernelbench) if plan.kernelbench else None
    plan = replace(plan, sizes=sizes_for(plan.task, plan.task_text, checkout, plan.device, plan.size))
    commit = environment.project_commit()
    shared = SharedStages(
        functools.partial(_declared_payloads, plan), plan.stages, plan.timeout_s, child_variables(plan)
    )
    for file in plan.candidates:
        row = Row(file, row_key(file.stem, plan.precision), {})
        for name in plan.stages:
            outcome = judge_stage(plan, row, KINDS[name], functools.partial(report, row, name), shared)
            if any(words in outcome.message for words in BROKEN_REFERENCE):
                raise TaskError(outcome.message)
            known = row.environment if is_environment(row.environment) else known
            if known is None:
                found = run_isolated(ENVIRONMENT_TARGET, {"device": plan.device}, timeout_s=120)
                if found.value is None:
                    raise ResultError(
                        f"torch does not answer on this machine: {found.status}: {found.message}\n{found.log}"
                    )
                known = found.value["environment"]
            new = _as_result(plan, row, {**known, "project_commit": commit})
            keep = functools.partial(keep_reference, row_key("eager", plan.precision), row.fields.get("reference"))
            result = update_result(out, new, keep, known=result or there, own=own, fresh=there is None)
            own.add(row.key)
        rows.append(row)
        finished(row)
    if result is None:
        raise ResultError("no candidate and no stage: there is nothing to run")
    return rows, result


def check_joinable(plan: Plan, out: Path) -> None:
    """Raise ResultError when `out` exists and is no result of this task on this GPU."""
    if not out.exists():
        return
    if not out.is_file():
        raise ResultError(f"{out}: is no regular file, and is not replaced; write to another file with --out")
    there = read_result(out)
    if there.task.sha256 != plan.task.sha256 or there.task.provenance != plan.task.provenance:
        raise ResultError(
            f"{out} is about {there.task.slug or 'another task'} ({there.task.provenance}), this run about "
            f"{plan.task.slug} ({plan.task.provenance}); write to another file with --out"
        )
    if there.environment.gpu != plan.gpu:
        here, old = plan.gpu or "no GPU", there.environment.gpu or "no GPU"
        raise ResultError(f"{out} was made with {old}, this run has {here}; write to another file with --out")


def judge_stage(
    plan: Plan,
    row: Row,
    stage: VerdictKind,
    on_progress: Callable[[dict[str, Any]], None],
    shared: SharedStages | None = None,
    isolate: Callable[..., Outcome] | None = None,
) -> Outcome:
    """One stage of one candidate, run and put into its row. Returns how its process ended."""
    outcome = run_stage(plan, row, stage, on_progress, shared, isolate)
    if plan.device == "cpu":
        outcome = without_a_gpu(row.fields, stage, outcome)
    record_outcome(row, stage, outcome)
    return outcome


def run_stage(
    plan: Plan,
    row: Row,
    stage: VerdictKind,
    on_progress: Callable[[dict[str, Any]], None],
    shared: SharedStages | None = None,
    isolate: Callable[..., Outcome] | None = None,
) -> Outcome:
    """One stage of one candidate in a child process; a reason not to run it is an Outcome, too.

    `shared`: where stress and oracle of a whole run are computed together. `isolate`: starts the child (run_isolated).
    """
    declaration, wrong = plan.declaration_for(row.file)
    if not row.fields:
        digest, row.source, row.unreadable = read_with_digest(row.file)
        begin(row, digest, plan.precision, plan.task.slug, plan.task.provenance, declaration)
        if wrong:  # the candidate can be judged all the same; what it claims is unknown
            row.fields["declaration_error"] = wrong
    reason = _reason_not_to_run(plan, row, stage, row.source, declaration)
    if row.unreadable or reason:
        status = Status.COMPILE_ERROR if row.unreadable else Status.NOT_RUN
        return Outcome(status, None, row.unreadable or reason or "", "", 0.0)
    choice = plan.choice(stage, row.source)
    row.sizes[stage.name] = choice.record()
    payload = _payload(plan, row.file, row.source, declaration, choice)
    if shared is not None and stage.shared:
        return shared.outcome(stage.name, payload, on_progress)
    variables = child_variables(plan)
    cell = cell_of([row.fields["sha256"]], plan.task_text, plan.kernelbench) if stage.runs_candidate else None
    phases = Phases(on_progress)
    start = functools.partial(isolate or run_isolated, on_progress=phases.heard, on_entered=phases.entered)
    outcome = start(stage.judge, payload, timeout_s=plan.timeout_s, env=variables, cell=cell)
    row.phases[stage.name] = phases.seconds(outcome.seconds)
    return outcome


def _payload(plan: Plan, file: Path, source: str, declaration: Mapping[str, Any], choice: Choice) -> dict[str, Any]:
    return {
        "candidate": shown_name(display_path(file)),
        "candidate_source": source,
        "stem": shown_name(file.stem),
        "task": plan.task_text,
        "precision": plan.precision,
        "kernelbench": str(plan.kernelbench) if plan.kernelbench else None,
        "device": plan.device,
        "declaration": declaration,
        SHARES: plan.shares_a_child(file),
        "timeout_s": plan.timeout_s,
        "host_executor": plan.host_executor,
        "size": {"name": choice.name, "values": dict(choice.values)},
        "full": plan.size == OFFICIAL_SIZE,
        **({"secret_seed": plan.secret_seed} if plan.secret_seed is not None else {}),
    }


def child_variables(plan: Plan) -> dict[str, str]:
    """Environment variables of a stage's process."""
    if plan.device != "cpu":
        return {}
    limit = memory_limit_bytes()
    variables = {MEMORY_LIMIT_VARIABLE: str(limit)} if limit else {}
    if "OMP_WAIT_POLICY" not in os.environ:
        variables["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin between small operators starve on a busy machine
    return variables


def _declared_payloads(plan: Plan) -> list[dict[str, Any]]:
    """The stage payloads of the plan's candidates that may share a child and may run here."""
    payloads = []
    shared = next(kind for kind in KINDS.values() if kind.shared)
    for file in plan.candidates:
        source, problem = read_source(file)
        declaration, _ = plan.declaration_for(file)
        if plan.shares_a_child(file) and not problem:
            if _reason_not_to_run(plan, Row(file, "", {}), shared, source, declaration) is None:
                payloads.append(_payload(plan, file, source, declaration, plan.choice(shared, source)))
    return payloads


def _reason_not_to_run(
    plan: Plan, row: Row, stage: VerdictKind, source: str, declaration: Mapping[str, Any]
) -> str | None:
    official = row.outcomes.get(OFFICIAL)
    if official is not None and official.status in ENDS_THE_ROW:
        return f"the official stage ended with {official.status}"
    declared = declaration.get("precision")
    if declared and plan.precision not in declared:
        return f"candidates.toml declares it for {', '.join(declared)} only"
    needs = cuda_source_of(source)
    if plan.device == "cpu" and needs and not (plan.host_executor and needs == "CUDA_SOURCE"):
        way_out = "; --device cpu runs its kernels on the host" if needs == "CUDA_SOURCE" else ""
        return f"needs an NVIDIA GPU ({needs}){way_out}"
    if refused := plan.choice(stage, source).refused:
        return refused
    if importlib.util.find_spec(stage.judge.partition(":")[0]) is None:
        return f"this version of kbsub has no {stage.name} stage"
    return None


def begin(
    row: Row, digest: str, precision: str, slug: str | None, provenance: str, declaration: Mapping[str, Any] = NOTHING
) -> None:
    """What a row says before anything is asked. digest: the sha256 of its file."""
    row.fields = {
        "sha256": digest,
        "contract": declaration.get("contract"),
        "accurate": bool(declaration.get("accurate", False)),
        "precision": precision,
        "status": Status.NOT_RUN.value,
        "reason": "the official stage was not asked for",
        "stages": {},
    }
    if spots := known_blind_spots(str(slug), provenance, precision):
        row.fields["blind_spots"] = spots


def record_outcome(row: Row, stage: VerdictKind, outcome: Outcome) -> None:
    """Put one outcome into the row. Only the official stage touches `status`, `reason` and `timing`."""
    found = dict(outcome.value or {})
    problem = stage_problem(row.fields, stage, found)
    if problem is not None:  # a judge's mistake, or words that a candidate put into its mouth, cost this stage alone
        words = f"the {stage.name} judge returned a malformed {stage.key}: {problem}"
        found, outcome = {}, replace(outcome, status=Status.RUNTIME_ERROR, value=None, message=words)
    elif stage.name != OFFICIAL and outcome.status is Status.OK and found:
        if why := stage.not_checked(stage.record.model_validate(found)):
            outcome = replace(outcome, status=Status.NOT_CHECKED, message=why)
    # A judge that runs no line of the candidate says what its worker was confined by.
    confined = outcome.confined or found.get("confined")
    row.outcomes[stage.name] = outcome
    row.environment = found.pop("environment", None) or row.environment
    row.fields["stages"][stage.name] = {
        "status": outcome.status.value,
        "message": outcome.message,
        "seconds": round(outcome.seconds, 3),
        **({"confined": confined} if isinstance(confined, dict) else {}),
        **({"size": row.sizes[stage.name]} if stage.name in row.sizes else {}),
        **({"phases": row.phases[OFFICIAL]} if stage.name == OFFICIAL and row.phases else {}),
        # The child's own words, where a person will want them.
        **({"log": outcome.log[-4000:]} if outcome.status not in HONEST else {}),
    }
    if stage.name != OFFICIAL:
        if found:
            row.fields[stage.key] = found
        return
    verdict = found.pop("verdict", {"status": outcome.status.value, "reason": outcome.message or None})
    row.fields["status"], row.fields["reason"] = verdict["status"], verdict["reason"]
    row.fields["official"] = found.pop("official", None)
    row.fields.update(found)  # timing, reference, floors, or the CPU's local check
    # The row's verdict is the stage's end, too: what upstream failed must stop the other stages and the exit code.
    if outcome.status is Status.OK and Status(verdict["status"]) is not Status.OK:
        ended = replace(outcome, status=Status(verdict["status"]), message=verdict["reason"] or "")
        row.outcomes[stage.name] = ended
        row.fields["stages"][stage.name] |= {"status": verdict["status"], "message": verdict["reason"]}


def _as_result(plan: Plan, row: Row, environment_block: Mapping[str, Any]) -> Result:
    """A result that holds this one row, ready to be joined into the file."""
    task = TaskFacts(
        level=plan.task.level,
        problem_id=plan.task.problem_id,
        sha256=plan.task.sha256,
        provenance=plan.task.provenance,
    )
    result = Result(
        environment=Environment.model_validate(environment_block),
        task=task,
        candidates={row.key: Candidate.model_validate(row.fields)},
    )
    floors = row.fields.get("floors") or {}
    if plan.precision == "fp32" and "memory_ms" in floors:
        result.floors = Floors(memory_ms=floors["memory_ms"], copy_gb_s=floors["copy_gb_s"])
    return result


def failures(rows: Sequence[Row]) -> list[Row]:
    """The rows that cost the run its exit code 0."""
    return [row for row in rows if row.failed]
