"""Sets a candidate's parameters and eps to the reference's, by what they are: how that was done is said in the record.

Knows a reference, a worker's instance and their states; no case's inputs and no comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.eval.remote.model import RemoteModel
from kbsub.eval.remote.reading import StateForm
from kbsub.eval.suite.inputs import NotApplicable
from kbsub.eval.suite.matching import Form, Forms, StateMatch, match_state
from kbsub.eval.tasks.cases import EPS_NOT_SET

BY_PATH, BY_VALUE, BY_ARGUMENT = "by its name", "by its value", "by the constructor's argument"


@dataclass
class HowSet:
    """How one candidate is set, found out at its first instance. None: not asked yet; "": it cannot be set."""

    parameters: str | None = None
    eps: str | None = None

    def record(self) -> dict[str, Any]:
        told = {"parameters_set": self.parameters, "eps_set": self.eps}
        return {key: value or "not at all" for key, value in told.items() if value is not None}


def form_of(tensor: torch.Tensor, trained: bool = True) -> Form:
    return Form(tuple(tensor.shape), trained, not (tensor.is_floating_point() or tensor.is_complex()))


def forms_of(model: torch.nn.Module) -> dict[str, Form]:
    """The forms of a model's parameters and buffers, in the order of its state dict."""
    named = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict().items()
    return {key: form_of(value, key in named) for key, value in state if isinstance(value, torch.Tensor)}


def forms_told(told: Mapping[str, StateForm]) -> dict[str, Form]:
    """The same of a candidate in its own process."""
    floats = ("float", "bfloat", "complex")
    return {key: Form(form.shape, form.trained, not form.dtype.startswith(floats)) for key, form in told.items()}


def match_of(
    forms: Forms,
    state: Callable[[], Mapping[str, torch.Tensor]],
    reference: torch.nn.Module,
    initial: Mapping[str, torch.Tensor],
) -> StateMatch | None:
    """Which of the candidate's tensors is which of the reference's.

    forms, state: the candidate's, as constructed; the values are asked for only where forms do not decide. initial: the
    reference's state as constructed.
    """
    own: dict[str, torch.Tensor] = {}

    def alike(mine: str, its: str) -> bool:
        if not own:
            own.update(state())
        if its not in own:  # it does not tell it
            return False
        one, other = initial[mine], own[its]
        return one.numel() == other.numel() and torch.equal(one.reshape(-1), other.reshape(-1).to(one))

    return match_state(forms_of(reference), forms, alike)


def state_for(
    match: StateMatch, state: Mapping[str, torch.Tensor], only: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """The reference's tensors under the candidate's keys and in its shapes. only: these of the reference's keys."""
    chosen = {its: mine for its, mine in match.keys.items() if only is None or mine in only}
    return {its: state[mine].detach().reshape(match.shapes[its]) for its, mine in chosen.items()}


def eps_of(reference: torch.nn.Module) -> dict[str, float]:
    """Path -> value of every float attribute of the reference whose name says that it is an eps."""
    return {
        f"{path}.{name}" if path else name: value
        for path, module in reference.named_modules()
        for name, value in vars(module).items()
        if type(value) is float and "eps" in name.lower()
    }


def set_eps(reference: torch.nn.Module, eps: float) -> dict[str, float]:
    """Set every eps of the reference; what they were. NotApplicable: it has none."""
    own = eps_of(reference)
    if not own:
        raise NotApplicable("the task's model has no eps")
    for path in own:
        holder, _, name = path.rpartition(".")
        vars(reference.get_submodule(holder))[name] = eps
    return own


def with_eps(arguments: tuple[Any, ...], own: Mapping[str, float], eps: float) -> tuple[Any, ...]:
    """The constructor's arguments with each that is one of the reference's eps replaced."""
    values = set(own.values())
    return tuple(eps if type(each) is float and each in values else each for each in arguments)


def set_remote_eps(model: RemoteModel, own: Mapping[str, float], eps: float, *, by_argument: bool) -> str:
    """Set the candidate's eps; how. own: the reference's, before. by_argument: its constructor has been given the new
    one. Raises NotApplicable."""
    how = set()
    floats: dict[str, float] | None = None
    for path, value in own.items():
        if model.set_attribute(path, eps):
            how.add(BY_PATH)
            continue
        floats = model.floats() if floats is None else floats
        fits = [each for each, held in floats.items() if held == value] if value else []
        for each in fits:
            model.set_attribute(each, eps)
        if fits:
            how.add(BY_VALUE)
        elif by_argument:
            how.add(BY_ARGUMENT)
        else:
            raise NotApplicable(
                f"{EPS_NOT_SET}: no attribute {path}, none that is {value:g}, and no argument of the constructor is"
            )
    return ", ".join(sorted(how))
