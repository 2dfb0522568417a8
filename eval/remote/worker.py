"""The candidate's side of the transport: `python -m kbsub.eval.remote.worker SOCKET`, started in a cell.

It loads the file as upstream does, in the dict of its own copy of the task, and does what it is asked: construct, load
state, call, read state. It holds no reference, no truth and no verdict, and what it says is not believed: the other
side checks the form of every word and compares every value itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import math
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kbsub.adapters.candidate import load_candidate
from kbsub.adapters.task import Task
from kbsub.eval.process.frames import Channel, printable
from kbsub.eval.remote.batches import BATCH_REPLIES, Batches
from kbsub.eval.remote.errors import error_words
from kbsub.eval.remote.graphs import called, captured, in_turn
from kbsub.eval.remote.host_cache import seed_host_cache
from kbsub.eval.remote.likeness import dress
from kbsub.eval.remote.memory import (
    DeviceBlock,
    HostBlock,
    HostView,
    Mapped,
    SharedMemoryError,
    allocation_of,
    handle_of,
    number_of,
)
from kbsub.eval.remote.memory import map_host as _map_host
from kbsub.eval.remote.probes import behind_slow_work, spoil_freed, spoiled_allocations
from kbsub.eval.remote.values import Slot, lay, pack, unpack

REQUEST_LIMIT = 64 << 20  # bytes: the source of a candidate is one of the words
FOREVER_S = 1e6  # the other side counts the time
PLAIN = ("start", "construct", "drop", "load_state", "capture", "repeat", *BATCH_REPLIES)

# Taken before a candidate can put something else in their place. It can still lie; it cannot by accident.
_data_ptr, _detach = torch.Tensor.data_ptr, torch.Tensor.detach
_synchronize = torch.cuda.synchronize
_plain = torch._C.DisableTorchFunction


class Session(Batches):
    """What one worker holds: the candidate's class, its instances, and the memory it shares."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.channel = channel
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.model: Callable[..., Any] = torch.nn.Module
        self.instances: dict[int, Any] = {}
        self.blocks: dict[int, Any] = {}  # the other side's memory
        self.captured: dict[int, Callable[[], Any]] = {}
        self.kept: dict[tuple[int, int], Any] = {}  # outputs that the other side asks for again
        self.given: tuple[Any, list[torch.Tensor]] = (None, [])  # a call's arguments, and where they lie
        self.base = 0
        self.held: Any = None  # the last answer: the other side reads it until it asks again
        self.out: Any = None  # our own memory for what cannot be shared as it is
        self.out_number = 0

    # ---- requests ----

    def start(self, request: dict[str, Any], _: Any) -> dict[str, Any]:
        self.device, self.dtype = torch.device(request["device"]), getattr(torch, request["dtype"])
        if torch.get_num_threads() != request["threads"]:  # the judge's are as many, or its bits are not comparable
            torch.set_num_threads(request["threads"])
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)
        build_dir = dress(request["like"], request["source"]) if request["like"] else request["build_dir"]
        told = request["task"]
        paths = {key: Path(told[key]) for key in ("folder", "reference_path", "path") if told.get(key)}
        task = Task(**{**told, **paths})
        self.base = self._peak()
        modules = task.modules()
        model = load_candidate(request["source"], task, build_dir=build_dir, modules=modules)
        if request["hosted"]:
            import kbsub.eval.host_executor as host

            limits = getattr(host, request["hosted"])
            host.adopt(modules.context, limits, host.HostExecutor(workers=request["workers"]))
            model = modules.context["ModelNew"]
        self.model = model
        return {}

    def construct(self, request: dict[str, Any], init: Any) -> dict[str, Any]:
        if request["seed"] is not None:
            torch.manual_seed(request["seed"])
        with torch.set_grad_enabled(request["grad"]):
            model = self.model(*init)
        if hasattr(model, "to"):
            model = model.to(device=self.device, dtype=self.dtype)
        self.instances[request["instance"]] = model
        return {"state": self._forms(model)}

    @staticmethod
    def _forms(model: Any) -> dict[str, Any]:
        state = model.state_dict() if hasattr(model, "state_dict") else {}
        named = getattr(model, "named_parameters", None)
        trained = {key for key, _ in named(remove_duplicate=False)} if named is not None else set()
        return {
            key: [str(value.dtype).removeprefix("torch."), list(value.shape), key in trained]
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }

    def drop(self, request: dict[str, Any], _: Any) -> dict[str, Any]:
        self.instances.pop(request["instance"], None)
        self.captured.pop(request["instance"], None)
        self.kept = {key: value for key, value in self.kept.items() if key[0] != request["instance"]}
        return {}

    def load_state(self, request: dict[str, Any], state: Any) -> dict[str, Any]:
        model = self.instances[request["instance"]]
        with torch.no_grad():
            if not request["bind"]:
                model.load_state_dict(state, strict=request["strict"])
                return {}
            every = (model.named_parameters, model.named_buffers)
            own = {key: value for named in every for key, value in named(remove_duplicate=False)}
            for key, value in state.items():
                own[key].data = value
        return {}

    def state(self, request: dict[str, Any], _: Any) -> Any:
        return dict(self.instances[request["instance"]].state_dict())

    def set_attribute(self, request: dict[str, Any], value: Any) -> bool:
        path, _, name = request["path"].rpartition(".")
        try:
            holder = self.instances[request["instance"]].get_submodule(path)
        except AttributeError:
            return False
        if found := hasattr(holder, name):
            setattr(holder, name, value)
        return found

    def floats(self, request: dict[str, Any], _: Any) -> dict[str, float]:
        """Path -> value of every float attribute of the instance and of its submodules."""
        model = self.instances[request["instance"]]
        named = model.named_modules() if hasattr(model, "named_modules") else [("", model)]
        return {
            f"{path}.{name}" if path else name: value
            for path, module in named
            for name, value in vars(module).items()
            if type(value) is float and math.isfinite(value)
        }

    def has(self, request: dict[str, Any], _: Any) -> bool:
        return hasattr(self.instances[request["instance"]], request["name"])

    def call(self, request: dict[str, Any], inputs: Any) -> Any:
        model = self.instances[request["instance"]]
        poison = request["poison"]
        if poison is not None:
            spoil_freed(poison, inputs, self.device)
        everywhere = spoiled_allocations() if poison is not None and poison["everywhere"] else contextlib.nullcontext()
        method = model if request["method"] is None else getattr(model, request["method"])
        if request.get("seed") is not None:
            torch.manual_seed(request["seed"])
        with torch.set_grad_enabled(request["grad"]), everywhere:
            result = method(*inputs)
        if request["keep"] is not None:
            self.kept[request["instance"], request["keep"]] = result
        return result

    def repeat(self, request: dict[str, Any], inputs: Any) -> dict[str, Any]:
        """Call the instance `calls` times on the same inputs; what it returns is let go."""
        model = self.instances[request["instance"]]
        with torch.no_grad():
            for call in range(request["calls"]):
                model(*inputs)
                if call % 100 == 99 and self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
        return {}

    def on_stream(self, request: dict[str, Any], inputs: Any) -> Any:
        """The answer behind slow work on a stream: on a side stream, as seen there; on the current one, as seen at
        once and as it is when all is done."""
        if request["poison"] is not None:
            spoil_freed(request["poison"], inputs, self.device)
        found = behind_slow_work(self.instances[request["instance"]], inputs, side=request["side"])
        return found[0] if request["side"] else list(found)

    def read(self, request: dict[str, Any], _: Any) -> Any:
        return self.kept[request["instance"], request["keep"]]

    def peak(self, request: dict[str, Any], _: Any) -> int:
        return self._peak() - self.base

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    def capture(self, request: dict[str, Any], inputs: Any) -> dict[str, Any]:
        """Warm up and, on CUDA, capture a graph; `replay` then works on whatever lies in the same inputs."""
        model = self.instances[request["instance"]]
        run = in_turn([model if name is None else getattr(model, name) for name in request["methods"]])
        with torch.no_grad():
            self.captured[request["instance"]] = (
                captured(run, inputs) if self.device.type == "cuda" else called(run, inputs)
            )
        return {}

    def replay(self, request: dict[str, Any], _: Any) -> Any:
        with torch.no_grad():
            return self.captured[request["instance"]]()

    def finish(self) -> None:
        """Wait for whatever was asked: once it has a reply, the other side writes into the memory that is read here.

        Without this, inputs that came next overwrote parameters that were still being copied (seen on an H200).
        """
        if self.device.type == "cuda":
            _synchronize(self.device)

    # ---- memory ----

    def open_block(self, told: dict[str, Any], descriptors: list[int]) -> None:
        if told["handle"] is not None:
            self.blocks[told["id"]] = Mapped(bytes.fromhex(told["handle"]), self.device, told["nbytes"])
        else:
            self.blocks[told["id"]] = HostView(_map_host(descriptors[0], told["nbytes"]))

    def tensors_of(self, request: dict[str, Any]) -> list[torch.Tensor]:
        """The arguments of a request; with `same`, the very tensors of the last such call, if they lay there."""
        slots = [Slot.checked(told, 1 << 62) for told in request["slots"]]
        if not request.get("same"):
            return [slot.view(self.blocks[request["block"]].bytes) for slot in slots]
        place = (request["block"], slots)
        if self.given[0] != place:
            self.given = (place, [slot.view(self.blocks[request["block"]].bytes) for slot in slots])
        for tensor in self.given[1] if request["touch"] else ():
            torch.autograd.graph.increment_version(tensor)
        return list(self.given[1])

    def tell(self, value: Any) -> tuple[dict[str, Any], list[int]]:
        """The reply for a value: its tree, and where each of its tensors lies for the other side to read."""
        tensors: list[Any] = []
        tree = pack(value, tensors)
        with _plain():
            plain = [self._shareable(each) for each in tensors]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            placed = self._export_device([each for each, _ in plain])
        else:
            placed = self._export_host([each for each, _ in plain])
        slots, block, descriptors = placed
        self.held = plain
        told = [
            {**slot, "facts": facts, "copied": facts["copied"] or slot["copied"]}
            for slot, (_, facts) in zip(slots, plain, strict=True)
        ]
        for each in told:
            each["facts"].pop("copied")
        return {"value": tree, "tensors": told, "block": block}, descriptors

    def _shareable(self, tensor: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """The tensor as it is when it lies in this device's memory in strides, else a plain copy; and what it was."""
        facts: dict[str, Any] = {
            "type": printable(type(tensor).__name__, 80),
            "device": str(tensor.device),
            "layout": str(tensor.layout),
            "requires_grad": bool(tensor.requires_grad),
        }
        own = tensor.layout == torch.strided and tensor.device.type == self.device.type
        address = _address(tensor) if own and tensor.numel() else 0
        own = own and not tensor.is_conj() and not tensor.is_neg() and (address != 0 or not tensor.numel())
        facts["aliases_input"] = any(
            block.address <= address < block.address + block.bytes.numel() for block in self.blocks.values()
        )
        facts["copied"] = not own
        if own:
            return _detach(tensor), facts
        dense = _detach(tensor).to_dense() if tensor.layout != torch.strided else _detach(tensor)
        return dense.to(self.device).resolve_conj().resolve_neg().contiguous().clone(), facts

    def _export_host(self, tensors: list[torch.Tensor]) -> tuple[list[dict[str, Any]], Any, list[int]]:
        slots, size = lay(tensors)
        fresh = self._room(size, lambda: HostBlock(2 * size))
        for slot, tensor in zip(slots, tensors, strict=True):
            if slot.nbytes:
                ctypes.memmove(self.out.address + slot.offset, _data_ptr(tensor), slot.nbytes)
        told = [{**slot.record(), "handle": None, "number": None, "copied": False} for slot in slots]
        block = {"number": self.out_number, "fresh": fresh}
        return told, block, [self.out.descriptor] if fresh else []

    def _export_device(self, tensors: list[torch.Tensor]) -> tuple[list[dict[str, Any]], Any, list[int]]:
        told: list[dict[str, Any]] = []
        late = [tensor for tensor in tensors if self._handle_of(tensor) is None]
        slots, size = lay(late)
        self._room(size, lambda: DeviceBlock(2 * size, self.device))
        for tensor in tensors:
            found = self._handle_of(tensor)
            copied = found is None
            if found is None:
                slot = slots.pop(0)
                slot.view(self.out.bytes).copy_(tensor)
                handle: bytes = self.out.handle
                number = number_of(self.out.address)
            else:
                handle, offset, number = found
                slot = Slot(lay([tensor])[0][0].dtype, tuple(tensor.shape), tuple(tensor.stride()), offset)
            told.append({**slot.record(), "handle": handle.hex(), "number": number, "copied": copied})
        torch.cuda.synchronize(self.device)
        return told, {"number": 0, "fresh": False}, []

    def _handle_of(self, tensor: torch.Tensor) -> tuple[bytes, int, int | None] | None:
        """The handle of the tensor's allocation, where in it the tensor begins, and the allocation's number; None when
        it cannot be shared."""
        if not tensor.numel():
            return None
        address = _data_ptr(tensor)
        try:
            base, _ = allocation_of(address)
            return handle_of(base), address - base, number_of(base)
        except SharedMemoryError:
            return None

    def _room(self, size: int, make: Callable[[], Any]) -> bool:
        """See that our own block has `size` bytes; True when it is a new one."""
        if self.out is not None and self.out.nbytes >= size:
            return False
        if self.out is not None:
            self.out.close()
        self.out = make()
        self.out_number += 1
        return True


def _address(tensor: Any) -> int:
    try:
        return int(_data_ptr(tensor))
    except RuntimeError:  # a tensor without memory of its own: fake, functional, a wrapper
        return 0


def serve(session: Session, channel: Channel) -> None:
    """Answer requests until the other side is gone."""
    while True:
        request, descriptors = channel.receive(Any, FOREVER_S)
        rights: list[int] = []
        session.held = None
        try:
            if request.get("open") is not None:
                session.open_block(request["open"], descriptors)
            arguments = unpack(request["value"], session.tensors_of(request)) if request.get("value") else None
            found = getattr(session, request["op"])(request, arguments)
            if request["op"] in PLAIN:
                reply = {"error": None, **found}
            elif request["op"] in ("set_attribute", "has", "peak", "floats"):
                reply = {"error": None, "answer": found}
            else:
                reply, rights = session.tell(found)
                reply["error"] = None
            del arguments, found
            session.finish()
        except BaseException as error:  # whatever a candidate raises is its answer
            reply, rights = {"error": error_words(error)}, []
            with contextlib.suppress(RuntimeError):  # a context that is broken has nothing left at work
                session.finish()
        for descriptor in descriptors:
            os.close(descriptor)
        channel.send(reply, FOREVER_S, rights)


def main() -> None:
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    end = socket.socket(fileno=int(sys.argv[1]))
    end.set_inheritable(False)
    channel = Channel(end, REQUEST_LIMIT)
    seed_host_cache(sys.argv[2] if len(sys.argv) > 2 else None)
    channel.send({"ready": True}, FOREVER_S)
    try:
        serve(Session(channel), channel)
    finally:
        os._exit(0)  # no exit handler or thread of the candidate holds this process up


if __name__ == "__main__":
    main()
