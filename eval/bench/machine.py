"""The device under the clock: CUDA with graphs and events, or the CPU for a rehearsal of the same rounds.

Knows torch and one device; must not know what is timed nor why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class GraphProgram:
    """A program captured as a CUDA graph on fixed inputs; `replay` enqueues it, `output` is the tensor it writes."""

    def __init__(self, graph: Any, result: Any) -> None:
        self.graph, self.result = graph, result

    def replay(self) -> None:
        self.graph.replay()

    def output(self) -> Any:
        return self.result


class PlainProgram:
    """A program that is simply called again; its output is what the last call returned."""

    def __init__(self, program: Callable[..., Any], arguments: list[Any], result: Any) -> None:
        self.program, self.arguments, self.result = program, arguments, result

    def replay(self) -> None:
        self.result = self.program(*self.arguments)

    def output(self) -> Any:
        return self.result


class CudaMachine:
    """One CUDA device. The timing functions are taken here, before any candidate is loaded and could replace them."""

    graphs = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        cuda: Any = torch.cuda  # partly untyped, differently so in each version of torch
        self._synchronize, self._event, self._stream = cuda.synchronize, cuda.Event, cuda.Stream
        self._graph, self._capture = cuda.CUDAGraph, cuda.graph
        torch.cuda.set_device(device)

    @property
    def uuid(self) -> str | None:
        return str(getattr(torch.cuda.get_device_properties(self.device), "uuid", "")) or None

    def synchronize(self) -> None:
        self._synchronize(self.device)

    def capture(self, program: Callable[..., Any], arguments: list[Any], warmups: int) -> GraphProgram:
        """Warm up on a side stream, as torch asks for, then capture one call."""
        side = self._stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(warmups):
                program(*arguments)
        torch.cuda.current_stream(self.device).wait_stream(side)
        self.synchronize()
        graph = self._graph()
        with self._capture(graph):
            result = program(*arguments)
        self.synchronize()
        return GraphProgram(graph, result)

    def elapsed_ms(self, replay: Callable[[], None], count: int) -> float:
        """Time between two events around `count` replays, in ms; waits for the last event."""
        start, end = self._event(enable_timing=True), self._event(enable_timing=True)
        start.record()
        for _ in range(count):
            replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def poison(self, output: Any) -> None:
        """NaN over the old output, so that a program which does not write is seen."""
        _poison(output)

    def release(self) -> None:
        torch.cuda.empty_cache()


class CpuMachine:
    """The host: no graphs and no events. Its times only show that the run works; they are labelled cpu_rehearsal."""

    graphs = False
    uuid: str | None = None

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def synchronize(self) -> None:
        return None

    def capture(self, program: Callable[..., Any], arguments: list[Any], warmups: int) -> PlainProgram:
        result = None
        for _ in range(max(warmups, 1)):
            result = program(*arguments)
        return PlainProgram(program, arguments, result)

    def elapsed_ms(self, replay: Callable[[], None], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            replay()
        return (time.perf_counter() - start) * 1e3

    def poison(self, output: Any) -> None:
        _poison(output)

    def release(self) -> None:
        return None


def _poison(output: Any) -> None:
    if isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel():
        with torch.no_grad():
            output.fill_(float("nan"))


def machine_for(device: str) -> CudaMachine | CpuMachine:
    """The machine of "cpu", "cuda" or "cuda:1". Raises RuntimeError when torch sees no such GPU."""
    if device == "cpu":
        return CpuMachine()
    if not torch.cuda.is_available():
        raise RuntimeError(f"--device {device}: torch sees no NVIDIA GPU; rehearse the run with: --device cpu")
    chosen = torch.device(device)
    return CudaMachine(torch.device("cuda", chosen.index if chosen.index is not None else torch.cuda.current_device()))
