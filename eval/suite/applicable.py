"""Which cases have a meaning for a task: one without parameters, without an eps or without a float input has fewer.

A case without a meaning is left out and counted, not skipped: skipped are questions that could have been asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kbsub.adapters.refusal import reference_asked
from kbsub.eval.suite.inputs import NotApplicable, first_tensor
from kbsub.eval.suite.models import Workshop
from kbsub.eval.suite.setting import eps_of
from kbsub.eval.tasks.cases import INPUT, OWN_EPS, PARAMETERS, SECRET, Case
from kbsub.eval.tasks.secret import secret_cases


@dataclass
class Applicable:
    """The cases that are asked, and how many are not, by the reason."""

    cases: list[Case]
    left_out: Counter[str] = field(default_factory=Counter)


def applicable(shop: Workshop, cases: Sequence[Case]) -> Applicable:
    """The cases that the task of `shop` can be asked. All of them where its reference refuses to be looked at."""
    own = next((case for case in cases if not case.shape.inputs), None)
    if own is None:
        return Applicable(list(cases))
    try:
        with reference_asked(NotApplicable):
            model = shop.reference(replace(own, parameters=PARAMETERS["initial"], eps=OWN_EPS))
            inputs = shop.official()
    except NotApplicable:
        return Applicable(list(cases))
    named = [name for name, each in model.named_parameters() if each.is_floating_point()]
    knows = {
        "state": bool(model.state_dict()),
        "tensor": first_tensor(inputs) is not None,
        "parameters": bool(named),
        "weight": any(name.rpartition(".")[2] == "weight" for name in named),
        "eps": bool(eps_of(model)),
        "float input": any(isinstance(each, torch.Tensor) and each.is_floating_point() for each in inputs),
    }
    found = Applicable([])
    for case in cases:
        asked = case if case.shape.inputs else _asked(case, knows)
        if isinstance(asked, Case):
            found.cases.append(asked)
        else:
            found.left_out[asked] += 1
    return found


def _asked(case: Case, knows: dict[str, bool]) -> Case | str:
    """The case as this task is asked it, or why it has no meaning."""
    special = case.layout != "contiguous" or case.check != "compare"
    if case.check == "state" and not knows["state"]:
        return "the task's model has no state"
    if case.layout not in ("contiguous", "misaligned_parameters") and not knows["tensor"]:
        return "the task has no tensor among its inputs"
    if case.eps != OWN_EPS and not knows["eps"]:
        return "the task's model has no eps"
    if case.layout == "misaligned_parameters" and not knows["parameters"]:
        return "the task's model has no parameters"
    if case.parameters.kind != "initial" and not knows["parameters"]:
        if not special:
            return "the task's model has no parameters"
        case = as_constructed(case)
    if case.parameters.kind == "zero_gamma" and not knows["weight"]:
        return "the task's model has no weight"
    if case.input.kind != "official" and not knows["float input"]:
        if not special:
            return "the task has no float input"
        case = replace(case, input=INPUT["official"], name=case.name.replace("/normal", "/official"))
    return case


def as_constructed(case: Case) -> Case:
    """The same case with the parameters as constructed."""
    return replace(case, parameters=PARAMETERS["initial"], name=case.name.replace("/random", "/initial"))


def secret_asked(shop: Workshop, seed: int, *, oracle_only: bool = False) -> list[Case]:
    """The secret cases that the task can be asked; where it has no parameters, with none set."""
    found = []
    for case in secret_cases(seed):
        if oracle_only and not case.oracle:
            continue
        asked = applicable(shop, [case]).cases
        if not asked and case.parameters.name == PARAMETERS["random"].name:
            asked = applicable(shop, [as_constructed(case)]).cases
        found += asked
    return found


def without_parameters(cases: Sequence[Case]) -> list[Case]:
    """Layouts and checks that set no parameter, for a candidate whose parameters cannot be set."""
    special = [case for case in cases if case.layout != "contiguous" or case.check != "compare"]
    wanted = [case for case in special if case.layout != "misaligned_parameters" and not case.shape.inputs]
    secret = [case for case in cases if case.name.startswith(SECRET) and case not in wanted and case.eps == OWN_EPS]
    return [as_constructed(case) for case in (*wanted, *secret) if case.parameters.name == PARAMETERS["random"].name]
