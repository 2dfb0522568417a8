"""Guards by isolation: what a candidate does to the process around it.

`exercise` lets the candidate construct itself and run as upstream would run it, with decoys laid out; the watch writes
down what it does. Each guard then reads its own events. The remaining guards' calls are watched as well, so events that
come late (call N) are read once more at the end.
"""

from __future__ import annotations

from typing import Any

import torch

from kbsub.adapters.isolation import JudgeFailure, Status
from kbsub.eval.guards.findings import Guard, guard
from kbsub.eval.guards.rig import Pair, Rig, fork_rng, nearer
from kbsub.eval.guards.watch import Watch


def exercise(rig: Rig) -> None:
    """Construct, then three calls under no_grad and three with grad mode on. JudgeFailure: another output shape.

    NotApplicable: the reference itself does not take the task's own input.
    """
    pair = rig.build()
    with fork_rng():
        expected = rig.expected(pair, rig.inputs(1))
    for grad in (False, True):
        for seed in (1, 2, 3):
            answer = rig.call(pair, rig.inputs(seed), grad=grad)
            if answer.shape != expected.shape:
                shapes = f"{tuple(answer.shape)}, the reference's is {tuple(expected.shape)}"
                raise JudgeFailure(Status.INCORRECT_SHAPE, f"the output's shape is {shapes}")


def check_task(watch: Watch, context: dict[str, Any], before: dict[str, Any]) -> None:
    """Report names of the reference program that the candidate's text replaced: both live in one dict, `context`."""
    for name, value in before.items():
        if name.startswith("__"):
            continue
        now = context.get(name)
        # Both texts import torch and nn under the same names; the same module again is no change.
        if now is not value and (type(now) is not type(value) or now != value):
            watch.report("task_overridden", f"the candidate's text replaces the task's {name}")


# Guards whose whole answer is what the watch saw while the others called the candidate.
_WATCHED = {
    "task_overridden": "Are the task's globals as the task wrote them?",
    "timers_patched": "Are clocks, events, synchronisation and comparison the real ones?",
    "thread_started": "Does the candidate stay in its own thread and process?",
    "rng_changed": "Are the global random generators where they were?",
    "default_dtype_changed": "Are the default dtype and device unchanged?",
    "backend_flags_changed": "Are torch's backend switches unchanged?",
    "grad_mode_changed": "Is grad mode what the caller chose?",
    "result_written": "Are files and descriptors that are not the candidate's left alone?",
}


def _as_watched(name: str) -> Guard:
    def watched(rig: Rig) -> list[str]:
        return rig.watch.messages(name)

    watched.__name__ = name  # what the register calls it
    return watched


for _name, _question in _WATCHED.items():
    guard("isolation", _question)(_as_watched(_name))


@guard("isolation", "Does the candidate compute its answer rather than look for it?")
def live_objects_searched(rig: Rig) -> list[str]:
    """A wrong answer lies about under the names evaluators use; who returns it has searched for it."""
    if rig.reference_draws:
        return rig.watch.messages("live_objects_searched")  # no decoy: nobody knows the right answer
    pair, inputs = rig.build(), rig.inputs(1)
    decoy = rig.truth(pair, rig.inputs(2)).to(rig.dtype)
    truth = rig.truth(pair, inputs)
    answer = _call_beside(rig, pair, inputs, decoy)
    messages = rig.watch.messages("live_objects_searched")
    if nearer(answer, decoy, truth):
        messages.append("the answer is the decoy that stood in the caller's local `output`: it was found, not computed")
    return messages


def _call_beside(rig: Rig, pair: Pair, inputs: list[Any], decoy: torch.Tensor) -> torch.Tensor:
    """Call the candidate where upstream would hold the expected output: a local called `output`."""
    output = expected = decoy  # read by nobody honest
    answer = rig.call(pair, inputs)
    assert output is expected
    return answer
