"""What the timing methods share: the protocol's numbers, shuffled rounds of replays, and what is said of samples.

Everything in this file is protocol: which program runs when, how often, between which events, and what is checked in
between. What a program is, where its inputs come from and which device runs it, arrives through small interfaces, so
that the protocol itself is tested without a GPU. The methods are in eval/bench/methods. All times are milliseconds.
"""

from __future__ import annotations

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from kbsub.eval.process.isolated import Status

GRAPH_REPLAY = "graph_replay"
Sampled = TypeVar("Sampled")

CHANGED_EVERY = 4  # rounds between two replays on a changed input: one costs a replay and a call of the reference


@dataclass(frozen=True)
class TimingProtocol:
    """The numbers of the published experiment (graph replay) and of upstream's scripts (its own methods)."""

    rounds: int = 35
    replays: int = 5  # between two events; a sample is their mean
    warmups: int = 8
    order_seed: int = 913
    trials: int = 100  # of each upstream method, spread over the passes below
    passes: int = 10  # upstream's methods, too, are interleaved: 10 shuffled passes of 10 trials
    upstream_warmups: int = 3  # as eval_kernel_against_ref uses for a candidate; the same for baselines
    # Trials not counted: the first two allocate (upstream empties the allocator's cache before them, and its loop holds
    # one output while the next is made); in one call of 100 trials that does not show, in ten calls of 10 it would.
    discarded: int = 2
    input_sets: int = 3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name != "order_seed" and value < 1:
                raise ValueError(f"timing protocol: {name} is {value}, it must be at least 1")


class Captured(Protocol):
    """One program recorded on fixed input buffers: replay() runs it again, output() is where it writes."""

    def replay(self) -> None: ...

    def output(self) -> Any: ...


class Machine(Protocol):
    """The device under the clock (eval/bench/machine.py)."""

    def synchronize(self) -> None: ...

    def elapsed_ms(self, replay: Callable[[], None], count: int) -> float: ...

    def poison(self, output: Any) -> None: ...


class TimedInputs(Protocol):
    """Inputs, reference outputs and checks of one shape and precision (eval/bench/scene.py, eval/bench/ring.py)."""

    def load(self, round_index: int) -> int: ...

    def load_pass(self, pass_index: int) -> tuple[list[Any], int]: ...

    def check(self, name: str, output: Any, set_index: int) -> str | None: ...

    def check_changed(self, name: str, program: Captured, set_index: int, seed: int) -> str | None: ...


class Dropped(Exception):
    """A program that leaves the run: its status and why. The others go on."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Series:
    """What one method measured: samples by round for every program still there, and the order of every round."""

    samples: dict[str, list[float]]
    names: list[str]
    orders: list[list[int]] = field(default_factory=list)  # indices into names
    passes: dict[str, list[float]] = field(default_factory=dict)  # upstream's methods: the median of each pass
    seconds: float = 0.0


Attempt = Callable[[str, str, Callable[[], Any]], tuple[bool, Any]]
"""attempt(name, stage, action): runs the action for one program; (False, None) when that program was dropped by it."""


def round_orders(count: int, rounds: int, seed: int) -> list[list[int]]:
    """The order of every round: a fresh shuffle of range(count), all from one `random.Random(seed)`."""
    shuffler = random.Random(seed)
    orders = []
    for _ in range(rounds):
        order = list(range(count))
        shuffler.shuffle(order)
        orders.append(order)
    return orders


def walk(
    series: Series,
    orders: Sequence[Sequence[int]],
    stage: str,
    sample: Callable[[str, int], Sampled],
    keep: Callable[[str, Sampled], None],
    attempt: Attempt,
    out_of_time: Callable[[], bool],
) -> Series:
    """Take `sample(name, round)` of every program that is still there once a round, in that round's order.

    `keep` puts a sample into the series; a program whose sample failed is asked no more. When the time is up, the walk
    ends after a whole round, so that the samples stay paired. stage: what messages call a round, before its number.
    """
    started = time.monotonic()
    gone: set[str] = set()
    for index, order in enumerate(orders):
        if index and out_of_time():
            break
        series.orders.append(list(order))
        for name in (series.names[position] for position in order):
            if name in gone:
                continue
            kept, value = attempt(name, f"{stage} {index}", functools.partial(sample, name, index))
            if kept:
                keep(name, value)
            else:
                gone.add(name)
    series.seconds = time.monotonic() - started
    return series


def replay_rounds(
    captured: Mapping[str, Captured],
    machine: Machine,
    scene: TimedInputs,
    protocol: TimingProtocol,
    attempt: Attempt,
    out_of_time: Callable[[], bool] = lambda: False,
    method: str = GRAPH_REPLAY,
) -> Series:
    """Graph replay: each round loads new input contents, then times every program once, in that round's order.

    A sample is the time of `replays` replays between two events, divided by their number. The device is idle before
    the first event; the output is overwritten with NaN before it and checked after the last; in some rounds one more
    replay, not timed, shows that the program computes (stale_answer.py). method: what messages call these rounds.
    """

    def sample(name: str, index: int) -> float:
        program = captured[name]
        shown = scene.load(index)  # for each program: one that wrote to its input has not spoiled this one's
        machine.poison(program.output())
        machine.synchronize()
        sample_ms = machine.elapsed_ms(program.replay, protocol.replays) / protocol.replays
        complaint = scene.check(name, program.output(), shown)
        asked = index % CHANGED_EVERY == CHANGED_EVERY - 1 or index == protocol.rounds - 1
        if not complaint and asked:
            complaint = scene.check_changed(name, program, shown, index)
        if complaint:
            raise Dropped(Status.INCORRECT_NUMERICAL, f"{method}, round {index}: {complaint}")
        return sample_ms

    series = Series({name: [] for name in captured}, list(captured))

    def keep(name: str, sample_ms: float) -> None:
        series.samples[name].append(sample_ms)

    orders = round_orders(len(captured), protocol.rounds, protocol.order_seed)
    return walk(series, orders, f"{method} round", sample, keep, attempt, out_of_time)


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """(q25, median, q75) as the published protocol takes them: a[n//4], the median, a[3n//4] of the sorted samples."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 4], statistics.median(ordered), ordered[3 * len(ordered) // 4]


def replay_statistics(samples: Sequence[float], protocol: TimingProtocol) -> dict[str, Any]:
    """The `.timing` entry of a replay in a result file; every sample kept, sample i from round i."""
    q25, median, q75 = quartiles(samples)
    return {
        "median_ms": median,
        "q25_ms": q25,
        "q75_ms": q75,
        "samples_ms": list(samples),
        "order_seed": protocol.order_seed,
        "replays": protocol.replays,
        "warmups": protocol.warmups,
        **spread(samples),
    }


def spread(samples: Sequence[float]) -> dict[str, Any]:
    """Relative interquartile range, and how many samples a 0.5% standard error of the mean would take."""
    q25, median, q75 = quartiles(samples)
    mean = statistics.fmean(samples)
    deviation = statistics.stdev(samples) if len(samples) > 1 else math.inf
    needed = math.ceil((deviation / (0.005 * mean)) ** 2) if math.isfinite(deviation) else None
    needed = None if needed is None else max(needed, 1)
    return {"relative_iqr": (q75 - q25) / median, "samples_for_half_percent": needed}
