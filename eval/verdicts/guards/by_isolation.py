"""Guards by isolation: what a candidate does to the process around it, and what it is made of.

They can only be asked inside the candidate's own process, so their word is worth what that process is: they name the
known ways, and a candidate that sets out to can write their answer (`checked_inside` in the record says which they
are). The process is in a cell. `exercise` lets the candidate construct itself and run as upstream would run it; the
watch writes down what it does. Each guard then reads its own events.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import Guard, guard
from kbsub.eval.verdicts.guards.inside_rig import InsideRig
from kbsub.eval.verdicts.guards.rig import Pair, nearer
from kbsub.eval.verdicts.guards.watch import NORMALISATIONS, Watch


def exercise(rig: InsideRig) -> None:
    """Construct, then `calls` calls in upstream's rhythm: five under no_grad, all later ones with grad mode on."""
    pair = rig.build()
    for number in range(1, rig.calls + 1):
        rig.call(pair, rig.inputs(number % 3), grad=number > 5)


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
    def watched(rig: InsideRig) -> list[str]:
        return rig.watch.messages(name)

    watched.__name__ = name  # what the register calls it
    return watched


for _name, _question in _WATCHED.items():
    guard("isolation", _question)(_as_watched(_name))


@guard("isolation", "Is the output a plain, finished torch.Tensor of the right device, dtype and shape?")
def tensor_subclass(rig: InsideRig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    answer = rig.raw_call(pair, inputs)
    if type(answer) is not torch.Tensor:
        return [f"the output is a {type(answer).__qualname__}, which may compute when it is looked at"]
    expected = rig.expected(pair, inputs)
    wanted = (expected.device, expected.dtype, expected.layout)
    got = (answer.device, answer.dtype, answer.layout)
    return [f"the output is {got}, the reference's {wanted}"] if got != wanted else []


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of the operators that reach the dispatcher, TorchScript's included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.name()))
        return func(*args, **(kwargs or {}))


@guard("isolation", "Does a candidate that declares its own kernels leave torch's normalisation alone?")
def native_layer_norm_called(rig: InsideRig) -> list[str]:
    if not rig.own_kernels:
        raise NotApplicable("the candidate declares no kernels of its own (it has no CUDA_SOURCE)")
    pair, inputs = rig.build(), rig.inputs(1)
    rig.call(pair, inputs)
    with _Recorder() as recorder:
        for grad in (False, True):
            rig.call(pair, inputs, grad=grad)
    called = sorted(name for name in recorder.names if any(word in name for word in NORMALISATIONS))
    if called:
        return [f"CUDA_SOURCE is declared, and forward calls {', '.join(called)}"]
    kernels = _profiled_kernels(rig, pair, inputs) if rig.device.type == "cuda" else set()
    native = sorted(name for name in kernels if "at::native" in name and any(word in name for word in NORMALISATIONS))
    return [f"CUDA_SOURCE is declared, and the GPU ran torch's {native[0][:120]}"] if native else []


def _profiled_kernels(rig: InsideRig, pair: Pair, inputs: list[Any]) -> set[str]:
    """Names of the GPU kernels of one call; none where the profiler may not run (the dispatcher was asked anyway)."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            rig.call(pair, inputs)
            rig.synchronize()
        return {str(event.name).lower().replace("layernorm", "layer_norm") for event in profiler.events()}
    except RuntimeError as error:
        print(f"native_layer_norm_called: no GPU profile here ({error})", file=sys.stderr)
        return set()


@guard("isolation", "Does the candidate compute its answer rather than look for it?")
def live_objects_searched(rig: InsideRig) -> list[str]:
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


def _call_beside(rig: InsideRig, pair: Pair, inputs: list[Any], decoy: torch.Tensor) -> torch.Tensor:
    """Call the candidate where upstream would hold the expected output: a local called `output`."""
    output = expected = decoy  # read by nobody honest
    answer = rig.call(pair, inputs)
    assert output is expected
    return answer
