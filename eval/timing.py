"""The two ways a program is timed here: graph replay in shuffled rounds, and upstream's own methods in the same run.

Everything in this file is protocol: which program runs when, how often, between which events, and what is checked in
between. What a program is, where its inputs come from and which device runs it, arrives through small interfaces, so
that the protocol itself is tested without a GPU. All times are milliseconds.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kbsub.adapters.evaluator import timing_of
from kbsub.adapters.isolation import Status

UPSTREAM_METHODS = ("cuda_event", "do_bench", "do_bench_impl", "host_time")
GRAPH_REPLAY = "graph_replay"
CHANGED_EVERY = 4  # rounds between two replays on a changed input: one costs a replay and a call of the reference
MOST_SAMPLES = 400  # of one upstream method of one program in a result file
# What the same rounds are called on a CPU: never comparable with the replays of a GPU, nor with each other.
CPU_REHEARSAL = "cpu_rehearsal"  # of graph_replay
COLD_CPU_REHEARSAL = "cold_cpu_rehearsal"  # of cold_replay
METHODS = (GRAPH_REPLAY, *UPSTREAM_METHODS)  # what --methods all means
COLD_REPLAY = "cold_replay"  # graph replay over a ring of buffers larger than the L2 (eval/ring.py), where asked for
REPLAYS = (GRAPH_REPLAY, COLD_REPLAY)  # made here; the others are upstream's


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
    """The device under the clock (eval/machine.py)."""

    def synchronize(self) -> None: ...

    def elapsed_ms(self, replay: Callable[[], None], count: int) -> float: ...

    def poison(self, output: Any) -> None: ...


class Scene(Protocol):
    """Inputs, reference outputs and checks of one shape and precision (eval/scene.py)."""

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


Guard = Callable[[str, str, Callable[[], Any]], tuple[bool, Any]]
"""guard(name, stage, action): runs the action for one program; (False, None) when that program was dropped by it."""


def round_orders(count: int, rounds: int, seed: int) -> list[list[int]]:
    """The order of every round: a fresh shuffle of range(count), all from one `random.Random(seed)`."""
    shuffler = random.Random(seed)
    orders = []
    for _ in range(rounds):
        order = list(range(count))
        shuffler.shuffle(order)
        orders.append(order)
    return orders


def replay_rounds(
    captured: Mapping[str, Captured],
    machine: Machine,
    scene: Scene,
    protocol: TimingProtocol,
    guard: Guard,
    out_of_time: Callable[[], bool] = lambda: False,
    method: str = GRAPH_REPLAY,
) -> Series:
    """Graph replay: each round loads new input contents, then times every program once, in that round's order.

    A sample is the time of `replays` replays between two events, divided by their number. The device is idle before
    the first event; the output is overwritten with NaN before it and checked after the last; in some rounds one more
    replay, not timed, shows that the program computes (kbsub.eval.stale). When the time is up, the run ends after a
    whole round, so that the samples stay paired. method: what messages call these rounds.
    """
    series = Series({name: [] for name in captured}, list(captured))
    started = time.monotonic()
    gone: set[str] = set()
    for index, order in enumerate(round_orders(len(captured), protocol.rounds, protocol.order_seed)):
        if index and out_of_time():
            break
        series.orders.append(order)
        for position in order:
            name = series.names[position]
            if name in gone:
                continue

            def sample(program: Captured = captured[name], name: str = name, index: int = index) -> float:
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

            kept, value = guard(name, f"{method} round {index}", sample)
            if kept:
                series.samples[name].append(value)
            else:
                gone.add(name)
    series.seconds = time.monotonic() - started
    return series


def upstream_rounds(
    method: str,
    function: Callable[..., list[float]],
    programs: Mapping[str, Callable[..., Any]],
    scene: Scene,
    protocol: TimingProtocol,
    guard: Guard,
    device: Any,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Series:
    """One of upstream's methods, called as it is, in shuffled passes over all programs.

    Every pass hands the programs another set of input addresses, and the contents behind each address change from pass
    to pass. The last output of every call is checked. `function` is what upstream's get_timing_function returns.
    """
    series = Series({name: [] for name in programs}, list(programs), passes={name: [] for name in programs})
    started = time.monotonic()
    gone: set[str] = set()
    trials = math.ceil(protocol.trials / protocol.passes)
    for index, order in enumerate(round_orders(len(programs), protocol.passes, protocol.order_seed)):
        if index and out_of_time():
            break
        series.orders.append(order)
        for position in order:
            name = series.names[position]
            if name in gone:
                continue

            def sample(name: str = name, index: int = index) -> list[float]:
                last = _LastOutput(programs[name], last_call(method, protocol, trials))
                arguments, shown = scene.load_pass(index)
                times = function(
                    last,
                    arguments,
                    num_warmup=protocol.upstream_warmups,
                    num_trials=trials,
                    discard_first=protocol.discarded,
                    verbose=False,
                    device=device,
                )
                complaint = scene.check(name, last.output, shown)
                if complaint:
                    raise Dropped(Status.INCORRECT_NUMERICAL, f"{method}, pass {index}: {complaint}")
                return [float(value) for value in times]

            kept, value = guard(name, f"{method} pass {index}", sample)
            if kept:
                series.samples[name].extend(value)
                series.passes[name].append(statistics.median(value))
            else:
                gone.add(name)
    series.seconds = time.monotonic() - started
    return series


def last_call(method: str, protocol: TimingProtocol, trials: int) -> int | None:
    """How often one of upstream's methods calls the program, read from its code at the pin; None: as often as it likes.

    do_bench decides for itself; do_bench_impl knows no discarded trials and makes one call before its warm-up.
    """
    if method == "do_bench":
        return None
    extra = 1 if method == "do_bench_impl" else protocol.discarded
    return protocol.upstream_warmups + extra + trials


class _LastOutput:
    """Calls a program and keeps what the last call returned.

    Only the last: host_time drops each output before the next call, and one that were held here would make the
    allocator fetch a second block inside a timed trial. `last` None keeps every output until the next.
    """

    def __init__(self, program: Callable[..., Any], last: int | None) -> None:
        self.program, self.last, self.calls = program, last, 0
        self.output: Any = None

    def __call__(self, *arguments: Any) -> Any:
        result = self.program(*arguments)
        self.calls += 1
        if self.last is None or self.calls >= self.last:
            self.output = result
        return result


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """(q25, median, q75) as the published protocol takes them: a[n//4], the median, a[3n//4] of the sorted samples."""
    ordered = sorted(samples)
    return ordered[len(ordered) // 4], statistics.median(ordered), ordered[3 * len(ordered) // 4]


def replay_statistics(samples: Sequence[float], protocol: TimingProtocol) -> dict[str, Any]:
    """The `.timing.graph_replay` object of a result file; every sample kept, sample i from round i."""
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


def upstream_statistics(
    samples: Sequence[float], medians: Sequence[float], stats: Mapping[str, Any], protocol: TimingProtocol
) -> dict[str, Any]:
    """The `.timing.<upstream method>` object; `stats` is upstream's get_timing_stats (3 significant digits).

    `medians`, one a pass, are what comparisons pair. Samples are kept unless do_bench made thousands of them.
    """
    kept = {"samples_ms": list(samples)} if len(samples) <= MOST_SAMPLES else {"samples": len(samples)}
    return {
        **timing_of(stats),
        **kept,
        "pass_medians_ms": list(medians),
        "order_seed": protocol.order_seed,
        "passes": protocol.passes,
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


def bench(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Target of the bench child: all candidates and baselines of one run in one process (eval/bench_child.py)."""
    from kbsub.eval.bench_child import run

    return run(payload, progress)
