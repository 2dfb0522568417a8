"""The questions of the suite: a case's inputs, the reference's answer and the float64 one, computed once for everybody.

Asks the reference alone; no candidate is known here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from kbsub.adapters.refusal import reference_asked, short_error
from kbsub.adapters.task import SEED
from kbsub.eval.operators.compare.oracle import ErrorOf, OracleError, Truth, error_of
from kbsub.eval.suite import checks
from kbsub.eval.suite.classes import Question, of_tolerance_size
from kbsub.eval.suite.inputs import NotApplicable, first_tensor, values_of
from kbsub.eval.suite.models import Workshop
from kbsub.eval.tasks.cases import Case


class Broken(Exception):
    """The CUDA context is unusable: whatever runs after it in this process would fail for no fault of its own."""


def ask(shop: Workshop, case: Case, max_elements: int) -> Question | str:
    """Inputs, the reference's output and the float64 answer of a case; a string says why it is skipped.

    What the reference raises is such a string. Raises Broken when the CUDA context did not survive it.
    """
    try:
        with reference_asked(NotApplicable):
            elements = shop.elements(case)
        if case.shape.inputs and max_elements and elements > max_elements:
            return f"{elements} elements: left to a GPU (or --size official)"
        with reference_asked(NotApplicable):
            reference = shop.reference(case)
            inputs = shop.inputs(case)
            if (lead := first_tensor(inputs)) is not None:
                inputs[lead] = values_of(inputs[lead], case.layout)
            elif case.layout not in ("contiguous", "misaligned_parameters"):
                return "the task has no tensor among its inputs"
            expected = checks.run(reference, inputs)
            drew = _drew(shop.device)
        if not isinstance(expected, torch.Tensor) or not expected.is_floating_point():
            return f"the reference returns {type(expected).__name__}, no tensors that can be compared"
        if drew and case.layout != "contiguous":
            return "the reference draws random numbers in forward, in the order of memory"
        rounds_operands = False
        if drew:
            truth, error, no_truth = None, None, "the reference draws random numbers in forward"
        else:
            truth, error, no_truth = _truth(shop, reference, inputs, expected)
            if truth is not None and shop.device.type == "cuda" and of_tolerance_size(truth, expected):
                with reference_asked(NotApplicable):
                    rounds_operands = rounds_to_tf32(reference, inputs, truth)
        with reference_asked(NotApplicable):
            clean = _clean(case, reference, inputs)
    except NotApplicable as why:
        if why.__cause__ is not None:
            still_usable(shop.device, why.__cause__)
        return str(why)
    return Question(case, reference, inputs, expected, truth, no_truth, error, clean, rounds_operands)


def rounds_to_tf32(reference: torch.nn.Module, inputs: list[Any], truth: Truth) -> bool:
    """Whether the reference, whose error is of the tolerance's size, has next to none without TF32.

    Asked of a copy: the reference's state stays.
    """
    backends: list[Any] = [torch.backends.cudnn, torch.backends.cuda.matmul]
    before = [each.allow_tf32 for each in backends]
    if not any(before):
        return False
    try:
        for each in backends:
            each.allow_tf32 = False
        plain = checks.run(copy.deepcopy(reference), inputs)
    finally:
        for each, was in zip(backends, before, strict=True):
            each.allow_tf32 = was
    return not of_tolerance_size(truth, plain)


def _drew(device: torch.device) -> bool:
    """Whether the call before, which began at a seed, drew random numbers of the device."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    torch.manual_seed(SEED)
    fresh = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    return any(not torch.equal(one, other) for one, other in zip(states, fresh, strict=True))


def _truth(
    shop: Workshop, reference: torch.nn.Module, inputs: list[Any], expected: torch.Tensor
) -> tuple[Truth | None, ErrorOf | None, str]:
    """(the float64 answer, how far the reference's output is from it, ""), or (None, None, why there is none)."""
    try:
        truth = shop.operator.truth(reference, inputs)
        return truth, error_of(truth, expected), ""
    except OracleError as why:
        return None, None, str(why)


def _clean(case: Case, reference: torch.nn.Module, inputs: list[Any]) -> tuple[list[Any], torch.Tensor] | None:
    if case.input.kind != "special":
        return None
    clean = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
    for each in clean:
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            each.masked_fill_(~each.isfinite(), 0.5)
    return clean, checks.run(reference, clean)


def still_usable(device: torch.device, error: BaseException) -> None:
    """Raise Broken when the CUDA context did not survive the candidate's exception."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.ones(1, device=device).item()
    except RuntimeError as sticky:
        raise Broken(f"{short_error(error)}; the CUDA context is unusable after it") from sticky
