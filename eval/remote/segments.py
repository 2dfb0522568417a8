"""The worker's memory as the judge sees it while batches run: mappings kept open, and samples taken through them.

On a GPU a mapping is found by the handle that the worker tells, and by the address its allocation has in the worker,
which follows from the first answer that lay in it. On a CPU answers are copied, and a sample is of the shared file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kbsub.eval.remote.memory import HANDLE_BYTES, Mapped, SharedMemoryError, device_bytes
from kbsub.eval.remote.reading import OutputReader
from kbsub.eval.remote.values import MAX_TENSORS, Slot, ValueProblem, byte_span, unpack


class Sample:
    """Bytes of answers when they were looked at, and where they are looked at again. `lies`: the answers' addresses."""

    def __init__(self, spans: list[torch.Tensor], places: list[torch.Tensor], lies: list[int]) -> None:
        self.spans, self.places, self.lies = spans, places, lies
        self.seen = self._look()

    def _look(self) -> list[torch.Tensor]:
        return [span[at].cpu() for span, at in zip(self.spans, self.places, strict=True)]

    def changed(self) -> bool:
        return any(not torch.equal(now, seen) for now, seen in zip(self._look(), self.seen, strict=True))


class Mappings:
    """The worker's allocations that are mapped here. `close` lets them go; the next answer maps anew."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._of: dict[str, Mapped] = {}
        self._worker_base: dict[str, int] = {}  # handle -> where its allocation begins in the worker

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
        low = min(lies)
        offsets = places * torch.tensor(nbytes, dtype=torch.float64)[:, None]
        index = (torch.tensor(lies, dtype=torch.int64)[:, None] - low + offsets.to(torch.int64)).reshape(-1)
        # One look at everything: the span from the first to the last mapping as if it were one tensor.
        span = device_bytes(low, max(lies) - low + max(nbytes), self.device)
        return Sample([span], [index.to(self.device)], lies)

    def sample_of(self, tensors: Sequence[torch.Tensor], places: torch.Tensor) -> Sample:
        """Look at these tensors, of which `read` has just told."""
        spans = [byte_span(each) for each in tensors if each.numel()]
        picks = [places[index % len(places)] for index in range(len(spans))]
        where = [(pick * span.numel()).to(torch.int64).to(span.device) for pick, span in zip(picks, spans, strict=True)]
        return Sample(spans, where, [each.data_ptr() for each in tensors])

    def _here(self, address: int, nbytes: int) -> int | None:
        for handle, base in self._worker_base.items():
            mapped = self._of[handle]
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
        if handle not in self._of:
            self._of[handle] = Mapped(bytes.fromhex(handle), self.device)
        return Slot.checked(told, self._of[handle].nbytes).view(self._of[handle].bytes)

    def _learn(self, told: list[dict[str, Any]], at: Sequence[int]) -> None:
        for each, address in zip(told, at, strict=True):
            if each["handle"] is None or each["copied"] or not address:
                continue
            base = address - each["offset"]
            size = self._of[each["handle"]].nbytes
            for handle, other in list(self._worker_base.items()):  # memory that was let go, and given again
                if handle != each["handle"] and other < base + size and base < other + self._of[handle].nbytes:
                    del self._worker_base[handle]
            self._worker_base[each["handle"]] = base

    def close(self) -> None:
        for mapped in self._of.values():
            mapped.close()
        self._of.clear()
        self._worker_base.clear()
