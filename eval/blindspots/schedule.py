"""The parent's half: which tasks, several children at once within the GPU's memory, what is done again alone.

A child gets a few tasks of a like size (torch and CUDA take seconds to start). A record is written as soon as it
comes. A child that dies costs the task it was at: the others of its bundle go to another child. A task that ran out
of its share of the memory is tried again with a larger one, at last with all of it. Imports no torch.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kbsub.adapters.environment import project_commit
from kbsub.adapters.task import Task, TaskError
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.blindspots import VERSION, BlindSpots, file_name, read_blindspots, write_blindspots
from kbsub.eval.results.model import ResultError
from kbsub.eval.tasks.sizes import OFFICIAL, Costs, Size, known_sizes, size_payload

JUDGE = "kbsub.eval.blindspots.judge:judge"
THREADS_VARIABLE = "KBSUB_DRAW_THREADS"  # read by kbsub.eval.blindspots.draw
CONTEXT_BYTES = 1 << 30  # what a process takes of a GPU before it does anything
COMPARING_BYTES = 3 << 30  # two chunks in float64, and a convolution's workspace
MORE = 3  # times its share of the GPU for a task that it was too small for, until it has the GPU to itself
UNKNOWN_BYTES = 24 << 30
LARGE_INPUTS = 4 << 30  # bytes; such tasks come last
MOST_DEAD = 3
GRACE_S = 90.0  # for a child to start, and for what cannot be stopped between two variants
_BUNDLES = ((8 << 30, 10), (16 << 30, 5), (32 << 30, 3))  # (GPU bytes of a task up to, tasks of a child)


class ScheduleError(Exception):
    """The run cannot go on; the message says why."""


@dataclass(frozen=True)
class Wanted:
    """One task to judge at one size, and what that takes."""

    task: str  # "level1_37"
    sha256: str
    name: str
    size: Size
    input_bytes: int = 0
    gpu_bytes: int = 0

    def payload(self) -> dict[str, Any]:
        return {"task": self.task, "size": size_payload(self.name, self.size)}


@dataclass(frozen=True)
class Terms:
    """What all children of a run have in common. total_bytes: GPU memory to share out; 0 on a CPU."""

    kernelbench: str
    device: str
    precision: str
    limit_s: float
    deadline: float  # time.time()
    workers: int
    total_bytes: int

    def payload(self, tasks: Sequence[Wanted], memory_bytes: int | None) -> dict[str, Any]:
        common = {"kernelbench": self.kernelbench, "device": self.device, "precision": self.precision}
        more = {"limit_s": self.limit_s, "deadline": self.deadline, "memory_bytes": memory_bytes}
        return {"tasks": [each.payload() for each in tasks], **common, **more}


Runner = Callable[..., Outcome]
Heard = Callable[[BlindSpots], None]


def is_current(path: Path, wanted: Wanted, limit_s: float) -> bool:
    """Whether a stored record is of this text, size and version, and more time or memory would make no other."""
    try:
        record = read_blindspots(path)
    except ResultError:
        return False
    same = (record.version, record.sha256, record.size, record.values) == (
        VERSION,
        wanted.sha256,
        wanted.name,
        wanted.size.values,
    )
    late = any(row.why == "time limit" for row in record.not_tried) or any(r.passed is None for r in record.variants)
    return same and (not late or record.granted_s >= limit_s) and (record.alone or not record.out_of_memory)


def wanted(task: Task, name: str) -> Wanted:
    """The task at its size of that name. TaskError where there is none."""
    known = known_sizes(task)
    if known is None or name not in known.sizes:
        if name != OFFICIAL:
            raise TaskError(f"{task.slug}: no {name} size is recorded; kbsub measure sizes records them")
        return Wanted(task.slug, task.sha256, name, Size(), 0, UNKNOWN_BYTES)
    size = known.sizes[name]
    inputs = size.costs.inputs if size.costs else 0
    return Wanted(task.slug, task.sha256, name, size, inputs, gpu_bytes(size.costs))


def gpu_bytes(costs: Costs | None) -> int:
    """What a task takes of a GPU: inputs, output, two models, and one more run, on another draw or in float64.

    A run holds two results of the largest size, most often. A wrong guess costs a second run of that task.
    """
    if costs is None:
        return UNKNOWN_BYTES
    held = costs.inputs + costs.outputs + 2 * costs.parameters
    plain = 2 * costs.inputs + costs.outputs + 2 * costs.largest
    truth = 2 * costs.inputs + 3 * costs.parameters + 4 * costs.largest + costs.outputs
    return held + max(plain, truth) + COMPARING_BYTES + CONTEXT_BYTES


def bundles(tasks: Sequence[Wanted]) -> list[list[Wanted]]:
    """Tasks of a like size together; small ones first, those with inputs of more than 4 GB last."""
    ordered = sorted(tasks, key=lambda each: (each.input_bytes > LARGE_INPUTS, each.gpu_bytes))
    found: list[list[Wanted]] = []
    for each in ordered:
        most = next((count for limit, count in _BUNDLES if each.gpu_bytes <= limit), 2)
        if found and len(found[-1]) < most and _like(found[-1][0], each):
            found[-1].append(each)
        else:
            found.append([each])
    return found


def _like(one: Wanted, other: Wanted) -> bool:
    large = [each.input_bytes > LARGE_INPUTS for each in (one, other)]
    return large[0] == large[1] and other.gpu_bytes <= max(1.5 * one.gpu_bytes, _BUNDLES[0][0])


def cores() -> int:
    """Processors that this process may use: the affinity, and the container's quota, where there are such."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(count, round(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max"
        return count


class Queue:
    """What is still to be done, and how much of the GPU is taken. All methods under one lock."""

    def __init__(self, work: list[list[Wanted]], terms: Terms) -> None:
        self.work, self.terms = work, terms
        self.taken = self.running = 0
        self.changed = threading.Condition()
        self.dead = 0  # children that ended before any task
        self.commit = project_commit()

    def never_began(self, outcome: Outcome) -> None:
        """Counts a child that got to no task; ScheduleError after the third: something is wrong with all of them."""
        with self.changed:
            self.dead += 1
            if self.dead >= MOST_DEAD:
                self.work = []
                raise ScheduleError(f"no child gets as far as a task: {outcome.status}: {outcome.message}")

    def share_of(self, bundle: Sequence[Wanted]) -> int:
        return max(1, min(max(each.gpu_bytes for each in bundle), self.terms.total_bytes))

    def next(self) -> list[Wanted] | None:
        """A bundle that fits beside what runs; None when all is done, or the time is up."""
        with self.changed:
            while True:
                if time.time() >= self.terms.deadline:
                    return None
                for at, bundle in enumerate(self.work):
                    if self.taken + self.share_of(bundle) <= self.terms.total_bytes or not self.running:
                        self.running += 1
                        self.taken += self.share_of(bundle)
                        return self.work.pop(at)
                if not self.work and not self.running:
                    return None
                self.changed.wait(1.0)

    def done(self, share: int, rest: list[Wanted], again: list[Wanted]) -> None:
        """`rest`: what its child did not come to; `again`: what its share was too small for."""
        with self.changed:
            self.running -= 1
            self.taken -= share
            if rest:
                self.work.insert(0, rest)
            self.work += [[replace(each, gpu_bytes=MORE * share)] for each in again]
            self.changed.notify_all()


def judge_all(tasks: Sequence[Wanted], terms: Terms, out: Path, heard: Heard, run: Runner = run_isolated) -> list[str]:
    """Judges the tasks; a record each in `out`. Returns those that the deadline left undone."""
    queue = Queue(bundles(tasks), terms)
    finished: set[str] = set()

    def work() -> None:
        while (bundle := queue.next()) is not None:
            rest: list[Wanted] = []
            again: list[Wanted] = []
            try:
                rest, again = _bundle(bundle, queue, out, heard, finished, run)
            finally:
                queue.done(queue.share_of(bundle), rest, again)

    with ThreadPoolExecutor(terms.workers) as pool:
        for job in [pool.submit(work) for _ in range(terms.workers)]:
            job.result()
    return [each.task for each in tasks if each.task not in finished]


def _bundle(
    bundle: list[Wanted], queue: Queue, out: Path, heard: Heard, finished: set[str], run: Runner
) -> tuple[list[Wanted], list[Wanted]]:
    """(what its child did not come to, what is to be done again with more memory)."""
    terms, share = queue.terms, queue.share_of(bundle)
    alone = share == terms.total_bytes
    by_name = {each.task: each for each in bundle}
    at: list[str] = []
    again: list[Wanted] = []

    def event(found: dict[str, Any]) -> None:
        if found.get("stage") == "task":
            at.append(found["case"])
        elif found.get("stage") == "record":
            keep(found["record"])

    def keep(content: Mapping[str, Any]) -> None:
        record = BlindSpots.model_validate(content)
        if terms.device != "cpu":
            record.alone = alone
        if record.environment is not None:
            record.environment.project_commit = queue.commit
        wanted = by_name.pop(record.task)
        if record.out_of_memory and not alone and terms.device != "cpu":
            again.append(wanted)
        write_blindspots(out / file_name(record.task, terms.precision), record)
        finished.add(record.task)
        heard(record)

    on_cpu = terms.device == "cpu"
    memory = None if on_cpu else share - CONTEXT_BYTES // 2
    left = max(1.0, terms.deadline - time.time())
    beside = min(terms.workers, max(1, terms.total_bytes // share))  # so many like it fit at once
    threads = str(max(1, cores() // beside))
    variables = {THREADS_VARIABLE: threads, "OMP_NUM_THREADS": threads}
    variables["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # level 4: nothing is downloaded
    timeout = min(len(bundle) * terms.limit_s, left) + GRACE_S
    outcome = run(JUDGE, terms.payload(bundle, memory), timeout_s=timeout, on_progress=event, env=variables)
    if time.time() > terms.deadline and outcome.status is Status.TIMEOUT:
        return [], again  # the run's time was up, not the task's
    if by_name and at and at[-1] in by_name:  # it ended in the middle of this one
        died = by_name[at[-1]]
        keep(_ended(died, terms, outcome))
    elif by_name and outcome.value is None:  # it never began: the first task has to say so, or this would never end
        queue.never_began(outcome)
        keep(_ended(next(iter(by_name.values())), terms, outcome))
    return list(by_name.values()), again


def _ended(wanted: Wanted, terms: Terms, outcome: Outcome) -> dict[str, Any]:
    """The record of a task whose child ended in the middle: no variants, and how it ended."""
    words = "out of memory" if outcome.status.value == "OUT_OF_MEMORY" else f"{outcome.status}: {outcome.message}"[:300]
    head = {"task": wanted.task, "name": wanted.task, "sha256": wanted.sha256, "provenance": "", "tolerance": 0.0}
    more = {
        "precision": terms.precision,
        "size": wanted.name,
        "values": wanted.size.values,
        "seeds": [],
        "another_seed": 0,
    }
    return {**head, **more, "error": words, "seconds": round(outcome.seconds, 1)}
