"""Builds what takes long (`load_inline`: half a minute of nvcc a file) on all cores while the GPU judges other rows.

A build is a child that only executes the file, as upstream does, in the candidate's own cell, with its own build folder
and no GPU in sight; the judge then finds the extension there. A build that fails costs nothing: the judge meets the
same error and says it. Imports no torch.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kbsub.eval.process.isolated import Outcome, run_isolated
from kbsub.eval.run.batch.job import Job, checkout_here, judge
from kbsub.eval.run.batch.work import Batch, Todo
from kbsub.eval.run.machine_facts import gpu_capability, gpu_index
from kbsub.eval.tasks.cell import cell_of

TARGET = "kbsub.eval.run.batch.build_child:judge"
BUILDS = re.compile(r"cpp_extension|load_inline")


def cores() -> int:
    """Builds that may run at once: every core that this process may use but the one that judges."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if hasattr(os, "sched_getaffinity") else 1


class Waiting:
    """The samples that are to do, handed out in order; one that is still being built waits, and others go first."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.stop = batch, threading.Event()
        self._changed = threading.Condition()
        self._ready = list(range(len(batch.jobs)))  # a heap of places in batch.jobs
        self._building: set[int] = set()
        self._listeners: list[Callable[[], None]] = []

    def take(self, *, wait: bool = True) -> Todo | None:
        """The next sample; None when there is none (or, without `wait`, none now). Waiting is counted in the batch."""
        with self._changed:
            began = time.monotonic()
            while not self._ready and self._building and wait:
                self._changed.wait(0.5)  # short, so that Ctrl-C is heard
            if wait:
                self.batch.waited_s += time.monotonic() - began
            return self.batch.jobs[heapq.heappop(self._ready)] if self._ready else None

    def left(self) -> int:
        with self._changed:
            return len(self._ready) + len(self._building)

    def listen(self, heard: Callable[[], None]) -> None:
        """`heard` is called, from another thread, whenever a sample has become ready."""
        self._listeners.append(heard)

    def hold(self, places: list[int]) -> None:
        """These wait until `release` is said of each."""
        with self._changed:
            self._building |= set(places)
            self._ready = [place for place in self._ready if place not in self._building]
            heapq.heapify(self._ready)

    def release(self, place: int) -> None:
        with self._changed:
            self._building.discard(place)
            heapq.heappush(self._ready, place)
            self._changed.notify_all()
        for heard in self._listeners:
            heard()


@contextmanager
def queue_of(batch: Batch, builders: int = 0, build: Callable[..., Outcome] | None = None) -> Iterator[Waiting]:
    """The queue of a batch, with `builders` builds at once meanwhile; 0: whoever judges builds. build: for tests."""
    queue = Waiting(batch)
    places = [place for place, todo in enumerate(batch.jobs) if builders and BUILDS.search(todo.sample.read()[0])]
    queue.hold(places)
    turns, lock = iter(places), threading.Lock()

    def work() -> None:
        while not queue.stop.is_set():
            with lock:
                place = next(turns, None)
            if place is None:
                return
            with contextlib.suppress(Exception):  # the judge meets the same fault, and says it in a row
                (build or build_one)(batch.job(batch.jobs[place]), builders, queue.stop)
                batch.built += 1
            queue.release(place)

    threads = [threading.Thread(target=work, name="build", daemon=True) for _ in range(min(builders, len(places)))]
    for thread in threads:
        thread.start()
    try:
        yield queue
    finally:
        queue.stop.set()
        for thread in threads:
            thread.join(10.0)


def build_one(job: Job, builders: int, stop: threading.Event) -> Outcome:
    """Execute the file of one job in its cell until its extensions are there. A killed build is tidied up after."""
    checkout = checkout_here(job.settings.kernelbench)
    cell = replace(cell_of([job.sha256], job.task, checkout), level=job.settings.cell)
    payload = {
        "candidate_source": job.source,
        "task": job.task,
        "precision": job.settings.precision,
        "kernelbench": str(checkout) if checkout else None,
    }
    # No GPU is touched, so nothing that is timed meanwhile shares it; the flags are those that its presence gives.
    variables = {"CUDA_VISIBLE_DEVICES": "", "MAX_JOBS": str(max(1, cores() // builders))}
    capability = gpu_capability(gpu_index(job.settings.device))
    if "TORCH_CUDA_ARCH_LIST" not in os.environ and capability:
        variables["TORCH_CUDA_ARCH_LIST"] = f"{capability[0]}.{capability[1]}+PTX"
    outcome = run_isolated(
        TARGET, payload, timeout_s=job.settings.timeout_s, env=variables, cell=cell, cancelled=stop.is_set
    )
    if outcome.value is None and not stop.is_set():  # it may have died with torch's lock file in its hand
        run_isolated(TARGET, {**payload, "only_tidy": True}, timeout_s=60.0, env=variables, cell=cell)
    return outcome


def run_here(batch: Batch, builders: int = 0) -> Iterator[tuple[Job, dict[str, Any]]]:
    """One after another on this machine: timings never share its GPU."""
    with queue_of(batch, builders) as queue:
        while (todo := queue.take()) is not None:
            job = batch.job(todo)
            yield job, judge(job)
