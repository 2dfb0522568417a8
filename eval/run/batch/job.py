"""One sample of a batch and its judge: the same stages, sizes and limits as `kbsub eval` of that one file.

Everything that another process or machine needs is in a Job, its source included. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kbsub.adapters.pin import PIN
from kbsub.adapters.task import Task, TaskError, resolve_task
from kbsub.eval.process import cell
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.run import runner
from kbsub.eval.run.batch.rows import SCHEMA, named
from kbsub.eval.run.machine_facts import gpu_index, gpu_name, gpu_uuid
from kbsub.eval.run.shared import SharedStages
from kbsub.eval.run.sizes import sizes_for
from kbsub.eval.tasks.declarations import Declared
from kbsub.eval.verdicts.kind import VerdictKind
from kbsub.eval.verdicts.register import ENDS_THE_ROW, KINDS, OFFICIAL

TARGET = KINDS[OFFICIAL].judge


@dataclass(frozen=True)
class Settings:
    """How each row is judged: the protocol. Two rows of other settings are never taken for each other.

    `kernelbench` is a folder on the machine that judges; where it is not there, that machine's own checkout is used.
    `cell`: a level of kbsub.eval.process.cell, which every machine must have; None: the best that each has.
    `target`: the official judge. `size`, `host_executor`: as of kbsub.eval.run.runner.Plan.
    """

    precision: str = "fp32"
    device: str = "cuda"
    timeout_s: float = 300.0
    kernelbench: str | None = None
    target: str = TARGET
    cell: str | None = None
    stages: tuple[str, ...] = (OFFICIAL,)
    size: str = ""
    host_executor: bool = False
    pin: str = PIN

    def protocol(self) -> dict[str, Any]:
        """What decides the verdicts, for the keys: not the timeout, nor where the checkout lies, nor the cell."""
        said = {
            "target": self.target,
            "precision": self.precision,
            "device": self.device.split(":")[0],
            "pin": self.pin,
        }
        return {**said, **({"host_executor": True} if self.host_executor else {})}

    def kind(self, name: str) -> VerdictKind:
        return replace(KINDS[name], judge=self.target) if name == OFFICIAL else KINDS[name]


@dataclass(frozen=True)
class Job:
    """One sample with its source. stages: what is to be judged now. row: what there is of it already, with the
    verdicts that stand."""

    stem: str
    task: str
    level: int
    problem_id: int
    sample_id: int
    source: str
    settings: Settings
    stages: tuple[str, ...] = (OFFICIAL,)
    problem: str | None = None  # why the source cannot be judged at all
    run: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()


Machine = tuple[str | None, str | None]  # the GPU's name and torch's version


@functools.lru_cache(maxsize=8)
def this_machine(device: str) -> Machine:
    """What decides a verdict beside the protocol. No GPU for "cpu"; the version as the package's metadata says it."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return gpu_name(gpu_index(device)), torch


def stage_key(sha256: str, stage: str, settings: Settings) -> str:
    """What a stored verdict was given to: this source, this judge, this protocol, at the size that was asked for."""
    sized = "" if settings.kind(stage).as_written else settings.size
    said = [sha256, stage, settings.kind(stage).judge, settings.protocol(), sized]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def stands(row: Mapping[str, Any], stage: str, sha256: str, settings: Settings, machines: frozenset[Machine]) -> bool:
    """Whether the row's verdict of one stage need not be given again.

    What could not be run is tried again, unless the official verdict is why. What ran out of time is, when there is
    more time now. machines: those that may judge now, none where nobody knows.
    """
    said = row.get("stages", {}).get(stage)
    if said is None or said.get("key") != stage_key(sha256, stage, settings):
        return False
    status = said["status"]
    if status == Status.TIMEOUT.value and said.get("timeout_s", 0) < settings.timeout_s:
        return False
    if machines and (said.get("gpu"), said.get("torch")) not in machines:
        return False
    if status != Status.NOT_RUN.value:
        return True
    first = row["stages"].get(OFFICIAL, {}).get("status")
    return stage != OFFICIAL and OFFICIAL in settings.stages and first in {str(end) for end in ENDS_THE_ROW}


def judge(job: Job, isolate: Callable[..., Outcome] | None = None) -> dict[str, Any]:
    """The row of one job, judged here, each stage in a process of its own. Whatever the candidate does, a row comes
    back; with the verdicts that the job's row had already."""
    if job.settings.pin != PIN:
        words = f"the batch is of KernelBench at {job.settings.pin[:12]}, this worker's kbsub of {PIN[:12]}"
        return row_of(job, dict.fromkeys(job.stages, Outcome(Status.NOT_RUN, None, words, "", 0.0)))
    with _level(job.settings.cell):
        return _judge(job, isolate or run_isolated)


def _judge(job: Job, isolate: Callable[..., Outcome]) -> dict[str, Any]:
    row = _begun(job)
    try:
        plan = _plan(job)
    except TaskError as error:
        ended = Outcome(Status.NOT_RUN, None, str(error), "", 0.0)
        return row_of(job, dict.fromkeys(job.stages, ended), row)
    variables = runner.child_variables(plan)
    shared = SharedStages(lambda: [], job.stages, job.settings.timeout_s, variables)
    for name in job.stages:
        runner.judge_stage(plan, row, job.settings.kind(name), lambda event: None, shared, isolate)
    # Asked here, in the process whose environment the judge had: a worker of a cluster sees one GPU of several.
    return finished(job, row, gpu_uuid(gpu_index(job.settings.device)))


def row_of(job: Job, outcomes: Mapping[str, Outcome], row: runner.Row | None = None) -> dict[str, Any]:
    """The finished row of outcomes that somebody else has."""
    row = row or _begun(job)
    for name, outcome in outcomes.items():
        runner.record_outcome(row, job.settings.kind(name), outcome)
    return finished(job, row, None)


def _begun(job: Job) -> runner.Row:
    """The runner's row of this very text, with what stands of it."""
    row = runner.Row(Path(f"{job.stem.rpartition('/')[2]}.py"), job.stem, {}, source=job.source)
    row.unreadable = job.problem
    runner.begin(row, job.sha256, job.settings.precision, job.task, f"kernelbench@{PIN}")
    if job.row:
        kept = {name: end for name, end in job.row["stages"].items() if name not in job.stages}
        row.fields["stages"] = kept
        row.environment = job.row.get("environment")
        for name, end in kept.items():
            if name == OFFICIAL:
                row.fields |= {key: job.row[key] for key in _OF_OFFICIAL if key in job.row}
                row.fields["reason"] = job.row["message"] or None
                row.outcomes[name] = Outcome(Status(end["status"]), None, end["message"] or "", "", end["seconds"])
            elif name in KINDS and job.row.get(KINDS[name].key) is not None:
                row.fields[KINDS[name].key] = job.row[KINDS[name].key]
    return row


_OF_OFFICIAL = ("status", "official", "cpu_check", "timing", "reference", "floors")


def finished(job: Job, row: runner.Row, uuid: str | None) -> dict[str, Any]:
    """The row as it is stored: upstream's words under `official`, each other verdict under its own key."""
    fields = row.fields
    gpu, torch = this_machine(job.settings.device)
    for name in job.stages:
        fields["stages"][name] |= {
            "key": stage_key(job.sha256, name, job.settings),
            "timeout_s": job.settings.timeout_s,
            "gpu": gpu,
            "torch": torch,
        }
    ends = fields["stages"].values()
    first = fields["stages"].get(OFFICIAL, {})
    asked_now = sum(outcome.seconds for name, outcome in row.outcomes.items() if name in job.stages)
    return {
        "schema": SCHEMA,
        "protocol": job.settings.protocol(),
        "run": job.run,
        "level": job.level,
        "problem_id": job.problem_id,
        "sample_id": job.sample_id,
        "sha256": job.sha256,
        "precision": job.settings.precision,
        "status": fields["status"],
        "message": fields["reason"] or first.get("message") or "",
        **{key: fields.get(key) for key in ("official", "cpu_check")},
        "blind_spots": fields.get("blind_spots"),
        "environment": row.environment,
        "seconds": round(sum(end["seconds"] for end in ends), 3),  # of all its stages; seconds_now: of this time's
        "seconds_now": round(asked_now, 3),
        "phases_now": row.phases.get(OFFICIAL, {}),  # of the official judge, when it ran this time
        "confined": first.get("confined"),  # null where no line of the candidate ran
        "gpu_uuid": uuid or job.row.get("gpu_uuid"),
        "stages": fields["stages"],
        **{key: fields[key] for key in ("timing", "reference", "floors") if fields.get(key)},
        **{kind.key: fields[kind.key] for kind in named(fields) if kind.name != OFFICIAL},
    }


def _plan(job: Job) -> runner.Plan:
    settings = job.settings
    checkout = checkout_here(settings.kernelbench)
    task = task_of(job.task, checkout, settings.precision)
    return runner.Plan(
        task=task,
        task_text=job.task,
        candidates=(),
        stages=job.stages,
        precision=settings.precision,
        device=settings.device,
        kernelbench=checkout,
        timeout_s=settings.timeout_s,
        host_executor=settings.host_executor,
        size=settings.size,
        declared=Declared({}, {}, frozenset()),
        sizes=sizes_for(task, job.task, str(checkout) if checkout else None, settings.device, settings.size),
    )


@functools.lru_cache(maxsize=256)
def task_of(text: str, checkout: Path | None, precision: str) -> Task:
    return resolve_task(text, kernelbench=checkout, precision=precision)


@functools.lru_cache(maxsize=4)
def checkout_here(named_folder: str | None) -> Path | None:
    """The checkout of this machine: the one that was named, or its own where that is not here."""
    if named_folder is None or Path(named_folder).is_dir():
        return Path(named_folder) if named_folder else None
    from kbsub.adapters.checkout import CheckoutError, find_checkout

    try:
        return find_checkout().path
    except CheckoutError:
        return None  # the judge then says NOT_RUN, with the mending command


@contextmanager
def _level(level: str | None) -> Iterator[None]:
    """Everything that is started meanwhile is confined by the level of the batch, also on another machine."""
    before = os.environ.get(cell.LEVEL_VARIABLE)
    if level is not None:
        os.environ[cell.LEVEL_VARIABLE] = level
    try:
        yield
    finally:
        if level is not None:
            os.environ.pop(cell.LEVEL_VARIABLE)
            if before is not None:
                os.environ[cell.LEVEL_VARIABLE] = before
