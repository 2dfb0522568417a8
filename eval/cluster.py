"""The same batch on dask.distributed: one single-threaded worker a GPU, holding one `GPU`, so that no two timings
ever share a device. A local cluster by default, or a scheduler that is already running.

No scheduler of our own: queueing, retries on another worker and lost connections are dask's. Needs the extra `cluster`.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kbsub.adapters.isolation import Outcome, Status
from kbsub.eval.batch import BatchError, Job, judge, row_of
from kbsub.eval.machine_facts import gpu_count
from kbsub.eval.visible_devices import VARIABLE, DevicesError, devices_for

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
            "options": {"nthreads": 1, "resources": {RESOURCE: 1}, "env": dict(environment), "host": "127.0.0.1"},
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


def gpu_slots(workers: Mapping[str, Mapping[str, Any]]) -> int:
    """How many rows may run at once: one for each worker that holds a GPU."""
    return sum(bool(facts.get("resources", {}).get(RESOURCE)) for facts in workers.values())


def run_on(client: Any) -> Any:
    """The `run` of kbsub.eval.batch.evaluate on this client: rows come back as they are finished."""

    def run(jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        from distributed import as_completed

        batch = uuid.uuid4().hex[:8]  # a key of its own, so that an earlier run's result is never handed back
        waiting = list(reversed(jobs))
        flying: dict[Any, Job] = {}
        done = as_completed([])
        slots = 1

        def fill() -> None:
            # No more rows than workers are handed out: dask blames the death of a worker on every row it was given,
            # and a row that only waited there must not be given up with the one that killed it.
            nonlocal slots
            slots = max(slots, gpu_slots(client.scheduler_info(n_workers=-1)["workers"]))
            while waiting and len(flying) < slots:
                job = waiting.pop()
                future = client.submit(judge, job, key=f"{job.stem}-{batch}", resources={RESOURCE: 1}, pure=False)
                flying[future] = job
                done.add(future)

        fill()
        for future in done:
            job = flying.pop(future)
            row = _row(job, future)
            future.release()
            fill()
            yield job, row

    return run


def _row(job: Job, future: Any) -> dict[str, Any]:
    """The row of a finished future; one that dask gave up on, or whose worker raised, is a row too."""
    error = future.exception()
    if error is None:
        row: dict[str, Any] = future.result()
        return row
    text = f"{type(error).__name__}: {str(error).splitlines()[0][:500]}"
    return row_of(job, Outcome(Status.CRASHED, None, f"lost with its workers: {text}", "", 0.0))
