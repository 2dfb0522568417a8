"""A model's output as one float tensor, and beside it what no tolerance may soften: its form, and its integers.

Upstream takes an index of 10001 for one of 10000; these checks of our own do not. Knows values; runs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

_KEPT = "kbsub_parts"  # on the tensor that `as_one` made; slices and copies of it have none


@dataclass(frozen=True)
class Parts:
    """Shape and dtype of each tensor of an output, in order, and those that are no floats, by their place.

    alone: it was a tensor, not a list or tuple: upstream can compare no list, not even one of a single tensor."""

    forms: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    whole: dict[int, torch.Tensor]
    alone: bool = True


def as_one(value: Any) -> Any:
    """An output as one float tensor: integers and bools in float64, the tensors of a tuple one after the other, flat.

    Anything else as it is. `exact_problem` still knows of what the tensor was made.
    """
    one = _joined(value)
    if isinstance(one, torch.Tensor) and one is not value:
        tensors, alone = _tensors(value), isinstance(value, torch.Tensor)
        one = (
            one.view(one.shape) if any(one is each for each in tensors) else one
        )  # what is kept on it is of this value
        forms = tuple((tuple(each.shape), each.dtype) for each in tensors)
        whole = {at: each for at, each in enumerate(tensors) if not _inexact(each)}
        setattr(one, _KEPT, Parts(forms, whole, alone))
    return one


def row_of_one(one: torch.Tensor, row: int) -> torch.Tensor:
    """Row `row` alone of what `as_one` gave, with its integers where it was one tensor."""
    part, parts = one[row : row + 1], getattr(one, _KEPT, None)
    if isinstance(parts, Parts) and len(parts.forms) == 1 and part.shape[1:] == one.shape[1:]:
        ((_, dtype),) = parts.forms
        whole = {at: each[row : row + 1] for at, each in parts.whole.items()}
        setattr(part, _KEPT, Parts(((tuple(part.shape), dtype),), whole, parts.alone))
    return part


def exact_problem(expected: torch.Tensor, got: torch.Tensor) -> str | None:
    """What of two outputs, each from `as_one`, must be equal and is not, in words: tensors, shapes, types, integers."""
    mine, its = _parts_of(expected), _parts_of(got)
    if len(mine.forms) != len(its.forms):
        return f"returned {len(its.forms)} tensor(s), the reference {len(mine.forms)}"
    if mine.alone != its.alone:
        return f"returned {_form(its)}, the reference {_form(mine)}"
    for at, ((shape, dtype), (its_shape, its_dtype)) in enumerate(zip(mine.forms, its.forms, strict=True)):
        where = f"output {at}: " if len(mine.forms) > 1 else ""
        if shape != its_shape or dtype != its_dtype:
            return f"{where}{its_dtype} of shape {its_shape}, the reference's is {dtype} of shape {shape}"
        if at in mine.whole and at in its.whole and not torch.equal(mine.whole[at], its.whole[at]):
            differ = int((mine.whole[at] != its.whole[at]).sum())
            return f"{where}{differ} of {mine.whole[at].numel()} elements of {dtype} differ; integers must be equal"
    return None


def _parts_of(one: torch.Tensor) -> Parts:
    found = getattr(one, _KEPT, None)
    return found if isinstance(found, Parts) else Parts(((tuple(one.shape), one.dtype),), {})


def _form(parts: Parts) -> str:
    return "a tensor" if parts.alone else f"a list or tuple of {len(parts.forms)}"


def _joined(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if _inexact(value) else value.double()
    if _is_row(value):
        flat = [_joined(each).reshape(-1) for each in value]
        return torch.cat([each.to(flat[0].dtype) for each in flat]) if len(flat) > 1 else _joined(value[0])
    return value


def _is_row(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(each, torch.Tensor) for each in value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _inexact(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()
