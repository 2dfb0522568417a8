"""A worker's programs to be replayed: a CUDA graph of one or several methods, or, on a CPU, the calls themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_UPS = 3


def in_turn(methods: list[Callable[..., Any]]) -> Callable[..., Any]:
    """The only method, or one that calls them all and returns one list of what they return."""
    if len(methods) == 1:
        return methods[0]

    def run(*inputs: Any) -> list[Any]:
        found: list[Any] = []
        for method in methods:
            value = method(*inputs)
            found += value if isinstance(value, (tuple, list)) else [value]
        return found

    return run


def called(run: Callable[..., Any], inputs: Any) -> Callable[[], Any]:
    for _ in range(WARM_UPS):
        run(*inputs)
    return lambda: run(*inputs)


def captured(run: Callable[..., Any], inputs: Any) -> Callable[[], Any]:
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            run(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run(*inputs)

    def replay() -> Any:
        for each in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(each, torch.Tensor) and each.is_floating_point():
                each.fill_(float("nan"))  # what the replay does not write shows
        graph.replay()
        torch.cuda.synchronize()
        return outputs

    return replay
