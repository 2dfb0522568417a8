"""Makes the tensors of a stress case: inputs, layouts, parameter settings. Knows torch, not tasks or candidates."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import torch

from kbsub.eval.tasks.cases import Input, Parameters

OWN = ("official", "sparse")  # kinds that keep the task's own values


class NotApplicable(Exception):
    """This case has no meaning here; the text says why."""


def make_inputs(entry: Input, templates: Sequence[Any], dtype: torch.dtype, device: torch.device) -> list[Any]:
    """One set of inputs: each float tensor of `templates` replaced by the transform, everything else kept.

    `templates` give shapes and, for kind "official", values (uniform ones for a template on the meta device). Other
    tensors are cast to `dtype` too, integers included, as upstream does. Raises NotApplicable when there is no float
    input to transform, or when a value of the transform is not a finite number of `dtype`.
    """
    if entry.kind not in OWN and not any(_is_float(each) for each in templates):
        raise NotApplicable("the task has no float input to transform")
    largest = max(abs(entry.scale), abs(entry.offset), abs(entry.value) if math.isfinite(entry.value) else 0.0)
    if largest > torch.finfo(dtype).max:
        raise NotApplicable(f"{largest:g} is above the largest {dtype} number")
    generator = torch.Generator(device=device).manual_seed(entry.seed)
    made: list[Any] = []
    for each in templates:
        if _is_float(each):
            made.append(_transform(entry, each, dtype, device, generator))
        else:
            made.append(each.to(device=device, dtype=dtype) if isinstance(each, torch.Tensor) else each)
    return made


def _transform(
    entry: Input, template: torch.Tensor, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    shape = template.shape
    if entry.kind in OWN:
        if template.is_meta:
            return torch.rand(shape, generator=generator, device=device).to(dtype)
        own = template.to(device=device, dtype=dtype)
        return own if entry.kind == "official" else _with_a_stranger(own, entry)
    if entry.kind == "constant":
        return torch.full(shape, entry.value, dtype=dtype, device=device)
    if entry.kind == "ramp":
        return torch.linspace(-1, 1, template.numel(), device=device).to(dtype).reshape(shape)
    if entry.kind == "alternating":
        x = torch.full(shape, entry.value, dtype=dtype, device=device)
        x.view(-1)[1::2].neg_()
        return x
    if entry.kind == "near_constant":
        noise = torch.rand(shape, generator=generator, device=device)
        return noise.mul_(2.0**-20).add_(1).mul_(entry.value).to(dtype)
    x = torch.randn(shape, generator=generator, device=device)
    if entry.kind == "normal":
        return x.mul_(entry.scale).add_(entry.offset).to(dtype)
    if entry.kind == "subnormal":
        # An eighth of the smallest normal number: nearly every element is subnormal in `dtype`.
        return x.mul_(torch.finfo(dtype).tiny / 8).to(dtype)
    x = x.to(dtype)
    if not x.numel():
        return x
    rows = x.reshape(shape[0] if shape else 1, -1)
    if entry.kind == "outlier":
        rows[:, {"first": 0, "last": -1}.get(entry.at, special_place(entry, *rows.shape)[1])] = entry.value
    elif entry.kind == "special":
        row, column = special_place(entry, *rows.shape)
        rows[row, column] = entry.value
    else:
        raise ValueError(f"input {entry.name!r}: unknown kind {entry.kind!r}")
    return x


def _with_a_stranger(own: torch.Tensor, entry: Input) -> torch.Tensor:
    """A copy with one value, at a place that the seed draws, that is `scale` times the largest there."""
    found = own.clone(memory_format=torch.contiguous_format)
    if found.numel():
        flat = found.view(-1)
        largest = float(flat.abs().max())
        largest = largest if 0.0 < largest < torch.finfo(own.dtype).max / abs(entry.scale) else 1.0
        flat[random.Random(entry.seed).randrange(flat.numel())] = entry.scale * largest
    return found


def special_place(entry: Input, rows: int, width: int) -> tuple[int, int]:
    """Where a "special" input puts its one value: not in row 0, so that a row before and rows after can be watched; or
    where its seed says (at: "drawn"), in the same row whatever the width."""
    if entry.at == "drawn":
        chance = random.Random(entry.seed)
        return int(chance.random() * rows), int(chance.random() * width)
    return min(1, rows - 1), width // 3


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in another memory layout. Raises NotApplicable where the tensor is too small for it."""
    if layout in ("contiguous", "misaligned_parameters"):
        return tensor
    if layout == "misaligned":
        return misaligned(tensor)
    if layout == "transposed":
        if tensor.dim() < 2 or min(tensor.shape[-2:]) < 2:
            raise NotApplicable("the input has no two dimensions to transpose")
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        wide = torch.full(
            (*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan, dtype=tensor.dtype, device=tensor.device
        )
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "expanded":
        return tensor[:1].expand_as(tensor)
    raise ValueError(f"unknown layout {layout!r}")


def values_of(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """What `lay_out` makes of the values, in an ordinary contiguous tensor: only "expanded" changes them."""
    return tensor[:1].expand_as(tensor).contiguous() if layout == "expanded" else tensor


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that starts one element into its storage."""
    room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    view = room[1:].view(tensor.shape)
    view.copy_(tensor)
    return view


def set_parameters(model: torch.nn.Module, setting: Parameters) -> None:
    """Fill the float parameters of `model` in place. Raises NotApplicable when there are none to fill."""
    named = [(name, each) for name, each in model.named_parameters() if each.is_floating_point()]
    if setting.kind == "initial":
        return
    if setting.kind == "zero_gamma":
        named = [(name, each) for name, each in named if name.rpartition(".")[2] == "weight"]
    if not named:
        raise NotApplicable(f"the task's model has no parameter for the setting {setting.name!r}")
    with torch.no_grad():
        for index, (_, each) in enumerate(named):
            if setting.kind == "zero_gamma":
                each.zero_()
                continue
            if setting.kind == "sparse":
                _set_one(each, setting.seed + index)
                continue
            generator = torch.Generator(device=each.device).manual_seed(setting.seed + index)
            values = torch.randn(each.shape, generator=generator, device=each.device)
            each.copy_(values * setting.scale)


def _set_one(parameter: torch.Tensor, seed: int) -> None:
    """Change one element, at a place that the seed draws, by one to three times what elements are (by 1 to 3 if 0)."""
    if parameter.numel():
        chance, size = random.Random(seed), float(parameter.double().square().mean().sqrt()) or 1.0
        flat = parameter.detach().reshape(-1).clone()
        flat[chance.randrange(flat.numel())] += chance.choice((-1, 1)) * chance.uniform(1.0, 3.0) * size
        parameter.copy_(flat.view(parameter.shape))


def first_tensor(inputs: Sequence[Any]) -> int | None:
    """The index of the first tensor among the inputs: the one that layouts and special values are of."""
    return next((index for index, each in enumerate(inputs) if isinstance(each, torch.Tensor)), None)


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
