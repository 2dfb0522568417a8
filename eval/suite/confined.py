"""A candidate of the suite in a process of its own: started once, used for all its cases, started anew when it dies.

Holds workers and counts their ends. Knows no comparison: what comes back is only values, which the judge compares.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from kbsub.adapters.task import SEED, Task
from kbsub.eval.process.cell import Cell, candidate_folder
from kbsub.eval.process.isolated import Status
from kbsub.eval.remote.model import CandidateRaised, RemoteError, RemoteModel, Reply, Worker, WorkerFailure
from kbsub.eval.remote.values import ValueProblem
from kbsub.eval.suite.inputs import NotApplicable
from kbsub.eval.suite.matching import StateMatch

MAX_FAILURES = 3  # of one candidate's process (one, when it is a timeout); its other cases are then lost
START_S, CALL_S, MANY_CALLS_S, END_S = 600.0, 120.0, 300.0, 10.0
T = TypeVar("T")


class Lost(Exception):
    """The candidate's process has failed too often; its remaining cases are not run."""


class Confined:
    """One candidate and its worker. `start` raises what Worker.start raises; end it with `close`."""

    def __init__(
        self, source: str, task: Task, device: torch.device, hosted: bool, *, workers: int | None = None
    ) -> None:
        self.source, self.task, self.device, self.hosted = source, task, device, hosted
        self.workers = workers  # processes that execute kernels, where it is hosted
        self.cell = Cell(candidate_folder(hashlib.sha256(source.encode()).hexdigest()))
        self.failures: list[WorkerFailure] = []
        self.peak_bytes: int | None = None  # the most that one of its processes took, by its own word
        self.shared_bytes = 0
        self._worker: Worker | None = None
        self._confined: dict[str, Any] | None = None

    def start(self) -> Worker:
        """The worker, started where there is none. Raises Lost, CandidateRaised or WorkerFailure."""
        if self._worker is None:
            if len(self.failures) >= MAX_FAILURES or any(each.status == Status.TIMEOUT for each in self.failures):
                raise Lost(f"its process had failed before: {self.failures[-1]}")
            self._worker = Worker.start(
                self.source,
                self.task,
                cell=self.cell,
                device=self.device,
                host_cache=host_cache() if self.hosted else None,
                hosted="SMALL_LIMITS" if self.hosted else None,
                workers=self.workers,
                timeout_s=START_S,
            )
            self._worker.timeout_s = CALL_S
            self._confined = self._worker.confined()
        return self._worker

    def failed(self, failure: WorkerFailure) -> None:
        """The process has ended: let it go. The next `start` makes another."""
        self.failures.append(failure)
        self.close()

    def record(self) -> Mapping[str, Any]:
        """What a result says of where the candidate ran."""
        return {"process": "worker", "confined": self._confined}

    def close(self) -> None:
        if self._worker is not None:
            self.shared_bytes = max(self.shared_bytes, self._worker.shared_bytes)
            with contextlib.suppress(RemoteError):  # a process that has failed says nothing more
                self.peak_bytes = max(self.peak_bytes or 0, self._worker.peak_bytes(END_S))
            self._worker.close()
            self._worker = None


class Instance:
    """A ModelNew in a worker, called as a model is. `mutated`: indices of the inputs that its last call changed.
    `match`: which of its tensors are the reference's, None where that is not known."""

    def __init__(self, remote: RemoteModel) -> None:
        self.remote = remote
        self.match: StateMatch | None = None
        self.mutated: tuple[int, ...] = ()

    def __call__(self, *inputs: Any) -> Any:
        return self._value(lambda: self.remote.call(inputs, seed=SEED))

    def kept(self, inputs: list[Any]) -> Any:
        """As a call; its process holds what it returned for `as_it_is`."""
        return self._value(lambda: self.remote.call(inputs, seed=SEED, keep=0))

    def as_it_is(self, inputs: list[Any]) -> Any:
        """What `kept` returned, as it is now. inputs: those of the last call."""
        return sent(lambda: self.remote.read(0, inputs)).value

    def on_side_stream(self, inputs: list[Any]) -> Any:
        return self._value(lambda: self.remote.on_side_stream(inputs))

    def repeat(self, inputs: list[Any], calls: int) -> None:
        sent(lambda: self.remote.repeat(inputs, calls, MANY_CALLS_S))

    def capture(self, inputs: list[Any]) -> None:
        sent(lambda: self.remote.capture(inputs))

    def replay(self, inputs: list[Any]) -> Any:
        return self._value(lambda: self.remote.replay(inputs))

    def _value(self, ask: Callable[[], Reply]) -> Any:
        reply = sent(ask)
        self.mutated = reply.mutated
        return reply.value


def host_cache() -> str:
    """The folder of the host executor's compiled runtime, which is copied into a cell."""
    from kbsub.eval.host_executor.build import cache_folder

    return str(cache_folder())


def sent(ask: Callable[[], T], not_applicable: type[Exception] = NotApplicable) -> T:
    """The answer of `ask`; `not_applicable` is raised where a tensor of the judge's own cannot cross to the worker."""
    try:
        return ask()
    except CandidateRaised:
        raise
    except ValueProblem as why:  # the judge's own tensor: no fault of the candidate's
        raise not_applicable(f"this input cannot be sent to the candidate's process: {why}") from why
