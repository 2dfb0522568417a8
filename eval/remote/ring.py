"""The judge's side of a batch: a ring of slots that a worker sees, batches of calls on them by this side's clock.

    ring = CallRing(model, inputs, 24)          # room for 24 calls on arguments of these forms
    ring.write(slot, inputs)                # while the candidate has nothing to do
    batch = ring.run([3, 0, 17, ...])       # seconds from "go" to "done"; every answer sampled at once
    batch.values                            # on a GPU in the worker's own memory: compare them, do not keep them

On a GPU, answers are sampled through mappings that earlier batches left open, without a word from the worker. Where
that cannot be (memory never seen before, another device, a CPU), the clock runs on until the worker has told where they
are and they have been sampled. Must not know what is judged.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kbsub.eval.process.frames import printable
from kbsub.eval.process.stop import Threads, resume, settled_times, stood_still, stop
from kbsub.eval.remote.memory import DeviceBlock
from kbsub.eval.remote.model import TOLD_FORM, RemoteModel
from kbsub.eval.remote.segments import Look, Mappings
from kbsub.eval.remote.values import DTYPES, Slot, byte_span, pack

clock = time.perf_counter
SAMPLES = 64  # bytes of each answer that are read at once
GRAIN = 512  # every slot begins where torch's own allocations would
_AT_FORM = {"at": [int]}


@dataclass
class CallBatch:
    """One batch. `seconds`: by this side's clock. `at_once`: the answers were sampled before another word was said.

    `values`: what the calls returned, in order; `devices`: where each tensor lay, by the worker's word.
    """

    order: list[int]
    seconds: float
    at: list[int]
    sample: Look | None
    values: list[Any]
    devices: list[str]
    at_once: bool = True
    still: bool = False  # the worker's processes were held before it, and none of them ran
    looked_s: float = 0.0  # from "done" until the answers had been sampled, where that was at once
    starts: list[int] = field(default_factory=list)  # which tensor is the first of each call


class NotStill(Exception):
    """The worker's processes could not be held, or ran while they were; nothing was asked of them."""


class CallRing:
    """`count` slots for arguments of the forms that `template` has, on the worker's device, and batches on them.

    Tensors are contiguous in a slot. answer_bytes: of each tensor that a call returns: where samples may lie. Raises
    RemoteError of the transport.
    """

    def __init__(self, model: RemoteModel, template: Sequence[Any], count: int, answer_bytes: Sequence[int]) -> None:
        self.model, self.count, self.answer_bytes = model, count, list(answer_bytes)
        self.worker, self._held = model.worker, list[int]()
        self._ran: Threads = {}  # by then, of what is held
        self.device = self.worker.device
        self.mappings = Mappings(self.device)
        forms = [each for each in template if isinstance(each, torch.Tensor)]
        self.stride = [max(GRAIN, -(-each.numel() * each.element_size() // GRAIN) * GRAIN) for each in forms]
        starts = [count * sum(self.stride[:index]) for index in range(len(forms))]
        size = count * sum(self.stride)
        words, descriptors, block = self.worker._blocks.reserve(f"ring {model.number}", size)
        self.on_gpu = isinstance(block, DeviceBlock)
        told: list[dict[str, Any]] = []
        tree, self.slots, tensors = [], list[list[Any]](), list[torch.Tensor]()
        for number in range(count):
            held, place = list[Any](), 0
            for each in template:
                if not isinstance(each, torch.Tensor):
                    held.append(each)
                    continue
                slot = Slot(
                    str(each.dtype).removeprefix("torch."),
                    tuple(each.shape),
                    tuple(torch.empty(each.shape, device="meta").stride()),
                    starts[place] + number * self.stride[place],
                )
                told.append(slot.record())
                held.append(slot.view(block.bytes))
                place += 1
            self.slots.append(held)
            tree.append(pack(held, tensors))
        # Every slot's k-th tensor as one: (count, elements), rows `stride` bytes apart.
        self.columns: list[torch.Tensor] = []
        for place, each in enumerate(forms):
            part = block.bytes[starts[place] : starts[place] + count * self.stride[place]]
            rows = part.view(DTYPES[str(each.dtype).removeprefix("torch.")]).view(count, -1)
            self.columns.append(rows[:, : each.numel()])
        request = {**words, "value": {"list": tree}, "slots": told}
        self._ask("slots", {}, request, descriptors=descriptors)

    def hold(self) -> bool:
        """Stop the worker's processes; the next `run` lets them go once its clock runs. False where that cannot be."""
        try:
            self._held = stop(self.worker.child.pid, of_a_cell=True)
            self._ran = settled_times(self._held)
        except TimeoutError:
            self._held = []
        return bool(self._held)

    def release(self) -> None:
        resume(self._held)
        self._held = []

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The worker's processes stand still for as long."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def write(self, slot: int, inputs: Sequence[Any]) -> None:
        """Put the tensors of `inputs` into a slot."""
        for held, value in zip(self.slots[slot], inputs, strict=True):
            if isinstance(held, torch.Tensor):
                held.copy_(value)

    def run(
        self,
        order: Sequence[int],
        *,
        grad: bool = True,
        last: Callable[[], None] = lambda: None,
        only_still: bool = False,
        timeout_s: float | None = None,
    ) -> CallBatch:
        """Have the slots called in this order and take the time. last: what this side does just before it begins.

        only_still: where the worker's processes did not stand still, let them go and raise NotStill before a word.
        """
        words = {"order": list(order), "grad": grad}
        answers = len(order) * len(self.answer_bytes)
        places = torch.from_numpy(np.random.default_rng(secrets.randbits(128)).random((answers, SAMPLES)))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        last()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        still = bool(self._held) and stood_still(self.worker.child.pid, self._ran)
        if only_still and not still:
            self.release()
            raise NotStill
        channel = self.worker.channel
        channel.busy = self.on_gpu  # on a CPU the core may be the candidate's
        started = clock()
        try:
            reply = self._ask("batch", _AT_FORM, words, timeout_s=timeout_s, sent=self.release)
            done = clock()
        finally:
            channel.busy = False
        batch = CallBatch(list(order), done - started, list(reply["at"]), None, [], [], still=still)
        if self.on_gpu and len(batch.at) == answers:
            batch.sample = self.mappings.sample(batch.at, places, self.answer_bytes)
            if batch.sample is not None:
                torch.cuda.synchronize(self.device)
            batch.looked_s = clock() - done
        self._told(batch)
        lies = [each.data_ptr() for each in tensors_of(batch.values)]
        if batch.sample is None or batch.sample.lies != lies:
            batch.sample = self.mappings.sample_of(tensors_of(batch.values), places) if self.on_gpu else None
            batch.seconds, batch.looked_s, batch.at_once = clock() - started, 0.0, False
        return batch

    def taken(self, batch: CallBatch, call: int) -> tuple[Any, bool]:
        """What a call returned, in memory of our own, and whether it still is what was there when the batch was done.

        The copy is what is to be compared: the worker can change what it was made of.
        """
        if batch.sample is None:
            return batch.values[call], True
        value, same, number = batch.values[call], True, batch.starts[call]

        def own(each: Any) -> Any:
            nonlocal same, number
            if isinstance(each, (tuple, list)):
                return type(each)(own(part) for part in each)
            if not isinstance(each, torch.Tensor):
                return each
            span = byte_span(each).clone()
            if span.numel():
                same = batch.sample is not None and batch.sample.same(number, span) and same
            number += 1
            return span.view(each.dtype).as_strided(each.shape, each.stride())

        return own(value), same

    def forget(self, batch: CallBatch) -> None:
        """Have the worker let the answers go."""
        batch.values, batch.sample = [], None
        self._ask("forget", {}, {})

    def replayed_ms(self, replays: int = 5) -> float:
        """ms of a replay of a CUDA graph of one call on slot 0, by the worker's own clock: beside honest files."""
        reply = self._ask("replayed", {"ms": float}, {"replays": replays})
        return float(reply["ms"])

    def close(self) -> None:
        self.mappings.close()
        self.slots.clear()
        self.columns.clear()

    def _told(self, batch: CallBatch) -> None:
        reply = self.worker._ask("answers", TOLD_FORM, None, {"instance": self.model.number})
        try:
            value, devices = self.mappings.read(reply, self.worker._reader, batch.at)
        except ValueError as error:
            raise self.worker.nonsense("answers", error) from error
        if not isinstance(value, list) or len(value) != len(batch.order):
            raise self.worker.nonsense("answers", "not one value a call")
        batch.starts = [0, *itertools.accumulate(len(tensors_of(each)) for each in value)]
        batch.values, batch.devices = value, [printable(each, 40) for each in devices]

    def _ask(
        self,
        op: str,
        form: dict[str, Any],
        words: dict[str, Any],
        *,
        descriptors: Sequence[int] = (),
        timeout_s: float | None = None,
        sent: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        told = {"instance": self.model.number, **words}
        return self.worker._ask(op, form, timeout_s, told, descriptors=descriptors, sent=sent)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, in order, those in lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [each for part in value for each in tensors_of(part)] if isinstance(value, (tuple, list)) else []
