"""The worker's memory as the judge sees it while batches run: mappings kept open, and samples taken through them.

On a GPU a mapping is found by the handle and number that the worker tells, and by the address its allocation has in the
worker, which follows from the first answer that lay in it. On a CPU answers are copied when they are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kbsub.eval.remote.memory import HANDLE_BYTES, Mapped, SharedMemoryError, device_bytes
from kbsub.eval.remote.reading import OutputReader
from kbsub.eval.remote.values import MAX_TENSORS, Slot, ValueProblem, byte_span, unpack

SPARE_MAPPINGS = 32
Numbers = npt.NDArray[np.int64]
Key = tuple[str, int | None]  # an allocation: its handle, and the number that its driver gives once


@dataclass(frozen=True)
class Look:
    """Bytes of answers when they were looked at. lies: where each answer begins here. offsets, seen: which bytes of
    each were read, and what they were; (answers, samples)."""

    lies: list[int]
    offsets: torch.Tensor
    seen: torch.Tensor

    def same(self, answer: int, span: torch.Tensor) -> bool:
        """Whether the bytes of an answer, its memory from first to last element, are those that were seen."""
        return torch.equal(span[self.offsets[answer].clamp(max=span.numel() - 1)], self.seen[answer])


class Mappings:
    """The worker's allocations that are mapped here. `close` lets them go; the next answer maps anew."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.shared = device, device.type == "cuda"
        self._of: dict[Key, Mapped] = {}
        self._worker_base: dict[Key, int] = {}  # where an allocation begins in the worker
        self._known = (_int64([]), _int64([]), _int64([]))  # by address there: where each begins and ends; where here

    def sample(self, at: Sequence[int], places: torch.Tensor, sizes: Sequence[int]) -> Look | None:
        """Look at answers at these addresses of the worker's; None where one lies in no memory that is mapped.

        sizes: bytes of each, in turn over and over. places: where in each, as fractions of its bytes, float64 of shape
        (answers, samples).
        """
        nbytes = np.resize(_int64(sizes), len(at))
        bases, ends, here = self._known
        asked = _int64(at)
        place = np.searchsorted(bases, asked, side="right") - 1
        if not len(at) or place.min() < 0 or bool((asked > ends[place] - nbytes).any()):
            return None
        return self._look(here[place] + (asked - bases[place]), nbytes, places)

    def sample_of(self, tensors: Sequence[torch.Tensor], places: torch.Tensor) -> Look | None:
        """Look at these tensors, of which `read` has just told; None where there is nothing in them."""
        somewhere = next((each for each in tensors if each.numel()), None)
        if somewhere is None:
            return None
        # One without elements lies nowhere: an element of another is looked at instead, and nobody asks for it.
        spans = [
            byte_span(each if each.numel() else somewhere.as_strided((1,), (1,), somewhere.storage_offset()))
            for each in tensors
        ]
        places = places[: len(spans)] if len(spans) <= len(places) else places[torch.arange(len(spans)) % len(places)]
        lies = _int64([each.data_ptr() for each in spans])
        return self._look(lies, _int64([each.numel() for each in spans]), places)

    def _look(self, lies: Numbers, nbytes: Numbers, places: torch.Tensor) -> Look:
        """One look at everything: the memory from the first answer to the last as if it were one tensor."""
        low = int(lies.min())
        offsets = (places * torch.from_numpy(nbytes)[:, None]).to(torch.int64)
        index = (torch.from_numpy(lies - low)[:, None] + offsets).to(self.device)
        seen = device_bytes(low, int((lies + nbytes).max()) - low, self.device)[index]
        return Look(lies.tolist(), offsets.to(self.device), seen)

    def read(self, reply: dict[str, Any], reader: OutputReader, at: Sequence[int]) -> tuple[Any, list[str]]:
        """The value of a reply and its tensors' devices: views of the worker's memory on a GPU, copies on a CPU.

        at: where the worker said that they lie, for the next sample. ValueError for whatever does not hold.
        """
        told = reply["tensors"]
        devices = [each["facts"]["device"] for each in told]
        if not self.shared:
            value, _ = reader.read(reply)
            return value, devices
        if len(told) > MAX_TENSORS:
            raise ValueProblem(f"{len(told)} tensors, of which at most {MAX_TENSORS} are read")
        try:
            tensors = [self._view(each) for each in told]
        except (SharedMemoryError, OverflowError) as error:
            raise ValueProblem(str(error)) from error
        if len(at) == len(told):
            self._learn(told, at)
        if len(self._of) > SPARE_MAPPINGS + 2 * len(told):  # what the worker has freed stays taken until it is let go
            self._let_go({(each["handle"], each["number"]) for each in told})
        return unpack(reply["value"], tensors), devices

    def _view(self, told: dict[str, Any]) -> torch.Tensor:
        handle = told["handle"]
        if 0 in told["shape"]:
            slot = Slot.checked({**told, "offset": 0}, 1 << 62)
            return slot.view(torch.empty(0, dtype=torch.uint8, device=self.device))
        if handle is None or len(handle) != 2 * HANDLE_BYTES:
            raise ValueProblem("a device tensor without a handle")
        key = (handle, told["number"])
        if key not in self._of:
            for old in [each for each in self._of if each[0] == handle]:  # the same place, another allocation
                self._of.pop(old).close()
                self._worker_base.pop(old, None)
            self._of[key] = Mapped(bytes.fromhex(handle), self.device)
        return Slot.checked(told, self._of[key].nbytes).view(self._of[key].bytes)

    def _learn(self, told: list[dict[str, Any]], at: Sequence[int]) -> None:
        for each, address in zip(told, at, strict=True):
            key = (each["handle"], each["number"])
            if key not in self._of or each["copied"] or address <= each["offset"]:
                continue
            base, size = address - each["offset"], self._of[key].nbytes
            for other, there in list(self._worker_base.items()):  # memory that was let go, and given again
                if other != key and there < base + size and base < there + self._of[other].nbytes:
                    del self._worker_base[other]
            self._worker_base[key] = base
        self._index()

    def _index(self) -> None:
        keys = sorted(self._worker_base, key=lambda key: self._worker_base[key])
        bases = [self._worker_base[key] for key in keys]
        ends = [base + self._of[key].nbytes for base, key in zip(bases, keys, strict=True)]
        self._known = (_int64(bases), _int64(ends), _int64([self._of[key].address for key in keys]))

    def _let_go(self, kept: set[Key]) -> None:
        for key in [key for key in self._of if key not in kept]:
            self._of.pop(key).close()
            self._worker_base.pop(key, None)
        self._index()

    def close(self) -> None:
        for mapped in self._of.values():
            mapped.close()
        self._of.clear()
        self._worker_base.clear()
        self._index()


def _int64(values: Sequence[int]) -> Numbers:
    return np.asarray(values, dtype=np.int64)
