"""The same batch on dask.distributed: one single-threaded worker a GPU, holding one `GPU`, so that no two timings
ever share a device. A local cluster by default, or a scheduler that is already running.

No scheduler of our own: queueing, retries on another worker and lost connections are dask's. Needs the extra `cluster`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kbsub.adapters.pin import PIN
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.run.batch import quiet_worker
from kbsub.eval.run.batch.build_ahead import Waiting, queue_of
from kbsub.eval.run.batch.job import Job, Machine, judge, row_of, this_machine
from kbsub.eval.run.batch.samples import BatchError
from kbsub.eval.run.batch.work import Batch
from kbsub.eval.run.machine_facts import gpu_count
from kbsub.eval.run.visible_devices import VARIABLE, DevicesError, devices_for

RESOURCE = "GPU"
# Deaths of its worker that a row survives (dask's own default, named here because rows depend on it).
LOST_WORKERS = 3
# What dask may write on the console between the rows: errors. Its twenty lines a worker about starting hide the rows.
LOG_LEVEL = logging.ERROR
LOG_VARIABLE = "DASK_LOGGING__DISTRIBUTED"  # dask's own way to set the level of its logger "distributed"


def require_distributed() -> None:
    """BatchError, with the command, when the extra is not installed; it names the module that is missing.

    dask.distributed may be there while something that it needs itself (tornado, msgpack) is not.
    """
    try:
        import distributed  # noqa: F401
    except ModuleNotFoundError as error:
        missing = "" if error.name == "distributed" else f", which cannot be imported: {error}"
        raise BatchError(
            f"several GPUs need dask.distributed{missing}; install it with: pip install 'kb-submissions[cluster]'"
        ) from error


def gpu_environments(gpus: Sequence[int]) -> list[dict[str, str]]:
    """The environment of each local worker: it sees one GPU, as its number 0.

    gpus: positions among the GPUs that this process may use itself, so that CUDA_VISIBLE_DEVICES=4,5 and positions 0
    and 1 give 4 and 5. BatchError, in words, when there are not as many.
    """
    try:
        visible = devices_for(max(gpus, default=-1) + 1, os.environ, gpu_count())
    except DevicesError as error:
        raise BatchError(str(error)) from error
    return [{VARIABLE: visible[gpu]} for gpu in gpus]


@contextmanager
def _quiet_workers(config: Mapping[str, Any]) -> Iterator[None]:
    """Worker processes started meanwhile, also those that a nanny restarts, write no more than dask's errors.

    dask sets its loggers up while it is imported, before a worker knows any option of ours: only an environment
    variable comes in time. A person's own logging settings stay as they are.
    """
    own = LOG_VARIABLE in os.environ or {"logging", "logging-file-config"} & {*config, *config.get("distributed", {})}
    if own:
        yield
        return
    os.environ[LOG_VARIABLE] = logging.getLevelName(LOG_LEVEL).lower()
    try:
        yield
    finally:
        os.environ.pop(LOG_VARIABLE, None)


@contextmanager
def local_client(environments: Sequence[Mapping[str, str]]) -> Iterator[Any]:
    """A client of a fresh local cluster, one worker process (with a nanny that restarts it) an environment."""
    require_distributed()
    import dask
    from distributed import Client, Nanny, Scheduler, SpecCluster

    workers = {
        number: {
            "cls": Nanny,
            "options": {
                "nthreads": 1,
                "resources": {RESOURCE: 1},
                "env": dict(environment),
                "host": "127.0.0.1",
                "preload": [quiet_worker.__name__],
            },
        }
        for number, environment in enumerate(environments)
    }
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "host": "127.0.0.1", "port": 0}}
    with (
        _quiet_workers(dask.config.config),
        dask.config.set({"distributed.scheduler.allowed-failures": LOST_WORKERS}),
        SpecCluster(workers=workers, scheduler=scheduler, silence_logs=LOG_LEVEL) as cluster,
        Client(cluster) as client,
    ):
        yield client


@contextmanager
def remote_client(address: str, timeout_s: float = 20.0) -> Iterator[Any]:
    """A client of a scheduler that is already running. BatchError when nobody answers, or no worker holds a GPU."""
    require_distributed()
    from distributed import Client

    try:
        client = Client(address, timeout=timeout_s)
    except (OSError, TimeoutError, ValueError) as error:
        raise BatchError(f"--scheduler {address}: no dask scheduler answers there: {error}") from error
    with client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        problem = worker_problem(workers)
        if problem:
            raise BatchError(f"--scheduler {address}: {problem}")
        yield client


def worker_problem(workers: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong with a cluster's workers for timing, and how to start one right; None when nothing is."""
    start = f"start each with: CUDA_VISIBLE_DEVICES=<i> dask worker ADDRESS --nthreads 1 --resources {RESOURCE}=1"
    holders = {name: facts for name, facts in workers.items() if facts.get("resources", {}).get(RESOURCE)}
    if not holders:
        return f"none of its {len(workers)} workers holds the resource {RESOURCE}; {start}"
    for name, facts in holders.items():
        if facts["resources"][RESOURCE] != 1 or facts.get("nthreads") != 1:
            held = f"{facts.get('nthreads')} threads and {facts['resources'][RESOURCE]} {RESOURCE}"
            return f"worker {name} has {held}; {start}"
    return None


def hello(device: str) -> dict[str, Any]:
    """What a worker says of itself, asked before it gets a row."""
    gpu, torch = this_machine(device)
    return {"pin": PIN, "gpu": gpu, "torch": torch}


class Workers:
    """The workers of a client that may judge: they hold a GPU, have this package, and its pin.

    refused: address -> why. Those that join later are asked when they are first seen.
    """

    def __init__(self, client: Any, device: str) -> None:
        self.client, self.device = client, device
        self.accepted: dict[str, Machine] = {}
        self.refused: dict[str, str] = {}

    def look(self) -> list[str]:
        """The addresses that may judge now."""
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        there = [name for name, facts in workers.items() if facts.get("resources", {}).get(RESOURCE)]
        new = [name for name in there if name not in self.accepted and name not in self.refused]
        if new:
            said = self.client.run(hello, self.device, workers=new, on_error="return")
            for name, answer in said.items():
                if not isinstance(answer, dict):
                    self.refused[name] = f"kbsub does not answer there: {type(answer).__name__}: {answer}"
                elif answer["pin"] != PIN:
                    self.refused[name] = f"its kbsub is of KernelBench at {answer['pin'][:12]}, this one of {PIN[:12]}"
                else:
                    self.accepted[name] = (answer["gpu"], answer["torch"])
        return [name for name in there if name in self.accepted]

    def machines(self) -> frozenset[Machine]:
        return frozenset(self.accepted.values())

    def notes(self) -> list[str]:
        return [f"worker {name} gets no row: {why}" for name, why in self.refused.items()]


def run_on(client: Any, builders: int = 0) -> Any:
    """The `run` of kbsub.eval.run.batch.work.evaluate on this client: rows come back as they are finished.

    builders: of builds on this machine, where its workers run too.
    """

    def run(batch: Batch) -> Iterator[tuple[Job, dict[str, Any]]]:
        name = uuid.uuid4().hex[:8]  # a key of its own, so that an earlier run's result is never handed back
        workers = Workers(client, batch.settings.device)
        flying: dict[Any, Job] = {}
        events: queue.Queue[Any] = queue.Queue()  # a finished future, or None: look again

        def fill(waiting: Waiting) -> None:
            # No more rows than workers are handed out: dask blames the death of a worker on every row it was given,
            # and a row that only waited there must not be given up with the one that killed it.
            addresses = workers.look()
            while len(flying) < max(len(addresses), 1) and (todo := waiting.take(wait=False)) is not None:
                job = batch.job(todo)
                only = {"workers": addresses} if workers.refused and addresses else {}
                key = f"{job.stem}-{name}"
                future = client.submit(judge, job, key=key, resources={RESOURCE: 1}, pure=False, **only)
                flying[future] = job
                future.add_done_callback(events.put)

        with queue_of(batch, builders) as waiting:
            waiting.listen(lambda: events.put(None))
            fill(waiting)
            while flying or waiting.left():
                began = time.monotonic()
                future = _next(events)
                if not flying:
                    batch.waited_s += time.monotonic() - began
                if future is not None:
                    job = flying.pop(future)
                    row = _row(job, future)
                    future.release()
                fill(waiting)
                if future is not None:
                    yield job, row

    return run


def _next(events: queue.Queue[Any]) -> Any:
    """The next event; Ctrl-C is heard while there is none."""
    while True:
        with contextlib.suppress(queue.Empty):
            return events.get(timeout=0.5)


def _row(job: Job, future: Any) -> dict[str, Any]:
    """The row of a finished future; one that dask gave up on, or whose worker raised, is a row too."""
    error = future.exception()
    if error is None:
        row: dict[str, Any] = future.result()
        return row
    text = f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
    lost = Outcome(Status.CRASHED, None, f"lost with its workers: {text}", "", 0.0)
    return row_of(job, dict.fromkeys(job.stages, lost))
