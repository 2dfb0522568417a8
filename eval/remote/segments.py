"""The worker's memory as the judge sees it while batches run: mappings kept open, and samples taken through them.

On a GPU a mapping is found by the handle and number that the worker tells, and by the address its allocation has in the
worker, which follows from the first answer that lay in it. On a CPU answers are copied when they are told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbsub.eval.remote.memory import HANDLE_BYTES, Mapped, SharedMemoryError, device_bytes
from kbsub.eval.remote.reading import OutputReader
from kbsub.eval.remote.values import MAX_TENSORS, Slot, ValueProblem, byte_span, unpack

Key = tuple[str, int | None]  # an allocation: its handle, and the number that its driver gives once


@dataclass(frozen=True)
class Sample:
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
        self.device = device
        self._of: dict[Key, Mapped] = {}
        self._worker_base: dict[Key, int] = {}  # where an allocation begins in the worker

    def sample(self, at: Sequence[int], places: torch.Tensor, sizes: Sequence[int]) -> Sample | None:
        """Look at answers at these addresses of the worker's; None where one lies in no memory that is mapped.

        sizes: bytes of each, in turn over and over. places: where in each, as fractions of its bytes, float64 of shape
        (answers, samples).
        """
        nbytes = [sizes[index % len(sizes)] for index in range(len(at))]
        found = [self._here(address, size) for address, size in zip(at, nbytes, strict=True)]
        lies = [place for place in found if place is not None]
        if len(lies) < len(at) or not lies:
            return None
        return self._look(lies, nbytes, places)

    def sample_of(self, tensors: Sequence[torch.Tensor], places: torch.Tensor) -> Sample:
        """Look at these tensors, of which `read` has just told."""
        spans = [byte_span(each) for each in tensors]
        places = places[: len(spans)] if len(spans) <= len(places) else places[torch.arange(len(spans)) % len(places)]
        return self._look([each.data_ptr() for each in spans], [each.numel() for each in spans], places)

    def _look(self, lies: list[int], nbytes: Sequence[int], places: torch.Tensor) -> Sample:
        """One look at everything: the memory from the first answer to the last as if it were one tensor."""
        low = min(lies)
        offsets = (places * torch.tensor(nbytes, dtype=torch.float64)[:, None]).to(torch.int64)
        index = (torch.tensor(lies, dtype=torch.int64)[:, None] - low + offsets).to(self.device)
        span = device_bytes(low, max(place + size for place, size in zip(lies, nbytes, strict=True)) - low, self.device)
        return Sample(lies, offsets.to(self.device), span[index])

    def _here(self, address: int, nbytes: int) -> int | None:
        for key, base in self._worker_base.items():
            mapped = self._of[key]
            if base <= address and address + nbytes <= base + mapped.nbytes:
                return mapped.address + address - base
        return None

    def read(self, reply: dict[str, Any], reader: OutputReader, at: Sequence[int]) -> tuple[Any, list[str]]:
        """The value of a reply and its tensors' devices: views of the worker's memory on a GPU, copies on a CPU.

        at: where the worker said that they lie, for the next sample. ValueError for whatever does not hold.
        """
        told = reply["tensors"]
        devices = [each["facts"]["device"] for each in told]
        if self.device.type != "cuda":
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
            if key not in self._of or each["copied"] or not address:
                continue
            base, size = address - each["offset"], self._of[key].nbytes
            for known, other in list(self._worker_base.items()):  # memory that was let go, and given again
                if known != key and other < base + size and base < other + self._of[known].nbytes:
                    del self._worker_base[known]
            self._worker_base[key] = base

    def close(self) -> None:
        for mapped in self._of.values():
            mapped.close()
        self._of.clear()
        self._worker_base.clear()
