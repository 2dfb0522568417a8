"""What a timing method says of itself, once: the plan, the child, `--methods` and the tables read it from here.

A method is handed one scene with its programs and measures them all. Must not import torch: the parent and the reports
read registrations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kbsub.eval.bench.timing import Attempt, Series, TimingProtocol

if TYPE_CHECKING:
    from kbsub.eval.bench.machine import CpuMachine, CudaMachine
    from kbsub.eval.bench.scene import BenchScene


class Timed(Protocol):
    """One program under the clock. `own_graphs`: it replays CUDA graphs itself, so no graph can be made of it."""

    @property
    def call(self) -> Callable[..., Any]: ...

    @property
    def own_graphs(self) -> bool: ...


@dataclass(frozen=True)
class UpstreamTiming:
    """KernelBench's own, from the checkout: the timing function of each method, by name, and get_timing_stats.

    Taken from its module before any candidate is loaded and could replace them.
    """

    functions: Mapping[str, Callable[..., list[float]]]
    stats: Callable[[list[float]], Mapping[str, Any]]


class TimedScene(Protocol):
    """What a method gets: one shape and precision with the programs that are still in the run.

    Every call into a program goes through `attempt`; one that fails leaves the run and the others go on.
    """

    @property
    def machine(self) -> CudaMachine | CpuMachine: ...

    @property
    def scene(self) -> BenchScene: ...

    @property
    def protocol(self) -> TimingProtocol: ...

    @property
    def programs(self) -> Mapping[str, Timed]: ...

    @property
    def attempt(self) -> Attempt: ...

    @property
    def upstream(self) -> UpstreamTiming | None: ...

    def out_of_time(self) -> bool: ...


@dataclass(frozen=True)
class Measured:
    """The samples (ms) and orders, and how one program's samples become its entry in a result file."""

    series: Series
    statistics: Callable[[str, list[float]], dict[str, Any]]


@dataclass(frozen=True)
class TimingMethod:
    """One method. `name` is what --methods takes and the key under `timing` in a result file.

    title: what it is, in a few words, for --help. place: where it stands in lists and columns, and when it runs.
    in_all: part of `--methods all`. upstream: a function of KernelBench's checkout, not made here.
    cold: what tables say of it where it is measured with a cold L2; "" where it is not.
    rehearsal: its key when it runs on a CPU, which no other method shares, as such times compare with nothing; None:
    it does not run there. compared: programs are compared by it, the first one in order that both have.
    """

    name: str
    title: str
    measure: Callable[[TimedScene], Measured]
    place: int = 100
    in_all: bool = True
    upstream: bool = False
    cold: str = ""
    rehearsal: str | None = None
    compared: bool = False

    def key(self, *, on_gpu: bool) -> str | None:
        """Its key in a result file made on a GPU or on a CPU; None where it does not run."""
        return self.name if on_gpu else self.rehearsal

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key it may have."""
        return (self.name,) if self.rehearsal is None else (self.name, self.rehearsal)
