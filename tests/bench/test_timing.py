"""The timing protocol on stand-in programs and clocks: what runs when, what is checked, who is dropped. No GPU."""

from __future__ import annotations

import contextlib
import itertools
import random
from types import SimpleNamespace

import pytest
import torch

from kbsub.adapters.task import load_local_task
from kbsub.eval.bench.machine import CpuMachine, PlainProgram
from kbsub.eval.bench.methods.upstream import last_call, upstream_rounds, upstream_statistics
from kbsub.eval.bench.scene import BenchScene
from kbsub.eval.bench.timing import (
    Dropped,
    TimingProtocol,
    quartiles,
    replay_rounds,
    replay_statistics,
    round_orders,
    spread,
)
from kbsub.eval.process.isolated import Status
from support.small_reference import REFERENCE


class CountedMachine(CpuMachine):
    """Each program's sample takes the milliseconds that the test gave it, drawn in calling order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def elapsed_ms(self, replay, count):
        for _ in range(count):
            replay()
        self.log.append("timed")
        return 2.0 * count

    def synchronize(self):
        self.log.append("synchronize")


@pytest.fixture
def scene(tmp_path):
    (tmp_path / "reference.py").write_text(REFERENCE)
    return BenchScene(load_local_task(tmp_path / "reference.py"), torch.device("cpu"), None, sets=3)


class Keeper:
    """The guard of a run: remembers who was dropped and why."""

    def __init__(self) -> None:
        self.dropped: dict[str, Dropped] = {}
        self.stages: list[tuple[str, str]] = []

    def __call__(self, name, stage, action):
        self.stages.append((name, stage))
        try:
            return True, action()
        except Dropped as gone:
            self.dropped[name] = gone
            return False, None


def capture(scene, program):
    scene.load(0)
    return PlainProgram(program, scene.captured_arguments(), program(*scene.captured_arguments()))


def run(scene, programs, protocol=None, machine=None):
    keeper = Keeper()
    captured = {name: capture(scene, program) for name, program in programs.items()}
    series = replay_rounds(captured, machine or CpuMachine(), scene, protocol or TimingProtocol(rounds=9), keeper)
    return series, keeper


def test_orders_are_the_published_shuffles():
    shuffler = random.Random(913)
    expected = []
    for _ in range(35):
        order = [0, 1, 2, 3]
        shuffler.shuffle(order)
        expected.append(order)
    assert round_orders(4, 35, 913) == expected
    assert len({tuple(order) for order in expected}) > 10, "the rounds must not all have one order"


def test_a_sample_is_the_mean_of_the_replays_and_every_one_is_kept(scene):
    series, keeper = run(scene, {"a": scene.reference, "b": scene.reference})
    assert not keeper.dropped
    assert [len(series.samples[name]) for name in ("a", "b")] == [9, 9]
    assert len(series.orders) == 9 and all(sorted(order) == [0, 1] for order in series.orders)
    machine = CountedMachine()
    series, _ = run(scene, {"a": scene.reference}, machine=machine)
    assert series.samples["a"] == [2.0] * 9
    assert machine.log == ["synchronize", "timed"] * 9, "the device must be idle before each pair of events"


def test_contents_change_from_round_to_round(scene):
    seen = []

    def program(x):
        seen.append(x.clone())
        return scene.reference(x)

    run(scene, {"a": program}, TimingProtocol(rounds=6, replays=1))
    shown = seen[1:]  # the first call was the capture
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(shown))
    assert torch.equal(shown[0], shown[3]), "three sets rotate"


# program, in which round it must be caught
CHEATS = {
    "answer remembered by address": (lambda scene: remembering(scene), 1),
    "writes nothing": (lambda scene: stale(scene), 0),
    "writes to its input": (lambda scene: mutating(scene), 0),
    "right at first, wrong later": (lambda scene: tiring(scene), 2),
}


def remembering(scene):
    memory: dict[int, torch.Tensor] = {}

    def program(x):
        if x.data_ptr() not in memory:
            memory[x.data_ptr()] = scene.reference(x)
        return memory[x.data_ptr()].clone()

    return program


def stale(scene):
    first = scene.reference(scene.captured_arguments()[0])
    return lambda x: first  # the captured output is never written again


def mutating(scene):
    def program(x):
        y = scene.reference(x)
        x.mul_(1.0001)
        return y

    return program


def tiring(scene):
    calls = [0]

    def program(x):
        calls[0] += 1
        return scene.reference(x) + (1.0 if calls[0] > 1 + 2 * 5 else 0.0)

    return program


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_caught_while_timed_and_the_others_go_on(scene, cheat):
    make, caught = CHEATS[cheat]
    with torch.no_grad():
        series, keeper = run(scene, {"honest": scene.reference, "cheat": make(scene)})
    assert "cheat" in keeper.dropped, f"{cheat}: was timed to the end"
    assert keeper.dropped["cheat"].status is Status.INCORRECT_NUMERICAL
    assert f"round {caught}:" in str(keeper.dropped["cheat"]), keeper.dropped["cheat"]
    assert "honest" not in keeper.dropped and len(series.samples["honest"]) == 9


def test_a_rounding_difference_is_timed_but_not_called_bit_identical(scene):
    def nearly(x):
        return scene.reference(x) * (1 + 1e-6)

    with torch.no_grad():
        series, keeper = run(scene, {"exact": scene.reference, "nearly": nearly})
    assert not keeper.dropped and len(series.samples["nearly"]) == 9
    assert all(scene.identical["exact"]) and not all(scene.identical["nearly"])


def test_out_of_time_ends_after_a_whole_round(scene):
    clock = iter([False, False, True])
    captured = {name: capture(scene, scene.reference) for name in "ab"}
    series = replay_rounds(captured, CpuMachine(), scene, TimingProtocol(rounds=9), Keeper(), lambda: next(clock))
    assert [len(series.samples[name]) for name in "ab"] == [3, 3], "samples stay paired"


def fake_method(log):
    """Calls the program like cuda_event does, and answers 1 ms a trial."""

    def method(fn, args, num_warmup, num_trials, discard_first, verbose, device):
        for _ in range(num_warmup + discard_first + num_trials):
            fn(*args)
        log.append((args[0].data_ptr(), args[0].clone()))
        return [1.0] * num_trials

    return method


def test_upstream_passes_rotate_addresses_and_contents(scene):
    log: list = []
    protocol = TimingProtocol(trials=12, passes=6)
    keeper = Keeper()
    programs = {"a": scene.reference}
    series = upstream_rounds("cuda_event", fake_method(log), programs, scene, protocol, keeper, None)
    assert not keeper.dropped and len(series.samples["a"]) == 12
    assert len({pointer for pointer, _ in log}) == 3
    assert log[0][0] == log[3][0] and not torch.equal(log[0][1], log[3][1]), "the same address must hold other contents"


def test_upstream_catches_an_answer_remembered_by_address(scene):
    keeper = Keeper()
    with torch.no_grad():
        programs = {"honest": scene.reference, "cheat": remembering(scene)}
        upstream_rounds(
            "cuda_event", fake_method([]), programs, scene, TimingProtocol(trials=8, passes=4), keeper, None
        )
    assert list(keeper.dropped) == ["cheat"] and "pass 3" in str(keeper.dropped["cheat"])


@pytest.mark.kernelbench
@pytest.mark.parametrize("method", ["cuda_event", "host_time"])
def test_last_call_counts_what_upstream_really_calls(kernelbench, monkeypatch, method):
    from kbsub.adapters.evaluator import import_upstream

    timing = import_upstream(kernelbench.path).module.timing

    class Event:
        def __init__(self, **options):
            self.at = 0.0

        def record(self):
            return None

        def elapsed_time(self, other):
            return 1.0

    cuda = SimpleNamespace(
        device=lambda device: contextlib.nullcontext(),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        get_device_name=lambda device: "stand-in",
        current_device=lambda: 0,
        Event=Event,
    )
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda, device=torch.device))
    monkeypatch.setattr(timing, "clear_l2_cache", lambda device=None: None)
    calls = []
    protocol = TimingProtocol()
    function = timing.get_timing_function(method)
    times = function(
        lambda x: calls.append(x),
        [1],
        num_warmup=protocol.upstream_warmups,
        num_trials=10,
        discard_first=protocol.discarded,
        verbose=False,
        device="cuda:0",
    )
    assert len(times) == 10
    assert len(calls) == last_call(method, protocol, 10)


def test_statistics_are_the_published_ones():
    samples = [float(value) for value in range(35, 0, -1)]
    assert quartiles(samples) == (9.0, 18.0, 27.0)  # a[8], the median, a[26] of 1..35
    stored = replay_statistics(samples, TimingProtocol())
    assert (stored["q25_ms"], stored["median_ms"], stored["q75_ms"], stored["order_seed"]) == (9.0, 18.0, 27.0, 913)
    assert stored["samples_ms"] == samples, "samples stay in round order"


def test_samples_needed_for_half_a_percent():
    # deviation 1%: (1 / 0.5)^2 = 4 samples
    assert spread([0.99, 1.01] * 50)["samples_for_half_percent"] in (4, 5)
    assert spread([1.0, 1.0])["samples_for_half_percent"] == 1
    assert spread([1.0])["samples_for_half_percent"] is None


def test_upstream_numbers_stay_upstreams():
    stats = {"mean": 0.315, "std": 0.0021, "min": 0.311, "max": 0.33, "num_trials": 100}
    stored = upstream_statistics([0.3149] * 100, [0.3149] * 10, stats, TimingProtocol())
    assert [stored[key] for key in ("mean_ms", "std_ms", "min_ms", "max_ms", "trials")] == list(stats.values())
    assert len(stored["samples_ms"]) == 100 and len(stored["pass_medians_ms"]) == 10
    many = upstream_statistics([0.3149] * 5000, [0.3149] * 10, stats, TimingProtocol())
    assert "samples_ms" not in many and many["samples"] == 5000, "do_bench's thousands do not belong into a file"


def test_protocol_refuses_nonsense():
    with pytest.raises(ValueError, match="rounds is 0"):
        TimingProtocol(rounds=0)
