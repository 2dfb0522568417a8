"""The wrong variants of a reference: what a file that does not do the task could give instead.

Each says its name, what a task is blind to when it passes (`blind`), and how its output comes about. The list depends
on the task's calls, parameters and inputs; those beyond `Most` are counted in `left_out` with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from kbsub.eval.blindspots.calls import Call, first_tensor, part, with_first
from kbsub.eval.blindspots.reference import NotTried, Reference, Trial

T = TypeVar("T")
PARTS = (2, 4, 8, 16)
MOST_CALLS, MOST_PARAMETERS = 20, 16


@dataclass(frozen=True)
class Variant:
    """`make(trial)`: the variant's output, or NotTried. `words`: what a task that lets it pass accepts.

    blind: vacuous, operator, parameter, input, data, precision; hostile or unstable of a variant that ought to pass.
    """

    name: str
    blind: str
    words: str
    make: Callable[[Trial], torch.Tensor]
    free: bool = False  # passes by construction: the substitute is the very same
    light: bool = True  # makes no more than one copy of the output


@dataclass
class Variants:
    """The variants of one task, and what was left out: [(what, why)]."""

    chosen: list[Variant] = field(default_factory=list)
    left_out: list[tuple[str, str]] = field(default_factory=list)


def spread(items: Sequence[T], most: int, key: Callable[[T], str]) -> list[T]:
    """At most `most` of them in their order: the first of each key, then evenly from the rest."""
    if len(items) <= most:
        return list(items)
    first: dict[str, int] = {}
    for at, item in enumerate(items):
        first.setdefault(key(item), at)
    taken = set(list(first.values())[:most])
    rest = [at for at in range(len(items)) if at not in taken]
    room = most - len(taken)
    taken |= {rest[at * len(rest) // room] for at in range(room)} if room else set()
    return [items[at] for at in sorted(taken)]


# ---- outputs ----


def outputs(reference: Reference, elsewhere: torch.Tensor) -> list[Variant]:
    """Made of no model run: constants, another draw's output, and parts of the right output repeated."""
    mean = float(elsewhere.double().mean()) if elsewhere.numel() < 1 << 26 else float(elsewhere.mean())
    mean = mean if math.isfinite(mean) else 0.0
    kept: list[torch.Tensor] = [elsewhere]  # let go after the first trial: most answers have failed by then

    def other(trial: Trial) -> torch.Tensor:
        if kept:
            return kept.pop()
        return trial.run(reference.other_inputs())

    found = [
        Variant("output: zeros", "vacuous", "zeros", lambda t: torch.zeros_like(t.output)),
        Variant("output: ones", "vacuous", "ones", lambda t: torch.ones_like(t.output)),
        Variant("output: its mean", "vacuous", "a constant", lambda t: torch.full_like(t.output, mean)),
        Variant("output: another draw's", "vacuous", "the output of other inputs", other),
        Variant("output: first element", "data", "its first element everywhere", _first_element),
        Variant("output: rows shifted", "data", "its rows in another order", _shifted),
    ]
    for share in PARTS:
        found.append(
            Variant(
                f"output: first 1/{share} of the rows",
                "data",
                f"the first 1/{share} of its rows repeated",
                lambda t, s=share: _part(t.output, 0, s),  # type: ignore[misc]
            )
        )
    return found


def _first_element(trial: Trial) -> torch.Tensor:
    if trial.output.numel() < 2:
        raise NotTried("the output has one element")
    return trial.output.reshape(-1)[:1].expand(trial.output.numel()).view(trial.output.shape)


def _shifted(trial: Trial) -> torch.Tensor:
    if not trial.output.ndim or trial.output.shape[0] < 2:
        raise NotTried("the output has one row")
    return trial.output.roll(1, 0)


def _part(tensor: torch.Tensor, axis: int, share: int) -> torch.Tensor:
    made = part(tensor, axis, share) if tensor.ndim > axis else None
    if made is None:
        raise NotTried(f"axis {axis} is too short for 1/{share}")
    return made


# ---- operators ----


def operators(reference: Reference) -> Variants:
    """Each call of forward replaced: by an argument of the same shape, by the mean of its results, by zeros, or (a
    reduction) by itself on a part of what it reduces. The last call as a constant is the output as one."""
    found = Variants()
    calls = [call for call in reference.calls if call.shape or call.axes]
    kept = spread(calls, MOST_CALLS, lambda call: call.function)
    if len(kept) < len(calls):
        found.left_out.append((f"{len(calls) - len(kept)} more calls", f"{len(kept)} of {len(calls)} calls are tried"))
    last = reference.calls[-1].index if reference.calls else -1
    for call in kept:
        for at in call.alike[:2]:
            words = f"{call.name} left out" if len(call.alike) == 1 else f"{call.name} as its argument {at + 1} alone"
            found.chosen.append(_replaced(call, f"left out, argument {at + 1}", words, _argument(at)))
        if call.index != last:
            found.chosen.append(_replaced(call, "its mean", f"{call.name} as a constant", _constant(call, call.mean)))
            found.chosen.append(_replaced(call, "zeros", f"{call.name} as zeros", _constant(call, 0.0)))
        for axis in call.axes:
            for share in (2, 16):
                words = f"{call.name} over the first 1/{share} of axis {axis}"
                change = _partial(axis, share)
                found.chosen.append(_replaced(call, f"first 1/{share} of axis {axis}", words, change, blind="data"))
    return found


Change = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def _replaced(call: Call, what: str, words: str, change: Change, blind: str = "operator") -> Variant:
    def make(trial: Trial) -> torch.Tensor:
        def visit(index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return (change if index == call.index else _as_it_is)(func, args, kwargs)

        return trial.run_with(visit)

    return Variant(f"call {call.index + 1} {call.name}: {what}", blind, words, make, light=False)


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _argument(at: int) -> Change:
    return lambda func, args, kwargs: args[at]


def _constant(call: Call, value: float) -> Change:
    def change(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = next(each for each in args if isinstance(each, torch.Tensor))
        if not call.plain:
            result = func(*args, **kwargs)
            wanted = first_tensor(result)
            return with_first(result, torch.full_like(wanted, value)) if wanted is not None else result
        made = torch.full(call.shape, value, dtype=call.dtype, device=source.device)
        return args[0].copy_(made) if call.in_place else made

    return change


def _partial(axis: int, share: int) -> Change:
    return lambda func, args, kwargs: func(_part(args[0], axis, share), *args[1:], **kwargs)


# ---- parameters ----


def parameters(reference: Reference) -> Variants:
    """Each parameter as zeros, as ones and as another seed's. One that is initialised to just that costs no run."""
    found = Variants()
    own = dict(reference.model.named_parameters())
    try:
        other = dict(reference.other_model().named_parameters()) if own else {}
    except Exception as error:
        other = {}
        found.left_out.append(("parameters of another seed", f"{type(error).__name__}: {error}"[:200]))
    names = spread(list(own), MOST_PARAMETERS, lambda name: name)
    if len(names) < len(own):
        found.left_out.append(
            (f"{len(own) - len(names)} more parameters", f"{len(names)} of {len(own)} parameters are tried")
        )
    for name in names:
        mine = own[name].data
        constant = {value: bool((mine == value).all()) for value in (0.0, 1.0)}
        choices: list[tuple[str, Callable[[], torch.Tensor], bool]] = [
            ("zeros", lambda mine=mine: torch.zeros_like(mine), constant[0.0]),  # type: ignore[misc]
            ("ones", lambda mine=mine: torch.ones_like(mine), constant[1.0]),  # type: ignore[misc]
        ]
        if name in other:
            theirs = other[name].data
            choices.append(("another seed's", lambda theirs=theirs: theirs, bool(torch.equal(mine, theirs))))  # type: ignore[misc]
        found.chosen += [_parameter(name, what, value, same) for what, value, same in choices]
    return found


def _parameter(name: str, what: str, value: Callable[[], torch.Tensor], same: bool) -> Variant:
    def make(trial: Trial) -> torch.Tensor:
        with trial.parameter_as(name, value()):
            return trial.run()

    return Variant(f"parameter {name}: {what}", "parameter", f"{name} as {what}", make, free=same, light=False)


# ---- inputs ----


def inputs(given: list[Any]) -> list[Variant]:
    """Each tensor input as zeros, as another draw's, with a part of an axis repeated; a part of all rows repeated."""
    tensors = [(at, each) for at, each in enumerate(given) if isinstance(each, torch.Tensor) and each.numel() > 1]
    found = []
    for at, each in tensors:
        found.append(_input(at, "zeros", "input", lambda trial, mine: torch.zeros_like(mine)))
        found.append(_input(at, "another draw's", "input", _theirs(at)))
        for axis in sorted({1, each.ndim - 1} - {0}):
            if each.ndim > axis and each.shape[axis] >= 16:
                for share in (2, 16):
                    change = _repeated(axis, share)
                    found.append(_input(at, f"first 1/{share} of axis {axis}", "data", change))
    rows = {each.shape[0] for _, each in tensors if each.ndim}
    for share in PARTS if len(rows) == 1 else ():
        found.append(_rows(share))
    return found


def _theirs(at: int) -> Callable[[Trial, torch.Tensor], torch.Tensor]:
    def change(trial: Trial, mine: torch.Tensor) -> torch.Tensor:
        other: torch.Tensor = trial.reference.other_inputs()[at]
        return other

    return change


def _repeated(axis: int, share: int) -> Callable[[Trial, torch.Tensor], torch.Tensor]:
    return lambda trial, mine: _part(mine, axis, share)


def _input(at: int, what: str, blind: str, change: Callable[[Trial, torch.Tensor], torch.Tensor]) -> Variant:
    def make(trial: Trial) -> torch.Tensor:
        changed = list(trial.inputs)
        changed[at] = change(trial, trial.inputs[at])
        return trial.run(changed)

    words = f"input {at + 1} as {what}" if blind == "input" else f"the {what} of input {at + 1} repeated"
    return Variant(f"input {at + 1}: {what}", blind, words, make, light=False)


def _rows(share: int) -> Variant:
    def make(trial: Trial) -> torch.Tensor:
        changed = [
            _part(each, 0, share) if isinstance(each, torch.Tensor) and each.numel() > 1 else each
            for each in trial.inputs
        ]
        return trial.run(changed)

    words = f"the first 1/{share} of the input rows repeated"
    return Variant(f"inputs: first 1/{share} of the rows", "data", words, make, light=False)


def names(variants: Iterable[Variant]) -> list[str]:
    return [variant.name for variant in variants]
