"""Graph replay, the published method: each program captured once, replayed in shuffled rounds between two events."""

from __future__ import annotations

from typing import Any

from kbsub.eval.bench.methods.method import Measured, Timed, TimedScene, TimingMethod
from kbsub.eval.bench.timing import GRAPH_REPLAY, replay_rounds, replay_statistics


def measure(run: TimedScene) -> Measured:
    """Capture every program that has no graphs of its own on the scene's first buffer, then replay them in rounds."""
    captured: dict[str, Any] = {}
    for name, program in list(run.programs.items()):
        if program.own_graphs and run.machine.graphs:
            continue

        def capture(program: Timed = program) -> Any:
            run.scene.load(0)
            return run.machine.capture(program.call, run.scene.captured_arguments(), run.protocol.warmups)

        kept, value = run.attempt(name, "capture of", capture)
        if kept:
            captured[name] = value
    key = GRAPH_REPLAY if run.machine.graphs else REHEARSAL
    series = replay_rounds(captured, run.machine, run.scene, run.protocol, run.attempt, run.out_of_time, key)
    return Measured(series, lambda _, samples: replay_statistics(samples, run.protocol))


REHEARSAL = "cpu_rehearsal"
METHODS = (
    TimingMethod(
        GRAPH_REPLAY,
        "CUDA graph replay in shuffled rounds",
        measure,
        place=0,
        rehearsal=REHEARSAL,
        compared=True,
    ),
)
