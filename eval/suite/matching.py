"""Which tensor of a candidate's state stands for which of the reference's: by what it is, not by what it is called.

Knows names, shapes and, where those do not decide, initial values. Nothing here runs a candidate. No torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

Shape = tuple[int, ...]
BY_KEY, BY_ORDER, BY_SHAPE = "by key", "by order and shape", "by shape"
BY_VALUE = "by shape and initial value"


@dataclass(frozen=True)
class StateMatch:
    """`keys`: the candidate's key -> the reference's, for every parameter and for the buffers that were found. how: in
    words. lacking: buffers of the reference that the candidate does not keep."""

    keys: Mapping[str, str]
    how: str
    lacking: tuple[str, ...] = field(default=())


def match_state(
    parameters: Mapping[str, Shape],
    buffers: Mapping[str, Shape],
    candidate: Mapping[str, Shape],
    alike: Callable[[str, str], bool] | None = None,
) -> StateMatch | None:
    """The match of a candidate's state with the reference's parameters and buffers, each key -> shape in their order.

    By key; else by order and shape; else by shape, where each stands once. Shapes agree when they do without their
    ones. `alike(reference's key, candidate's key)`: whether the two had equal initial values; asked where several
    tensors of one shape could stand for one another. None: no match; a reference without parameters always matches.
    """
    if all(key in candidate and _plain(candidate[key]) == _plain(shape) for key, shape in parameters.items()):
        return _with_buffers({key: key for key in parameters}, BY_KEY, buffers, candidate)
    found = _by_order(parameters, buffers, candidate) or _by_shape(parameters, candidate)
    if found is None:
        return None
    keys, how = found
    if alike is not None and not all(alike(mine, its) for its, mine in keys.items()):
        better = _by_value(parameters, keys, alike)
        keys, how = (better, BY_VALUE) if better is not None else (keys, how)
    return _with_buffers(keys, how, buffers, candidate)


def _with_buffers(
    keys: Mapping[str, str], how: str, buffers: Mapping[str, Shape], candidate: Mapping[str, Shape]
) -> StateMatch:
    """Add the buffers: those of the same key, then those of the same last name, each of the same shape."""
    found, lacking = dict(keys), []
    for key, shape in buffers.items():
        last = key.rpartition(".")[2]
        free = [its for its in candidate if its not in found and _plain(candidate[its]) == _plain(shape)]
        same = [its for its in free if its == key] or [its for its in free if its.rpartition(".")[2] == last]
        if len(same) == 1:
            found[same[0]] = key
        elif key not in found.values():
            lacking.append(key)
    return StateMatch(found, how, tuple(lacking))


def _by_order(
    parameters: Mapping[str, Shape], buffers: Mapping[str, Shape], candidate: Mapping[str, Shape]
) -> tuple[dict[str, str], str] | None:
    """All of the state in its order, else its parameters alone."""
    its = [_plain(shape) for shape in candidate.values()]
    for wanted in ({**parameters, **buffers}, dict(parameters)):
        if its == [_plain(shape) for shape in wanted.values()]:
            return dict(zip(candidate, wanted, strict=True)), BY_ORDER
    return None


def _by_shape(parameters: Mapping[str, Shape], candidate: Mapping[str, Shape]) -> tuple[dict[str, str], str] | None:
    """Each parameter's shape as often in the candidate as in the reference; of several alike, in their order."""
    counts = Counter(_plain(shape) for shape in parameters.values())
    free = {shape: [key for key, each in candidate.items() if _plain(each) == shape] for shape in counts}
    if any(len(free[shape]) != count for shape, count in counts.items()):
        return None
    found: dict[str, str] = {}
    for key, shape in parameters.items():
        found[free[_plain(shape)].pop(0)] = key
    return found, BY_SHAPE


def _by_value(
    parameters: Mapping[str, Shape], keys: Mapping[str, str], alike: Callable[[str, str], bool]
) -> dict[str, str] | None:
    """The same tensors in another order within each shape, so that all initial values agree; None: there is no such."""
    found: dict[str, str] = {}
    rest = [key for key in keys if keys[key] in parameters]
    for mine, shape in parameters.items():
        fits = [its for its in rest if _plain(parameters[keys[its]]) == _plain(shape) and alike(mine, its)]
        if not fits:
            return None
        rest.remove(fits[0])
        found[fits[0]] = mine
    return found


def _plain(shape: Sequence[int]) -> Shape:
    return tuple(size for size in shape if size != 1)
