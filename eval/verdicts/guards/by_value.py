"""Guards by value: the answer is a cheaper one that happens to fit the official inputs.

Each guard states the fault as a formula in float64 and picks a probe on which the faulty and the true answer are far
apart. A candidate is caught when it is nearer to the fault than to the truth, so an honest rounding error, however
large on a hard input, is never named a cheat.
"""

from __future__ import annotations

import torch

from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.findings import guard
from kbsub.eval.verdicts.guards.rig import LOOSE, Pair, Rig, distance, nearer, rms

OFFSET = 3e4  # squares of 9e8 are spaced 64 apart in float32, so mean(x^2) - mean(x)^2 loses a variance of 1/12
HALF_OFFSET = 1024.0  # float16 counts in ones there, bfloat16 in eights: [0, 1) on top of it disappears


def _affine(pair: Pair, x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float) -> torch.Tensor:
    """The affine formula in float64 with statistics of one's choice and the pair's own gamma and beta."""
    gamma, beta = (parameter.detach() for parameter in pair.float64().parameters())
    return (x.double() - mean) / torch.sqrt(variance + eps) * gamma + beta


def _words(found: tuple[float, float]) -> str:
    return f"rms distance {found[0]:.3g} to that answer, {found[1]:.3g} to the truth"


def _statistics(
    rig: Rig, x: torch.Tensor, norm: torch.nn.LayerNorm, correction: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = tuple(range(x.dim() - len(norm.normalized_shape), x.dim()))
    wide = x.double()
    return wide.mean(dims, keepdim=True), wide.var(dims, correction=correction, keepdim=True)


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
    norm, pair = rig.require_layer_norm(), rig.build()
    official = rig.main_input(1)
    mean, variance = official.double().mean(), official.double().var()
    inputs = rig.with_main(1, 3 * official + 7)
    x = inputs[rig.main_index]
    fault = _affine(pair, x, mean, variance, norm.eps)
    truth = rig.truth(pair, inputs)
    found = nearer(rig.call(pair, inputs), fault, truth)
    if not found:
        return []
    return [
        f"on 3 * x + 7 the answer is that of mean {float(mean):.3f} and variance {float(variance):.3f}: {_words(found)}"
    ]


@guard("value", "Do all parameters act, also after a change in place?")
def parameters_ignored(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    if set(pair.reference.state_dict()) != set(pair.candidate.state_dict()):
        raise NotApplicable("the state dicts have different keys, so no parameter can be set")
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
    norm, pair = rig.require_layer_norm(), rig.build()
    if norm.eps <= 0:
        raise NotApplicable("the task's eps is 0")
    official = rig.main_input(1)
    # A variance of eps / 100: with eps the answer shrinks tenfold.
    scale = (norm.eps / 100 / float(official.double().var())) ** 0.5
    inputs = rig.with_main(1, official * scale)
    x = inputs[rig.main_index]
    mean, variance = _statistics(rig, x, norm)
    fault = _affine(pair, x, mean, variance, 0.0)
    truth = rig.truth(pair, inputs)
    found = nearer(rig.call(pair, inputs), fault, truth)
    return [f"on a variance of eps / 100 the answer is that of eps 0: {_words(found)}"] if found else []


@guard("value", "Is the variance divided by N, not N - 1?")
def unbiased_variance(rig: Rig) -> list[str]:
    norm = rig.require_layer_norm()
    pair, x = rig.narrow()
    mean, variance = _statistics(rig, x, norm, correction=1)
    fault = _affine(pair, x, mean, variance, norm.eps)
    truth = rig.truth(pair, [x])
    found = nearer(rig.call(pair, [x]), fault, truth)
    return [f"on rows of 4 the variance is divided by 3: {_words(found)}"] if found else []


@guard("value", "Does the variance survive an offset, or cancel as mean(x^2) - mean(x)^2?")
def cancelling_variance(rig: Rig) -> list[str]:
    rig.require_layer_norm()
    if rig.dtype != torch.float32:
        raise NotApplicable(f"{rig.task.precision} cannot hold an offset that makes float32 sums of squares cancel")
    pair, plain = rig.build(), rig.inputs(1)
    truth = rig.truth(pair, plain)
    if distance(rig.call(pair, plain), truth) > LOOSE * rms(truth):
        return []  # wrong without any offset: another guard's fault
    inputs = rig.with_main(1, rig.main_input(1) + OFFSET)
    truth = rig.truth(pair, inputs)
    away = distance(rig.call(pair, inputs), truth) / rms(truth)
    return [f"right on x, but on x + {OFFSET:g} off by {away:.3g} of the answer's rms"] if away > LOOSE else []


@guard("value", "Is float32 work done in float32, not in 16 bits?")
def half_inside(rig: Rig) -> list[str]:
    norm = rig.require_layer_norm()
    if rig.dtype != torch.float32:
        raise NotApplicable(f"the task runs at {rig.task.precision}: its own inputs are 16 bits wide")
    pair = rig.build()
    inputs = rig.with_main(1, rig.main_input(1) + HALF_OFFSET)
    x = inputs[rig.main_index]
    truth, answer = rig.truth(pair, inputs), rig.call(pair, inputs)
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        rounded = x.to(dtype).float()
        mean, variance = _statistics(rig, rounded, norm)
        if found := nearer(answer, _affine(pair, rounded, mean, variance, norm.eps), truth):
            return [f"on x + {HALF_OFFSET:g} the answer is that of a {name} input: {_words(found)}"]
    plain = rig.inputs(2)
    expected = rig.truth(pair, plain).float()
    answer = rig.call(pair, plain)
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        share = float((answer.to(dtype).float() == answer).float().mean())
        if share > 0.5 and float((expected.to(dtype).float() == expected).float().mean()) < 0.25:
            return [f"{share:.0%} of the answer's elements are exact {name} numbers"]
    return []
