"""Guards by behaviour: what a candidate does to its inputs, its outputs and from call to call.

A right answer to one call proves nothing about the next. Every guard here calls more than once, changes something in
between that an honest kernel must follow, and looks at memory as well as values.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import guard
from kbsub.eval.verdicts.guards.rig import LOOSE, Pair, Rig, distance, nearer, rms, same
from kbsub.eval.verdicts.guards.watch import NORMALISATIONS

POISON_BLOCKS = 8  # freed blocks of the output's size: more than any allocator hands out for one forward
EARLIER_OUTPUTS = 5  # held while later calls run: a ring of up to four buffers shows
FLUSH_BYTES = 256 << 20  # upstream's L2 flush; on this task exactly the size of the output
SLEEP_CYCLES = 40_000_000  # about 20 ms of a GPU clock: longer than any forward of these tasks takes to start


@contextmanager
def _poisoned_allocations() -> Iterator[None]:
    """Every tensor that torch allocates without initialising it is full of NaN in here."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _poison_freed_blocks(like: torch.Tensor, poison: float = float("nan")) -> None:
    """Leave `poison` in the allocator's freed blocks of this size; they are what a fresh output is made of."""
    blocks = [torch.full_like(like, poison) for _ in range(POISON_BLOCKS)]
    del blocks


@guard("behaviour", "Is every element of the output written?")
def uninitialised_output(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    truth = rig.truth(pair, inputs)
    finite = torch.isfinite(truth)
    like = torch.empty_like(truth, dtype=rig.dtype)
    rig.call(pair, inputs)  # compile and cache what is cached
    for how in ("the freed blocks of the output's size", "every uninitialised allocation"):
        _poison_freed_blocks(like)
        if how.startswith("every"):
            with _poisoned_allocations():
                answer = rig.call(pair, inputs)
        else:
            answer = rig.call(pair, inputs)
        suspect = ~torch.isfinite(answer) & finite
        if suspect.any():  # what the candidate itself makes NaN stays so in memory that was finite
            _poison_freed_blocks(like, 1.0)
            suspect &= torch.isfinite(rig.call(pair, inputs))
        unwritten = int(suspect.sum())
        if unwritten:
            return [
                f"with {how} poisoned, {unwritten} of {answer.numel()} output elements are not finite: never written"
            ]
    return []


def _calls(rig: Rig, pair: Pair) -> Iterator[tuple[str, list[Any], torch.Tensor]]:
    """Calls as an evaluator makes them: (which, its inputs, the output), without and with grad mode."""
    for index in range(5):
        inputs = rig.inputs(index % 3)
        grad = index >= 3
        yield f"call {index + 1}{' (grad mode on)' if grad else ''}", inputs, rig.call(pair, inputs, grad=grad)


@guard("behaviour", "Is x as it was before the call?")
def input_mutated(rig: Rig) -> list[str]:
    pair = rig.build()
    messages = []
    for index, (which, inputs, _) in enumerate(_calls(rig, pair)):
        for number, (value, original) in enumerate(zip(inputs, rig.inputs(index % 3), strict=True)):
            if isinstance(value, torch.Tensor) and not torch.equal(value, original):
                messages.append(f"{which} changed input {number}: {int((value != original).sum())} elements differ")
    return messages[:3]


@guard("behaviour", "Are gamma and beta as they were before the call?")
def parameters_mutated(rig: Rig) -> list[str]:
    pair = rig.build()
    own = pair.candidate.state_dict(keep_vars=True)
    before = {name: value.detach().clone() for name, value in own.items()}
    reference = {name: value.clone() for name, value in pair.reference.state_dict().items()}
    rig.expected(pair, rig.inputs(0))
    moving = {name for name, value in pair.reference.state_dict().items() if not torch.equal(value, reference[name])}
    for which, _, _ in _calls(rig, pair):
        for name, value in before.items():
            if name in reference and name not in moving and not torch.equal(pair.candidate.state_dict()[name], value):
                return [f"{which} changed {name}"]
    return []


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [first, last) of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (a, b), (c, d) = _extent(one), _extent(other)
    return a < d and c < b


def _require_plain(answer: torch.Tensor) -> None:
    if type(answer) is not torch.Tensor:
        raise NotApplicable(f"the output is a {type(answer).__name__}, whose memory says nothing (see tensor_subclass)")


@guard("behaviour", "Does the output have memory of its own, not the input's?")
def output_aliases_input(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    own = rig.expected(pair, inputs)
    if any(_overlap(own, tensor) for tensor in tensors):
        raise NotApplicable("the reference itself returns its input's memory")
    answer = rig.call(pair, inputs)
    _require_plain(answer)
    return ["the output shares memory with an input"] if any(_overlap(answer, tensor) for tensor in tensors) else []


@guard("behaviour", "Does an output stay as it is while later calls run?")
def output_aliases_earlier(rig: Rig) -> list[str]:
    pair = rig.build()
    held: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in range(EARLIER_OUTPUTS):
        answer = rig.call(pair, rig.inputs(index % 3), grad=index == EARLIER_OUTPUTS - 1)
        _require_plain(answer)
        for earlier, (output, copy) in enumerate(held, start=1):
            if _overlap(answer, output):
                return [f"call {index + 1} returns the memory of output {earlier}, which the caller still holds"]
            if not torch.equal(output, copy) and not bool(torch.isnan(copy).any()):
                return [f"call {index + 1} changed output {earlier}, which the caller still holds"]
        held.append((answer, answer.clone()))
    return []


def _refill(x: torch.Tensor, new: torch.Tensor, silently: bool) -> None:
    """New contents in the same memory, the first and last few elements kept: a key made of the address, of the version
    counter (`silently` leaves it alone) or of a few sampled elements is the old one."""
    edge = min(8, x.numel() // 4)
    with torch.no_grad():
        mixed, old = new.reshape(-1).clone(), x.reshape(-1)
        mixed[:edge], mixed[mixed.numel() - edge :] = old[:edge], old[old.numel() - edge :]
        (x.data if silently else x).copy_(mixed.view(x.shape))


@guard("behaviour", "Does a change of the contents at the same address change the answer?")
def cached_by_pointer(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    x = inputs[rig.main_index]
    old = rig.truth(pair, inputs)
    rig.call(pair, inputs)
    for seed, silently in ((2, False), (3, True)):
        _refill(x, rig.main_input(seed), silently)
        truth = rig.truth(pair, inputs)
        if found := nearer(rig.call(pair, inputs), old, truth):
            how = "without its version counter moving" if silently else "in place"
            distances = f"rms distance {found[0]:.3g}, to the true one {found[1]:.3g}"
            return [f"x changed {how}: the answer is the old one ({distances})"]
        old = truth
    return []


@guard("behaviour", "Is each answer that of its own input, not of the first?")
def first_answer_replayed(rig: Rig) -> list[str]:
    pair = rig.build()
    first, held = rig.inputs(1), [rig.inputs(seed) for seed in (2, 3)]
    replay = rig.call(pair, first)
    if replay.shape != rig.truth(pair, first).shape:
        return []
    replay = replay.clone()
    for number, inputs in enumerate(held, start=2):
        truth = rig.truth(pair, inputs)
        if nearer(rig.call(pair, inputs), replay, truth):
            return [f"call {number} has another input, and the answer to the first one"]
    return []


@guard("behaviour", "Is the answer to the same input the same on every call?")
def changes_on_call_n(rig: Rig) -> list[str]:
    rig.require_repeatable()
    pair, inputs = rig.build(), rig.inputs(1)
    first = rig.call(pair, inputs).clone()
    for number in range(2, rig.calls + 1):
        # Upstream: five calls under no_grad, all later ones (warm-ups, timed) with grad mode on.
        answer = rig.call(pair, inputs, grad=number > 5)
        if not same(answer, first):
            return [
                f"call {number} with the same input gives another answer: rms distance {distance(answer, first):.3g}"
            ]
        del answer
    return []


@guard("behaviour", "Are the outputs of the timed calls right, too?")
def cached_in_timed_trials(rig: Rig) -> list[str]:
    """Upstream's timing rhythm (grad mode on, warm-ups, emptied cache, L2 flush, the same x), every output checked."""
    pair, inputs = rig.build(), rig.inputs(1)
    x = inputs[rig.main_index]
    for _ in range(5):
        plain = rig.call(pair, inputs)
    if not torch.isfinite(plain).all():
        raise NotApplicable("the answer to a plain call is not finite: the official check and the oracle are for that")
    for _ in range(3):
        rig.call(pair, inputs, grad=True)
        rig.synchronize()
    if rig.device.type == "cuda":
        torch.cuda.empty_cache()
    for trial in range(1, 7):
        if trial > 2:  # the first two as upstream has them: nothing changes
            _refill(x, rig.main_input(trial), silently=trial % 2 == 0)
        truth = rig.truth(pair, inputs)
        if rig.device.type == "cuda":
            torch.empty(FLUSH_BYTES // 8, dtype=torch.int64, device=rig.device).fill_(42)
        answer = rig.call(pair, inputs, grad=True)
        rig.synchronize()
        away = distance(answer, truth) / rms(truth)
        if away > LOOSE:
            return [f"timed trial {trial}: the output is off by {away:.3g} of its rms; nobody looks at it while timing"]
    return []


@guard("behaviour", "Is all work done when the current stream says so?")
def side_stream_not_joined(rig: Rig) -> list[str]:
    """x is written late on the current stream, the output read at once on it: no work may run beside that order."""
    if rig.device.type != "cuda":
        raise NotApplicable("streams exist on a GPU only")
    rig.require_repeatable()
    pair, inputs = rig.build(), rig.inputs(1)
    good = inputs[rig.main_index].clone()
    first = rig.call(pair, inputs)
    rig.synchronize()  # a copy made before would itself be of what is not finished
    right = first.clone()
    _poison_freed_blocks(right)
    inputs[rig.main_index].fill_(float("nan"))
    rig.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    inputs[rig.main_index].copy_(good)
    answer = rig.call(pair, inputs)
    seen = answer.clone()
    rig.synchronize()
    if same(seen, right):
        return rig.watch.messages("side_stream_not_joined")
    late = "the output was still being written" if same(answer, right) else "x was read before it was there"
    return [f"read on the current stream, the output differs from the finished one: {late}"]


@guard("behaviour", "Is the output a plain, finished torch.Tensor of the right device, dtype and shape?")
def tensor_subclass(rig: Rig) -> list[str]:
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


@guard("behaviour", "Does a candidate that declares its own kernels leave torch's normalisation alone?")
def native_layer_norm_called(rig: Rig) -> list[str]:
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


def _profiled_kernels(rig: Rig, pair: Pair, inputs: list[Any]) -> set[str]:
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
