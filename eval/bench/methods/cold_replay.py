"""Graph replay with a cold L2: one graph runs a program over a ring of buffers larger than it (bench/ring.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kbsub.eval.bench.methods.method import Measured, Timed, TimedScene, TimingMethod
from kbsub.eval.bench.timing import replay_rounds, replay_statistics

COLD_REPLAY = "cold_replay"
REHEARSAL = "cold_cpu_rehearsal"
RING_WARMUPS = 2  # of the whole ring


def measure(run: TimedScene) -> Measured:
    """The rounds of graph replay over a ring of buffers: a sample is the mean over the ring, replayed once."""
    from kbsub.eval.bench.ring import Ring, RingProgram

    ring = Ring(run.scene) if run.machine.graphs else Ring(run.scene, ring_bytes=0)
    captured: dict[str, Any] = {}
    for name, program in list(run.programs.items()):
        if program.own_graphs and run.machine.graphs:
            continue

        def capture(program: Timed = program) -> RingProgram:
            return RingProgram(run.machine.capture(ring.over(program.call), [], RING_WARMUPS), ring)

        kept, value = run.attempt(name, "capture over the ring of", capture)
        if kept:
            captured[name] = value
    once = replace(run.protocol, replays=1, warmups=RING_WARMUPS)
    key = COLD_REPLAY if run.machine.graphs else REHEARSAL
    series = replay_rounds(captured, run.machine, ring, once, run.attempt, run.out_of_time, key)
    for samples in series.samples.values():
        samples[:] = [sample / ring.size for sample in samples]
    return Measured(series, lambda _, samples: {**replay_statistics(samples, once), "ring": ring.size})


METHODS = (
    TimingMethod(
        COLD_REPLAY,
        "CUDA graph replay over a ring of buffers larger than the L2",
        measure,
        place=10,
        in_all=False,
        cold="graph replay over a ring of buffers larger than the L2 (`cold_replay`)",
        rehearsal=REHEARSAL,
    ),
)
