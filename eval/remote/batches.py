"""The worker's side of a batch: many calls of one instance on many slots, one word when all of them are done.

The slots are the other side's memory. Calls look as upstream's timed ones do: the same instance, gradients as told, no
word between them. Where the answers lie is told together with "done", so that whoever asked can look at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BATCH_REPLIES = ("slots", "batch", "forget", "replayed")  # answered with words alone

# Taken before a candidate can put something else in their place.
_Tensor, _data_ptr, _detach = torch.Tensor, torch.Tensor.data_ptr, torch.Tensor.detach
_plain, _set_grad_enabled = torch._C.DisableTorchFunction, torch.set_grad_enabled


class Batches:
    """What a session does with slots; see kbsub.eval.remote.ring.CallRing for the other side."""

    instances: dict[int, Any]
    finish: Callable[[], None]
    tell: Callable[[Any], tuple[dict[str, Any], list[int]]]

    def __init__(self) -> None:
        self.ring: list[list[Any]] = []
        self.outputs: list[Any] | None = None
        self.graph: Any = None
        self.graph_output: Any = None

    def slots(self, request: dict[str, Any], slots: Any) -> dict[str, Any]:
        """Keep the arguments of every slot: views of the other side's memory."""
        self.ring = slots
        return {}

    def batch(self, request: dict[str, Any], _: Any) -> dict[str, Any]:
        """Call the instance on the slots in the order told; {"at": addresses of the tensors returned} when all is done.

        The graph of an answer is let go at once, as upstream's loop lets it go with the next call.
        """
        model, ring = self.instances[request["instance"]], self.ring
        outputs = []
        with _set_grad_enabled(request["grad"]):
            for index in request["order"]:
                outputs.append(_without_graph(model(*ring[index])))
        at = _addresses(outputs)  # while the device is at work: after it, every call would add to the time
        self.finish()
        self.outputs = outputs
        return {"at": at}

    def replayed(self, request: dict[str, Any], _: Any) -> dict[str, Any]:
        """{"ms"}: of one replay of the instance's graph on slot 0, between two events; captured when first asked."""
        if self.graph is None:
            model, inputs = self.instances[request["instance"]], self.ring[0]
            side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.no_grad(), torch.cuda.stream(side):
                model(*inputs)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.no_grad(), torch.cuda.graph(graph):
                self.graph_output = model(*inputs)
            graph.replay()
            self.graph = graph
        event: Any = torch.cuda.Event
        start, end = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(request["replays"]):
            self.graph.replay()
        end.record()
        end.synchronize()
        return {"ms": start.elapsed_time(end) / request["replays"]}

    def answers(self, request: dict[str, Any], _: Any) -> Any:
        """What the last batch gave, one value a call; told as any answer is."""
        return self.outputs

    def forget(self, request: dict[str, Any], _: Any) -> dict[str, Any]:
        """Let the answers of the last batch go."""
        self.outputs = None
        return {}


def _without_graph(value: Any) -> Any:
    """The same memory without what autograd keeps for it; a list or tuple by its parts, anything else as it is."""
    if isinstance(value, _Tensor):
        with _plain():
            return _detach(value)
    if type(value) in (tuple, list):
        return type(value)(_without_graph(each) for each in value)
    return value


def _addresses(outputs: list[Any]) -> list[int]:
    """Where each tensor lies, in order, those in lists and tuples too; 0 for one without memory."""
    found: list[int] = []
    for value in outputs:
        if isinstance(value, _Tensor):
            try:
                found.append(_data_ptr(value))
            except RuntimeError:
                found.append(0)
        elif type(value) in (tuple, list):
            found += _addresses(list(value))
    return found
