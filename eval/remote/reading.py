"""What a worker tells of its outputs, checked, and copied at once into memory of the judge's own."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kbsub.eval.process.frames import check, close_all, printable
from kbsub.eval.remote.memory import HANDLE_BYTES, Mapped, SharedMemoryError, check_host, copy_host
from kbsub.eval.remote.values import MAX_TENSORS, SLOT_FORM, Slot, ValueProblem, unpack

# How much of a worker's memory stays mapped from one reply to the next: freed there, it stays taken until let go here.
STATE_ENTRIES = 100_000
KEPT_BYTES, KEPT_MAPPINGS = 4 << 30, 16

FACTS_FORM = {
    **SLOT_FORM,
    "handle": (str, None),
    "number": (int, None),
    "copied": bool,
    "facts": {"type": str, "device": str, "layout": str, "requires_grad": bool, "aliases_input": bool},
}


@dataclass(frozen=True)
class TensorFacts:
    """What the worker says of one output tensor; its word, which nothing depends on.

    copied: it could not be shared as it was (another device, layout or allocator, a view of an input on a GPU).
    """

    type_name: str
    device: str
    layout: str
    dtype: torch.dtype
    strides: tuple[int, ...]
    requires_grad: bool
    aliases_input: bool
    copied: bool


class OutputReader:
    """Reads the tensors of replies. `rights`: the descriptors that came with the last one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rights: list[int] = []
        self._file: tuple[int, int, int] | None = None  # number, descriptor, bytes: the worker's own block, on a CPU
        self._kept: OrderedDict[tuple[str, int], Mapped] = OrderedDict()  # by handle and number, the latest last

    def take(self, wanted: list[int], came: list[int]) -> None:
        """Keep the descriptors of a reply that may have them; close those of any other, and what is left."""
        close_all(self.rights)
        close_all([each for each in came if each not in wanted])
        self.rights = wanted

    def read(self, reply: Mapping[str, Any]) -> tuple[Any, tuple[TensorFacts, ...]]:
        """The value of a reply and the facts of its tensors. ValueError for whatever does not hold."""
        told = reply["tensors"]
        if len(told) > MAX_TENSORS:
            raise ValueProblem(f"{len(told)} tensors, of which at most {MAX_TENSORS} are read")
        try:
            tensors = self._read_device(told) if self.device.type == "cuda" else self._read_host(told, reply["block"])
            value = unpack(reply["value"], tensors)
        except (SharedMemoryError, OverflowError) as error:
            raise ValueProblem(str(error)) from error
        finally:
            close_all(self.rights)
            self.rights = []
        return value, tuple(_facts(each, tensor) for each, tensor in zip(told, tensors, strict=True))

    def _read_host(self, told: list[dict[str, Any]], block: Mapping[str, Any]) -> list[torch.Tensor]:
        if block["fresh"]:
            if len(self.rights) != 1:
                raise ValueProblem(f"{len(self.rights)} descriptors for one block")
            size = check_host(self.rights[0])
            self._close_file()
            self._file = (block["number"], self.rights.pop(), size)
        if not told:
            return []
        if self._file is None or self._file[0] != block["number"]:
            raise ValueProblem("tensors in a block that never came")
        _, descriptor, size = self._file
        found = []
        for each in told:
            slot = Slot.checked(each, size)
            found.append(_at_start(slot).view(copy_host(descriptor, slot.offset, slot.nbytes)))
        return found

    def _read_device(self, told: list[dict[str, Any]]) -> list[torch.Tensor]:
        passing: dict[str, Mapped] = {}
        found = []
        try:
            for each in told:
                handle = each["handle"]
                if handle is None or len(handle) != 2 * HANDLE_BYTES:
                    raise ValueProblem("a device tensor without a handle")
                if 0 in each["shape"]:
                    slot = Slot.checked(each, 1 << 62)
                    found.append(_at_start(slot).view(torch.empty(0, dtype=torch.uint8, device=self.device)))
                    continue
                mapped = self._mapped(handle, each["number"], passing)
                slot = Slot.checked(each, mapped.nbytes)
                found.append(_at_start(slot).view(slot.part(mapped.bytes).clone()))
        finally:
            for mapped in passing.values():
                mapped.close()
        return found

    def _mapped(self, handle: str, number: int | None, passing: dict[str, Mapped]) -> Mapped:
        """The worker's allocation, mapped: kept from an earlier reply, or new; in `passing` when it is not to be kept.

        Opening and closing one of 268 MB took 8 of the 10 ms of a call on an H200. One that the worker has freed is
        never asked for again, since a number is given once; a worker that lies about it shows us its old bytes.
        """
        if handle in passing:
            return passing[handle]
        if number is not None and (handle, number) in self._kept:
            self._kept.move_to_end((handle, number))
            return self._kept[handle, number]
        mapped = Mapped(bytes.fromhex(handle), self.device)
        if number is None or mapped.nbytes > KEPT_BYTES:
            passing[handle] = mapped
            return mapped
        for key in [key for key in self._kept if key[0] == handle]:  # the same place, another allocation
            self._kept.pop(key).close()
        self._kept[handle, number] = mapped
        while sum(each.nbytes for each in self._kept.values()) > KEPT_BYTES or len(self._kept) > KEPT_MAPPINGS:
            self._kept.popitem(last=False)[1].close()
        return mapped

    def close(self) -> None:
        """Let the worker's memory go."""
        while self._kept:
            with contextlib.suppress(RuntimeError, SharedMemoryError):  # of a context that is broken
                self._kept.popitem()[1].close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            close_all([self._file[1]])
            self._file = None


def _at_start(slot: Slot) -> Slot:
    return Slot(slot.dtype, slot.shape, slot.strides, 0)


def _facts(told: Mapping[str, Any], tensor: torch.Tensor) -> TensorFacts:
    facts = told["facts"]
    return TensorFacts(
        printable(facts["type"], 80),
        printable(facts["device"], 40),
        printable(facts["layout"], 40),
        tensor.dtype,
        tuple(tensor.stride()),
        facts["requires_grad"],
        facts["aliases_input"],
        told["copied"],
    )


class StateForm(NamedTuple):
    """One tensor of a state dict, by its worker's word. trained: a parameter, not a buffer."""

    dtype: str
    shape: tuple[int, ...]
    trained: bool


def state_forms(told: Any) -> dict[str, StateForm]:
    """The form of each tensor of a state dict, as a worker tells them. ValueError for what is no such thing."""
    if not isinstance(told, dict) or len(told) > STATE_ENTRIES:
        raise ValueError("the forms of a state dict are no object")
    for form in told.values():
        check(form, [(str, list, bool)])
        if len(form) != 3 or not isinstance(form[0], str) or not isinstance(form[2], bool):
            raise ValueError("the form of a state's tensor is not dtype, shape and whether it is a parameter")
        check(form[1], [int])
    return {key: StateForm(form[0], tuple(form[1]), form[2]) for key, form in told.items()}
