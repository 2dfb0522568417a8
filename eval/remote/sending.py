"""The judge's memory that a worker sees: arguments are copied into it, and compared with it after the call."""

from __future__ import annotations

from typing import Any

import torch

from kbsub.eval.remote.memory import DeviceBlock, HostBlock, same_bytes
from kbsub.eval.remote.values import Slot, ValueProblem, byte_span, lay, pack


class Blocks:
    """Named blocks of shared memory, each made again, twice as large, when its contents outgrow it.

    Old ones are kept until `close`: the worker may look at them still.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made: list[HostBlock | DeviceBlock] = []
        self._of: dict[str, int] = {}
        self._sent: dict[str, tuple[list[torch.Tensor], list[Slot], list[int | None]]] = {}

    def put(self, name: str, value: Any, again: bool = False) -> tuple[dict[str, Any], list[int]]:
        """Copy the tensors of `value` into block `name`: the words and descriptors of a request that tell of them.

        again: at the very places where the last contents of the block lie, whatever their own alignment. ValueProblem
        for a value that cannot cross, a tensor on another device, or other forms than the last.
        """
        tensors: list[Any] = []
        tree = pack(value, tensors)
        for tensor in tensors:
            if tensor.device != self.device:
                raise ValueProblem(f"a tensor on {tensor.device} for a worker on {self.device}")
        slots, size = lay(tensors)
        if again:
            last = self._sent[name][1] if name in self._sent else []
            if [_form(slot) for slot in slots] != [_form(slot) for slot in last]:
                raise ValueProblem("what is replayed must have the shapes, strides and dtypes that were captured")
            slots, size = last, 0
        opened, descriptors = self._room(name, size)
        block = self._made[self._of[name]]
        for slot, tensor in zip(slots, tensors, strict=True):
            slot.part(block.bytes).copy_(byte_span(tensor.detach()))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        # Which tensor each argument is; one that is nested has no index of its own.
        arguments = value if isinstance(value, list) else []
        where = [next((i for i, each in enumerate(arguments) if each is tensor), None) for tensor in tensors]
        self._sent[name] = (tensors, slots, where)
        told = {
            "value": tree,
            "slots": [slot.record() for slot in slots],
            "block": self._of[name],
            "open": opened,
        }
        return told, descriptors

    def reserve(self, name: str, size: int) -> tuple[dict[str, Any], list[int], HostBlock | DeviceBlock]:
        """Block `name` of at least `size` bytes, to be written by its owner: words and descriptors that tell of it."""
        opened, descriptors = self._room(name, size)
        return {"block": self._of[name], "open": opened}, descriptors, self._made[self._of[name]]

    def changed(self, name: str) -> tuple[int, ...]:
        """Indices of the last arguments in `name` whose shared bytes differ from the judge's own tensors.

        A nested tensor counts as -1.
        """
        tensors, slots, where = self._sent[name]
        block = self._made[self._of[name]]
        pairs = zip(tensors, slots, where, strict=True)
        differ = [
            -1 if index is None else index
            for tensor, slot, index in pairs
            if slot.nbytes and not same_bytes(slot.part(block.bytes), byte_span(tensor.detach()))
        ]
        return tuple(differ)

    def _room(self, name: str, size: int) -> tuple[dict[str, Any] | None, list[int]]:
        if name in self._of and self._made[self._of[name]].nbytes >= size:
            return None, []
        room = 2 * size if name in self._of else size
        block = DeviceBlock(room, self.device) if self.device.type == "cuda" else HostBlock(room)
        self._of[name] = len(self._made)
        self._made.append(block)
        handle = block.handle.hex() if isinstance(block, DeviceBlock) else None
        descriptors = [block.descriptor] if isinstance(block, HostBlock) else []
        return {"id": self._of[name], "nbytes": block.nbytes, "handle": handle}, descriptors

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._made)

    def close(self) -> None:
        self._sent.clear()
        for block in self._made:
            block.close()
        self._made.clear()
        self._of.clear()


def _form(slot: Slot) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return slot.dtype, slot.shape, slot.strides
