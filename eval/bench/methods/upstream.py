"""Upstream's own timing methods, called from the checkout as they are, interleaved with everything else in the run.

Four methods and one file, because upstream has one function for them: `get_timing_function(name)`.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kbsub.adapters.evaluator import TIMING_METHOD, timing_of
from kbsub.eval.bench.methods.method import Measured, TimedScene, TimingMethod
from kbsub.eval.bench.timing import Attempt, Dropped, Series, TimedInputs, TimingProtocol, round_orders, spread, walk
from kbsub.eval.process.isolated import Status

MOST_SAMPLES = 400  # of one program in a result file; do_bench makes thousands


def measure(name: str, run: TimedScene) -> Measured:
    """One of upstream's methods over every program of the scene."""
    assert run.upstream is not None  # the child runs no method of upstream's without the checkout
    upstream, calls = run.upstream, {key: program.call for key, program in run.programs.items()}
    function, device = upstream.functions[name], run.machine.device
    series = upstream_rounds(name, function, calls, run.scene, run.protocol, run.attempt, device, run.out_of_time)

    def entry(program: str, samples: list[float]) -> dict[str, Any]:
        return upstream_statistics(samples, series.passes[program], upstream.stats(samples), run.protocol)

    return Measured(series, entry)


def upstream_rounds(
    method: str,
    function: Callable[..., list[float]],
    programs: Mapping[str, Callable[..., Any]],
    scene: TimedInputs,
    protocol: TimingProtocol,
    attempt: Attempt,
    device: Any,
    out_of_time: Callable[[], bool] = lambda: False,
) -> Series:
    """One of upstream's methods, called as it is, in shuffled passes over all programs.

    Every pass hands the programs another set of input addresses, and the contents behind each address change from pass
    to pass. The last output of every call is checked. `function` is what upstream's get_timing_function returns.
    """
    series = Series({name: [] for name in programs}, list(programs), passes={name: [] for name in programs})
    trials = math.ceil(protocol.trials / protocol.passes)

    def sample(name: str, index: int) -> list[float]:
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

    def keep(name: str, times: list[float]) -> None:
        series.samples[name].extend(times)
        series.passes[name].append(statistics.median(times))

    orders = round_orders(len(programs), protocol.passes, protocol.order_seed)
    return walk(series, orders, f"{method} pass", sample, keep, attempt, out_of_time)


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


def _method(name: str, title: str, place: int, cold: str = "") -> TimingMethod:
    """A method of upstream's; programs are compared by the one that its evaluator uses where no graph was replayed."""
    measured = functools.partial(measure, name)
    return TimingMethod(name, title, measured, place=place, upstream=True, cold=cold, compared=name == TIMING_METHOD)


METHODS = (
    _method(
        "cuda_event",
        "upstream's, events, L2 flushed",
        20,
        cold="upstream's `cuda_event`, which flushes it between calls and times the launch too",
    ),
    _method("do_bench", "upstream's, Triton's do_bench", 21),
    _method("do_bench_impl", "upstream's own do_bench", 22),
    _method("host_time", "upstream's, host clock", 23),
)
