"""A recorded program that looks whether its answer is still there is dropped; one that computes is timed as before."""

from __future__ import annotations

import pytest
import torch

from kbsub.adapters.task import load_local_task
from kbsub.eval.bench.ring import Ring, RingProgram
from kbsub.eval.bench.scene import BenchScene
from kbsub.eval.bench.stale_answer import StaleCheck, one_element_changed
from kbsub.eval.bench.timing import Dropped, TimingProtocol, replay_rounds
from support.paths import TESTS


class WorkClock:
    """A machine whose milliseconds are computed forwards."""

    def __init__(self) -> None:
        self.work = 0.0

    def synchronize(self) -> None:
        pass

    def poison(self, output) -> None:
        output.fill_(float("nan"))

    def elapsed_ms(self, replay, count):
        before = self.work
        for _ in range(count):
            replay()
        return self.work - before


class Recorded:
    """One call recorded on one input buffer. `skips`: it computes only where its output holds a NaN, or a few elements
    of x are not those of its note."""

    def __init__(self, layer, x, clock, skips) -> None:
        self.layer, self.x, self.clock, self.skips = layer, x, clock, skips
        self.y, self.note = torch.empty_like(x), None

    def replay(self) -> None:
        note = self.x.flatten()[::97].clone()
        if self.skips and self.note is not None and torch.equal(note, self.note) and not self.y.isnan().any():
            return
        with torch.no_grad():
            self.y.copy_(self.layer(self.x))
        self.note = note
        self.clock.work += 1

    def output(self):
        return self.y


class Many:
    def __init__(self, each) -> None:
        self.each = each

    def replay(self) -> None:
        for one in self.each:
            one.replay()

    def output(self):
        return [one.y for one in self.each]


def timed(kind, rounds):
    """(milliseconds of the honest one, names dropped, why) under one of the two replay protocols."""
    task = load_local_task(TESTS / "support" / "small_layer_norm_task" / "reference.py")
    scene = BenchScene(task, torch.device("cpu"), None, 3)
    clock, dropped = WorkClock(), {}

    def guard(name, stage, action):
        try:
            return True, action()
        except Dropped as gone:
            dropped[name] = str(gone)
            return False, None

    where, method, size = scene, "graph_replay", 1
    if kind == "graph_replay":
        programs = {n: Recorded(scene.reference, scene.buffers[0][0], clock, n == "skips") for n in ("honest", "skips")}
        protocol = TimingProtocol(rounds=rounds)
    else:
        where, method = Ring(scene, ring_bytes=0), "cold_replay"
        size, protocol = where.size, TimingProtocol(rounds=rounds, replays=1)
        programs = {
            n: RingProgram(Many([Recorded(scene.reference, b[0], clock, n == "skips") for b in where.buffers]), where)
            for n in ("honest", "skips")
        }
        for program in programs.values():
            program.replay()  # the warm-up of the ring
    series = replay_rounds(programs, clock, where, protocol, guard, method=method)
    return [sample / size for sample in series.samples["honest"]], dropped


@pytest.mark.parametrize("rounds", [1, 12])
@pytest.mark.parametrize("kind", ["graph_replay", "cold_replay"])
def test_a_program_that_skips_is_dropped_and_the_honest_one_is_timed(kind, rounds):
    honest, dropped = timed(kind, rounds)
    assert honest == [1.0] * rounds
    assert list(dropped) == ["skips"] and dropped["skips"].startswith(f"{kind}, round ")
    assert "old answer again when one element of its input had changed" in dropped["skips"]


@pytest.mark.parametrize("make", [lambda: torch.rand(5, 7), lambda: torch.rand(7, 5).t(), lambda: torch.rand(1, 2)])
def test_one_element_changes_and_its_bits_come_back(make):
    x = make()
    kept = x.clone()
    with one_element_changed([x, 3, torch.arange(4)], seed=5):
        assert (x != kept).sum() == 1 and kept.min() <= x.min() and x.max() <= kept.max()
    assert torch.equal(x, kept)


class Program:
    """`answer(x)` at each replay."""

    def __init__(self, x, answer) -> None:
        self.x, self.answer, self.result = x, answer, None

    def replay(self) -> None:
        self.result = self.answer(self.x)

    def output(self):
        return self.result


def refuses(x):
    raise RuntimeError("no memory left")


OLD = torch.linspace(0, 1, 12).reshape(3, 4)
# what the reference does, what the program gives, whether it copies, whether that is a complaint
QUESTIONS = {
    "honest": (lambda x: 2 * x, lambda x: 2 * x, False, False),
    "within the tolerance": (lambda x: 2 * x, lambda x: 2 * x + 1e-5, False, False),
    "the old answer": (lambda x: 2 * x, lambda x: 2 * OLD, False, True),
    "a copy": (lambda x: 2 * x, lambda x: x.clone(), True, False),
    "an old copy": (lambda x: 2 * x, lambda x: OLD.clone(), True, True),
    "another wrong answer is not this question's": (lambda x: 2 * x, lambda x: x * 0 - 9, False, False),
    "a reference that cannot tell": (lambda x: x * 0, lambda x: OLD * 0, False, False),
    "a reference that fails": (refuses, lambda x: OLD, False, False),
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_only_the_old_answer_where_another_is_due_is_a_complaint(name):
    reference, answer, copies, complaint = QUESTIONS[name]
    x = OLD.clone()
    expected = x.clone() if copies else 2 * OLD if reference is refuses else reference(x)
    found = StaleCheck(reference, 1e-4).complaint(Program(x, answer), [x], expected, seed=2, copies=copies)
    assert (found is not None) is complaint, found
    assert torch.equal(x, OLD)
