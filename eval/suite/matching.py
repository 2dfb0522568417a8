"""Which tensor of a candidate's state stands for which of the reference's: by what it is, not by what it is called.

Knows names, forms and, where those do not decide, initial values. Nothing here runs a candidate. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

Shape = tuple[int, ...]
Alike = Callable[[str, str], bool]
BY_KEY, BY_SUFFIX, BY_ORDER, BY_SHAPE = "by key", "by key within another module", "by order and shape", "by shape"
BY_VALUE = "by shape and initial value"


class Form(NamedTuple):
    """One tensor of a state dict. trained: a parameter, not a buffer. whole: of integers or bools."""

    shape: Shape
    trained: bool = True
    whole: bool = False

    def like(self, other: Form) -> bool:
        """Whether one can stand for the other, whether as a parameter or a buffer: shapes agree without their ones."""
        return self.kind == other.kind

    @property
    def kind(self) -> tuple[Shape, bool]:
        return tuple(size for size in self.shape if size != 1), self.whole


Forms = Mapping[str, Form]


@dataclass(frozen=True)
class StateMatch:
    """`keys`: the candidate's key -> the reference's, for every parameter and for the buffers that were found. how: in
    words. shapes: of each of the candidate's tensors. lacking: buffers of the reference that it does not keep."""

    keys: Mapping[str, str]
    how: str
    shapes: Mapping[str, Shape]
    lacking: tuple[str, ...] = field(default=())


def match_state(reference: Forms, candidate: Forms, alike: Alike | None = None) -> StateMatch | None:
    """The match of a candidate's state with the reference's, each key -> form in the order of its state dict.

    By key; else by key within another module (`inner.ln.weight` for `ln.weight`, or `weight` for it); else by order
    and shape, parameters, buffers and integers each among their own; else by shape, where each stands as often.
    `alike(reference's key, candidate's key)`: whether the two had equal initial values; asked where several tensors of
    one form could stand for one another: upstream seeds both constructors alike, so a right file's values are the
    reference's. None: no match; a reference without parameters always matches.
    """
    parameters = {key: form for key, form in reference.items() if form.trained}
    if all(key in candidate and form.like(candidate[key]) for key, form in parameters.items()):
        keys, how = {key: key for key in parameters}, BY_KEY
    elif within := _by_suffix(reference, candidate, alike):
        keys, how = within, BY_SUFFIX
    else:
        found = _by_order(reference, candidate) or _by_shape(parameters, candidate)
        if found is None:
            return None
        keys, how = found
        better = _by_value(keys, reference, alike) if alike is not None else keys
        keys, how = (keys, how) if better == keys else (better, BY_VALUE)
    more, lacking = _buffers(keys, reference, candidate, alike)
    shapes = {key: form.shape for key, form in candidate.items()}
    return StateMatch({**keys, **more}, how, shapes, lacking)


# ---- by names ----


def _by_suffix(reference: Forms, candidate: Forms, alike: Alike | None) -> dict[str, str] | None:
    """The reference's keys, whole or without what they all begin with, behind one prefix that they all have in common.

    None where no prefix fits, or several do and initial values do not tell them apart.
    """
    shared = len(_common_modules(reference))
    for cut in dict.fromkeys((0, shared)):
        stems = {".".join(key.split(".")[cut:]): key for key in reference}
        first = next(stem for stem, key in stems.items() if reference[key].trained)
        prefixes = [its.removesuffix(first) for its in candidate if f".{its}".endswith(f".{first}")]
        fits = []
        for prefix in prefixes:
            there = {prefix + stem: key for stem, key in stems.items() if prefix + stem in candidate}
            there = {its: key for its, key in there.items() if reference[key].like(candidate[its])}
            if all(key in there.values() for key, form in reference.items() if form.trained):
                fits.append(there)
        if len(fits) > 1 and alike is not None:
            fits = [each for each in fits if all(alike(key, its) for its, key in each.items())]
        if len(fits) == 1:
            return fits[0]
    return None


def _common_modules(keys: Iterable[str]) -> list[str]:
    """The modules that all keys lie in, outermost first."""
    paths = [key.split(".")[:-1] for key in keys]
    return [names[0] for names in takewhile(lambda each: len(set(each)) == 1, zip(*paths, strict=False))]


# ---- by forms ----


def _by_order(reference: Forms, candidate: Forms) -> tuple[dict[str, str], str] | None:
    """The parameters in their order; else, for one that keeps parameters as buffers, all of the state in its order,
    or its parameters alone."""

    def parameters(forms: Forms) -> dict[str, Form]:
        return {key: form for key, form in forms.items() if form.trained}

    sides: list[tuple[Forms, Forms]] = [
        (parameters(reference), parameters(candidate)),
        (reference, candidate),
        (parameters(reference), candidate),
    ]
    for mine, its in sides:
        paired = []
        for whole in (False, True):  # a count of integers may stand anywhere among floats
            one, other = ([key for key, form in side.items() if form.whole == whole] for side in (mine, its))
            if [mine[key].kind for key in one] != [its[key].kind for key in other]:
                break
            paired += list(zip(other, one, strict=True))
        else:
            return dict(paired), BY_ORDER
    return None


def _by_shape(parameters: Forms, candidate: Forms) -> tuple[dict[str, str], str] | None:
    """Each parameter's form as often in the candidate as in the reference; of several alike, in their order.

    Among the candidate's parameters, else among all of its state.
    """
    counts = Counter(form.kind for form in parameters.values())
    for side in ({key: form for key, form in candidate.items() if form.trained}, candidate):
        free = {kind: [key for key, form in side.items() if form.kind == kind] for kind in counts}
        if all(len(free[kind]) == count for kind, count in counts.items()):
            return {free[form.kind].pop(0): key for key, form in parameters.items()}, BY_SHAPE
    return None


# ---- by values ----


def _by_value(keys: Mapping[str, str], reference: Forms, alike: Alike) -> dict[str, str]:
    """The same tensors, within each form in the order that makes most initial values agree."""
    groups: dict[object, list[str]] = {}
    for its, mine in keys.items():
        groups.setdefault(reference[mine].kind, []).append(its)
    found: dict[str, str] = {}
    for group in groups.values():
        found |= _paired([keys[its] for its in group], group, alike)
    return {its: found[its] for its in keys}


def _paired(mine: list[str], its: list[str], alike: Alike | None) -> dict[str, str]:
    """Tensors of one form: in their order where that agrees in value, then with any that does, then in their order."""
    found = {}
    if alike is not None:
        found = {other: one for one, other in zip(mine, its, strict=False) if alike(one, other)}
        for one in mine:
            if one not in found.values():
                fits = [other for other in its if other not in found and alike(one, other)]
                found |= dict.fromkeys(fits[:1], one)
    rest = [other for other in its if other not in found]
    return found | dict(zip(rest, [one for one in mine if one not in found.values()], strict=False))


# ---- buffers ----


def _buffers(
    keys: Mapping[str, str], reference: Forms, candidate: Forms, alike: Alike | None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """(candidate's key -> reference's of the buffers that are not in `keys`, those that the candidate does not keep).

    By key; then by last name, where it stands as often; then by form among its buffers, if there are enough of them.
    """
    found: dict[str, str] = {}

    def groups(name: Callable[[str], object]) -> Iterable[tuple[object, list[str], list[str]]]:
        """(name, the reference's buffers of it that are not found yet, the candidate's free tensors of their form)."""
        open_: dict[tuple[object, object], list[str]] = {}
        for key, form in reference.items():
            if not form.trained and key not in keys.values() and key not in found.values():
                open_.setdefault((name(key), form.kind), []).append(key)
        for (of, kind), mine in open_.items():
            taken = {*keys, *found}
            yield of, mine, [key for key, form in candidate.items() if key not in taken and form.kind == kind]

    for _, mine, free in groups(lambda key: key):
        found |= {key: key for key in mine if key in free}
    for last, mine, free in groups(lambda key: key.rpartition(".")[2]):
        same = [key for key in free if key.rpartition(".")[2] == last]
        found |= dict(zip(same, mine, strict=True)) if len(same) == len(mine) else {}
    lacking: list[str] = []
    for _, mine, free in groups(lambda key: ""):
        own = [key for key in free if not candidate[key].trained]
        if len(own) < len(mine):
            lacking += mine
        else:
            found |= _paired(mine, own, alike)
    return found, tuple(key for key in reference if key in lacking)
