"""How arguments and results are told in JSON: trees of plain values, and where in shared memory each tensor lies.

A tensor is the bytes from its first to its last element, with shape and strides; so views, expanded and misaligned
tensors cross as they are. `unpack` and `Slot.checked` take nothing on trust. Must not know who talks to whom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    )
}  # fmt: skip
ALIGNMENT = 256  # an address modulo this is kept: kernels choose their path by it
MAX_DIMS, MAX_ELEMENTS = 64, 1 << 38
MAX_DEPTH, MAX_NODES, MAX_TENSORS = 8, 10_000, 4096
SLOT_FORM = {"dtype": str, "shape": [int], "strides": [int], "offset": int}


class ValueProblem(ValueError):
    """A value that cannot cross, or a description that does not hold; in words."""


@dataclass(frozen=True)
class Slot:
    """A strided tensor within a block: element type, shape, strides (elements, not negative) and offset (bytes)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last element."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * self.itemsize

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def checked(cls, told: Mapping[str, Any], room: int) -> Slot:
        """The slot that somebody told, when it lies within `room` bytes. ValueProblem otherwise."""
        slot = cls(told["dtype"], tuple(told["shape"]), tuple(told["strides"]), told["offset"])
        if slot.dtype not in DTYPES:
            raise ValueProblem(f"an element type {slot.dtype[:40]!r}")
        if len(slot.shape) != len(slot.strides) or len(slot.shape) > MAX_DIMS:
            raise ValueProblem(f"{len(slot.shape)} sizes and {len(slot.strides)} strides")
        if min((*slot.shape, *slot.strides, slot.offset), default=0) < 0 or slot.offset % slot.itemsize:
            raise ValueProblem("a negative or misaligned size, stride or offset")
        if math.prod(slot.shape) > MAX_ELEMENTS:
            raise ValueProblem(f"a tensor of {math.prod(slot.shape)} elements")
        if slot.offset + slot.nbytes > room:
            raise ValueProblem(f"a tensor that ends at byte {slot.offset + slot.nbytes} of {room}")
        return slot

    def view(self, block: torch.Tensor) -> torch.Tensor:
        """The tensor itself, within the bytes of its block."""
        elements = block[self.offset : self.offset + self.nbytes].view(DTYPES[self.dtype])
        return elements.as_strided(self.shape, self.strides)

    def part(self, block: torch.Tensor) -> torch.Tensor:
        """Its bytes within the block."""
        return block[self.offset : self.offset + self.nbytes]


def lay(tensors: Sequence[torch.Tensor]) -> tuple[list[Slot], int]:
    """Slots one behind the other for `tensors`, each address modulo ALIGNMENT kept, and the bytes of the block."""
    slots, end = [], 0
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or name not in DTYPES or tensor.is_conj() or tensor.is_neg():
            raise ValueProblem(f"a {tensor.layout} tensor of {tensor.dtype}, or a conjugated one, cannot be sent")
        slot = Slot(name, tuple(tensor.shape), tuple(tensor.stride()), 0)
        shift = tensor.data_ptr() % ALIGNMENT if tensor.numel() else 0
        start = -(-end // ALIGNMENT) * ALIGNMENT + shift - shift % slot.itemsize
        slots.append(Slot(slot.dtype, slot.shape, slot.strides, start))
        end = start + slot.nbytes
    return slots, end


def byte_span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a strided tensor's first to its last element, as uint8."""
    slot = Slot(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()), 0)
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage(), tensor.storage_offset() * slot.itemsize, (slot.nbytes,), (1,))


def pack(value: Any, tensors: list[Any], depth: int = 0) -> dict[str, Any]:
    """`value` as a tree of JSON; its tensors are appended to `tensors`, each object once. ValueProblem for others."""
    if depth > MAX_DEPTH:
        raise ValueProblem(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, torch.Tensor):
        for index, known in enumerate(tensors):
            if known is value:
                return {"tensor": index}
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, (bool, str)):
        return {"plain": value}
    if isinstance(value, int):
        return {"int": str(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [pack(each, tensors, depth + 1) for each in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, pack(each, tensors, depth + 1)] for key, each in value.items()]}
    raise ValueProblem(f"a {type(value).__name__} cannot cross between processes")


def unpack(tree: Any, tensors: Sequence[Any], depth: int = 0, count: list[int] | None = None) -> Any:
    """The value of a tree. ValueProblem for whatever `pack` does not make."""
    count = [0] if count is None else count
    count[0] += 1
    if depth > MAX_DEPTH or count[0] > MAX_NODES:
        raise ValueProblem("a value nested too deeply or of too many parts")
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ValueProblem("a value that has not one kind")
    ((kind, told),) = tree.items()
    if kind == "tensor" and type(told) is int and 0 <= told < len(tensors):
        return tensors[told]
    if kind == "plain" and (told is None or isinstance(told, (bool, str))):
        return told
    if kind == "int" and isinstance(told, str) and len(told) <= 40:
        return int(told)
    if kind == "float" and isinstance(told, str) and len(told) <= 40:
        return float.fromhex(told)
    if kind == "dtype" and isinstance(told, str) and told in DTYPES:
        return DTYPES[told]
    if kind in ("list", "tuple") and isinstance(told, list):
        parts = [unpack(each, tensors, depth + 1, count) for each in told]
        return tuple(parts) if kind == "tuple" else parts
    if kind == "dict" and isinstance(told, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in told):
            raise ValueProblem("a dict that is not pairs of a text and a value")
        return {key: unpack(each, tensors, depth + 1, count) for key, each in told}
    raise ValueProblem(f"a value of kind {kind[:40]!r}")
