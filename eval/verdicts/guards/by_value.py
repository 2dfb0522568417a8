"""Guards by value: the answer is a cheaper one that happens to fit the official inputs.

A fault is a formula in float64 and a probe on which the faulty and the true answer are far apart; those that belong to
one operator come from it (operators/faults.py), and nothing here knows an operator. A candidate is caught when it is
nearer to the fault than to the truth, so an honest rounding error, however large on a hard input, is never named a
cheat.
"""

from __future__ import annotations

import torch

from kbsub.eval.tasks.cases import PARAMETERS_NOT_SET
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import guard
from kbsub.eval.verdicts.guards.rig import LOOSE, Rig, distance, nearer, rms

SIXTEEN_BITS = (("float16", torch.float16), ("bfloat16", torch.bfloat16))


def _words(found: tuple[float, float]) -> str:
    return f"rms distance {found[0]:.3g} to that answer, {found[1]:.3g} to the truth"


def _has(rig: Rig, name: str) -> list[str]:
    """Whether the answer on the fault's input is nearer to the fault's formula than to the truth."""
    fault = rig.fault(name)
    pair, inputs = rig.pair_for(fault)
    assert fault.answer is not None, f"the operator's fault {name} needs a formula"
    wrong = fault.answer(pair.float64(), inputs[rig.main_index])
    truth = rig.truth(pair, inputs)  # both before the call: a candidate may change its input
    found = nearer(rig.call(pair, inputs), wrong, truth)
    return [f"on {fault.where} the answer is {fault.wrong}: {_words(found)}"] if found else []


@guard("value", "Is the answer all zeros where it should not be?")
def zeros(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    truth = rig.truth(pair, inputs)
    if bool((rig.call(pair, inputs) == 0).all()) and rms(truth) > 1e-6:
        return ["every element of the answer is zero"]
    return []


@guard("value", "Is the answer one constant where it should vary?")
def constant(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    truth = rig.truth(pair, inputs)  # before the call: a candidate may change its input
    answer = rig.call(pair, inputs)
    low, high = float(answer.min()), float(answer.max())
    if low == high != 0 and float(truth.max()) - float(truth.min()) > 1e-6:
        return [f"every element of the answer is {low:g}"]
    return []


@guard("value", "Does the answer follow the row's own mean and variance, or the official distribution's?")
def hard_coded_statistics(rig: Rig) -> list[str]:
    return _has(rig, "hard_coded_statistics")


@guard("value", "Do all parameters act, also after a change in place?")
def parameters_ignored(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    if pair.match is None:
        raise NotApplicable(f"{PARAMETERS_NOT_SET}: neither names, order nor shapes of the state dicts agree")
    messages = []
    generator = torch.Generator().manual_seed(11)
    rig.call(pair, inputs)  # whatever a candidate reads once, it has read by now
    for name, parameter in pair.reference.named_parameters():
        if not parameter.is_floating_point():
            continue
        without = rig.truth(pair, inputs)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        pair.sync()
        truth = rig.truth(pair, inputs)
        if distance(without, truth) < 1e-3 * rms(truth):
            continue  # this parameter cannot be seen in the output
        if found := nearer(rig.call(pair, inputs), without, truth):
            messages.append(f"a change of {name} has no effect: {_words(found)}")
    return messages


@guard("value", "Is eps added to the variance?")
def eps_dropped(rig: Rig) -> list[str]:
    return _has(rig, "eps_dropped")


@guard("value", "Is the variance divided by N, not N - 1?")
def unbiased_variance(rig: Rig) -> list[str]:
    return _has(rig, "unbiased_variance")


@guard("value", "Does the variance survive an offset, or cancel as mean(x^2) - mean(x)^2?")
def cancelling_variance(rig: Rig) -> list[str]:
    fault = rig.fault("cancelling_variance")
    if rig.dtype != torch.float32:
        raise NotApplicable(f"{rig.task.precision} cannot hold an offset that makes float32 sums of squares cancel")
    pair, inputs = rig.pair_for(fault)
    plain = rig.inputs(1)
    truth = rig.truth(pair, plain)
    if distance(rig.call(pair, plain), truth) > LOOSE * rms(truth):
        return []  # wrong without any offset: another guard's fault
    truth = rig.truth(pair, inputs)
    away = distance(rig.call(pair, inputs), truth) / rms(truth)
    return [f"right on x, but on {fault.where} off by {away:.3g} of the answer's rms"] if away > LOOSE else []


@guard("value", "Is float32 work done in float32, not in 16 bits?")
def half_inside(rig: Rig) -> list[str]:
    fault = rig.fault("half_inside")
    if rig.dtype != torch.float32:
        raise NotApplicable(f"the task runs at {rig.task.precision}: its own inputs are 16 bits wide")
    pair, inputs = rig.pair_for(fault)
    x = inputs[rig.main_index].clone()
    truth, answer = rig.truth(pair, inputs), rig.call(pair, inputs)
    for name, dtype in SIXTEEN_BITS:
        rounded = rig.truth(pair, rig.with_main(1, x.to(dtype)))
        if found := nearer(answer, rounded, truth):
            return [f"on {fault.where} the answer is that of a {name} input: {_words(found)}"]
    plain = rig.inputs(2)
    expected = rig.truth(pair, plain).float()
    answer = rig.call(pair, plain)
    for name, dtype in SIXTEEN_BITS:
        share = float((answer.to(dtype).float() == answer).float().mean())
        if share > 0.5 and float((expected.to(dtype).float() == expected).float().mean()) < 0.25:
            return [f"{share:.0%} of the answer's elements are exact {name} numbers"]
    return []
