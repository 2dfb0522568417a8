"""Guards by behaviour: what a candidate does to its inputs, its outputs and from call to call.

A right answer to one call proves nothing about the next. Every guard here calls more than once, changes something in
between that an honest kernel must follow, and looks at memory as well as values. The candidate is in a worker: what is
compared lies in memory of this process, which executes no line of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from kbsub.eval.operators.compare.predicate import same_bits
from kbsub.eval.remote.probes import Poison
from kbsub.eval.suite.setting import state_for
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import guard
from kbsub.eval.verdicts.guards.remote_rig import RemoteRig
from kbsub.eval.verdicts.guards.rig import LOOSE, Pair, distance, nearer, rms, same

POISON_BLOCKS = 8  # freed blocks of the output's size: more than any allocator hands out for one forward
EARLIER_OUTPUTS = 5  # held while later calls run: a ring of up to four buffers shows
ONE_ELEMENT = ("in one element", "in one more element", "in a third element")  # one place may be in a sample
FLUSH_BYTES = 256 << 20  # upstream's L2 flush; on this task exactly the size of the output


def _freed(like: torch.Tensor, value: float = math.nan, *, everywhere: bool = False) -> Poison:
    """`value` in the freed blocks of a tensor's size."""
    return Poison(value, tuple(like.shape), like.dtype, POISON_BLOCKS, everywhere)


@guard("behaviour", "Is every element of the output written?")
def uninitialised_output(rig: RemoteRig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    truth = rig.truth(pair, inputs)
    finite = torch.isfinite(truth)
    like = torch.empty_like(truth, dtype=rig.dtype)
    rig.call(pair, inputs)  # compile and cache what is cached
    for everywhere in (False, True):
        how = "every uninitialised allocation" if everywhere else "the freed blocks of the output's size"
        answer = rig.call(pair, inputs, poison=_freed(like, everywhere=everywhere))
        suspect = ~torch.isfinite(answer) & finite
        if suspect.any():  # what the candidate itself makes NaN stays so in memory that was finite
            suspect &= torch.isfinite(rig.call(pair, inputs, poison=_freed(like, 1.0)))
        unwritten = int(suspect.sum())
        if unwritten:
            return [
                f"with {how} poisoned, {unwritten} of {answer.numel()} output elements are not finite: never written"
            ]
    return []


def _calls(rig: RemoteRig, pair: Pair) -> Iterator[str]:
    """Calls as an evaluator makes them, without and with grad mode: which it was."""
    for index in range(5):
        grad = index >= 3
        rig.call(pair, rig.inputs(index % 3), grad=grad)
        yield f"call {index + 1}{' (grad mode on)' if grad else ''}"


@guard("behaviour", "Is x as it was before the call?")
def input_mutated(rig: RemoteRig) -> list[str]:
    pair = rig.build()
    messages = []
    for which in _calls(rig, pair):
        messages += [f"{which} changed input {'within a list' if n < 0 else n}" for n in rig.last.mutated]
    return messages[:3]


@guard("behaviour", "Are gamma and beta as they were before the call?")
def parameters_mutated(rig: RemoteRig) -> list[str]:
    """By what the candidate says of them, and, where they can be set, in memory of this process that they are."""
    pair = rig.build()
    reference = {name: value.clone() for name, value in pair.reference.state_dict().items()}
    rig.expected(pair, rig.inputs(0))
    moving = {name for name, value in pair.reference.state_dict().items() if not torch.equal(value, reference[name])}
    still = {name: value for name, value in reference.items() if name not in moving}
    bound = state_for(pair.match, still, still) if pair.match is not None else {}
    if bound:
        pair.candidate.load_state(bound, bind=True)
    # Where it is not known what its tensors are, its parameters at least must stay, if the reference's do.
    own = () if moving else (name for name, form in pair.candidate.state_forms.items() if form.trained)
    names = list(bound) if pair.match is not None else list(own)
    before = pair.candidate.state()
    for which in _calls(rig, pair):
        after = pair.candidate.state()
        for name in names:
            if name in before and not (name in after and torch.equal(after[name], before[name])):
                return [f"{which} changed {name}"]
        if bound and pair.candidate.bound_state_changed():
            return [f"{which} changed parameters in memory, and says that it did not"]
    return []


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (a, b), (c, d) = _extent(one), _extent(other)
    return a < d and c < b


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [first, last) of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


@guard("behaviour", "Does the output have memory of its own, not the input's?")
def output_aliases_input(rig: RemoteRig) -> list[str]:
    """Whatever the candidate says of it: an output that lies in x changes when x does."""
    pair, inputs = rig.build(), rig.inputs(1)
    own = rig.expected(pair, inputs)
    if any(_overlap(own, value) for value in inputs if isinstance(value, torch.Tensor)):
        raise NotApplicable("the reference itself returns its input's memory")
    answer = rig.call(pair, inputs, keep=1)
    if any(facts.aliases_input for facts in rig.last.tensors):
        return ["the output shares memory with an input"]
    if not same_bits(rig.read(pair, 1, rig.inputs(2)), answer):
        return ["the output shares memory with an input: it changes when the input does"]
    return []


@guard("behaviour", "Does an output stay as it is while later calls run?")
def output_aliases_earlier(rig: RemoteRig) -> list[str]:
    pair = rig.build()
    held: list[torch.Tensor] = []
    for index in range(EARLIER_OUTPUTS):
        inputs = rig.inputs(index % 3)
        answer = rig.call(pair, inputs, grad=index == EARLIER_OUTPUTS - 1, keep=index)
        for earlier, output in enumerate(held):
            if not same_bits(rig.read(pair, earlier, inputs), output):
                return [f"call {index + 1} changed output {earlier + 1}, which the caller still holds"]
        held.append(answer)
    return []


def _refill(x: torch.Tensor, new: torch.Tensor) -> None:
    """New contents, the first and last few elements kept: a key made of a few sampled elements is the old one."""
    edge = min(8, x.numel() // 4)
    mixed, old = new.reshape(-1).clone(), x.reshape(-1)
    mixed[:edge], mixed[mixed.numel() - edge :] = old[:edge], old[old.numel() - edge :]
    x.copy_(mixed.view(x.shape))


def _change_one(x: torch.Tensor) -> None:
    """One element at a place that nobody can know becomes larger than all: a key made of a sample is the old one."""
    generator = torch.Generator()
    generator.seed()
    place = tuple(int(torch.randint(size, (1,), generator=generator)) for size in x.shape)
    x[place] = min(16 * float(x.abs().max()) + 1, torch.finfo(x.dtype).max / 4)


@guard("behaviour", "Does a change of the contents at the same address change the answer?")
def cached_by_pointer(rig: RemoteRig) -> list[str]:
    """The candidate is given the same tensor at the same address; its version counter moves only the first time."""
    pair, inputs = rig.build(), rig.inputs(1)
    x = inputs[rig.main_index]
    old = rig.truth(pair, inputs)
    rig.call(pair, inputs, same=True)
    for how in ("in place", "without its version counter moving", *ONE_ELEMENT):
        if how in ONE_ELEMENT:
            _change_one(x)
        else:
            _refill(x, rig.main_input(2 if how == "in place" else 3))
        truth = rig.truth(pair, inputs)
        if found := nearer(rig.call(pair, inputs, same=True, touch=how == "in place"), old, truth):
            distances = f"rms distance {found[0]:.3g}, to the true one {found[1]:.3g}"
            return [f"x changed {how}: the answer is the old one ({distances})"]
        old = truth
    return []


@guard("behaviour", "Is each answer that of its own input, not of the first?")
def first_answer_replayed(rig: RemoteRig) -> list[str]:
    pair = rig.build()
    first, held = rig.inputs(1), [rig.inputs(seed) for seed in (2, 3)]
    replay = rig.call(pair, first)
    if replay.shape != rig.truth(pair, first).shape:
        return []
    for number, inputs in enumerate(held, start=2):
        truth = rig.truth(pair, inputs)
        if nearer(rig.call(pair, inputs), replay, truth):
            return [f"call {number} has another input, and the answer to the first one"]
    return []


@guard("behaviour", "Is the answer to the same input the same on every call?")
def changes_on_call_n(rig: RemoteRig) -> list[str]:
    """Asked of the first instance of a fresh process, as upstream builds only one."""
    rig.require_repeatable()
    pair, inputs = rig.first(), rig.inputs(1)
    first = rig.call(pair, inputs, same=True)
    for number in range(2, rig.calls + 1):
        # Upstream: five calls under no_grad, all later ones (warm-ups, timed) with grad mode on.
        answer = rig.call(pair, inputs, grad=number > 5, same=True)
        if not same(answer, first):
            if pair.truth is not None and rig.of_rounding(pair, inputs, rig.truth(pair, inputs), answer):
                continue
            return [
                f"call {number} with the same input gives another answer: rms distance {distance(answer, first):.3g}"
            ]
    return []


@guard("behaviour", "Are the outputs of the timed calls right, too?")
def cached_in_timed_trials(rig: RemoteRig) -> list[str]:
    """Upstream's timing rhythm (grad mode on, warm-ups, emptied cache, L2 flush, the same x), every output checked.

    Asked of the first instance of a fresh process, as upstream builds only one."""
    rig.require_repeatable()
    pair, inputs = rig.first(), rig.inputs(1)
    x = inputs[rig.main_index]
    for _ in range(5):
        plain = rig.call(pair, inputs)
    if not torch.isfinite(plain).all():
        raise NotApplicable("the answer to a plain call is not finite: the official check and the oracle are for that")
    for _ in range(3):
        rig.call(pair, inputs, grad=True, same=True)
    flush = (FLUSH_BYTES // 8,) if rig.device.type == "cuda" else (1,)
    for trial in range(1, 7):
        if trial > 2:  # the first two as upstream has them: nothing changes
            _refill(x, rig.main_input(trial))
        truth = rig.truth(pair, inputs)
        poison = Poison(42.0, flush, torch.int64, empty_cache=trial == 1)
        touch = trial > 2 and trial % 2 == 1
        answer = rig.call(pair, inputs, grad=True, same=True, touch=touch, poison=poison)
        away = distance(answer, truth) / rms(truth)
        if away > LOOSE and not rig.of_rounding(pair, inputs, truth, answer):
            return [f"timed trial {trial}: the output is off by {away:.3g} of its rms; nobody looks at it while timing"]
    for how in ONE_ELEMENT:
        old = truth
        _change_one(x)
        truth = rig.truth(pair, inputs)
        if nearer(rig.call(pair, inputs, grad=True, same=True), old, truth):
            return [f"while it is timed, x changes {how}, and the answer is still the old one"]
    return []


@guard("behaviour", "Is all work done when the current stream says so?")
def side_stream_not_joined(rig: RemoteRig) -> list[str]:
    """x is written late on the current stream, the output read at once on it: no work may run beside that order."""
    if rig.device.type != "cuda":
        raise NotApplicable("streams exist on a GPU only")
    rig.require_repeatable()
    pair, inputs = rig.build(), rig.inputs(1)
    right = rig.call(pair, inputs)
    seen, answer = rig.on_current_stream(pair, inputs, _freed(right))
    if same(seen, right):
        return []
    late = "the output was still being written" if same(answer, right) else "x was read before it was there"
    return [f"read on the current stream, the output differs from the finished one: {late}"]
