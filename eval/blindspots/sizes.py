"""How much of a GPU a task needs, found out without drawing anything: its forward on torch's "meta" device.

Decides only what runs beside what, and in which order. A wrong guess costs a second run of that task, alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

CONTEXT_BYTES = 1 << 30  # what a process takes of a GPU before it does anything
COMPARING_BYTES = 1 << 30  # two chunks in float64, and a convolution's workspace
UNKNOWN_BYTES = 24 << 30


def estimate(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Target of a child: {"sizes": {task: {"input_bytes", "gpu_bytes"}}} of payload["tasks"], as judge takes them."""
    import torch

    from kbsub.adapters.task import resolve_task

    found = {}
    for item in payload["tasks"]:
        task = resolve_task(item["task"], kernelbench=Path(payload["kernelbench"]), precision=payload["precision"])
        try:
            with torch.device("meta"), torch.no_grad():
                modules = task.modules()
                modules.context.update(item["names"])
                inputs = [each for each in modules.get_inputs() if isinstance(each, torch.Tensor)]
            drawn = sum(each.numel() for each in inputs) * 4
        except Exception:  # whatever a reference program raises: it has no estimate
            found[item["task"]] = {"input_bytes": 0, "gpu_bytes": UNKNOWN_BYTES}
            continue
        found[item["task"]] = {"input_bytes": drawn, "gpu_bytes": _gpu_bytes(modules, drawn)}
    return {"sizes": found}


def _gpu_bytes(modules: Any, drawn: int) -> int:
    """At most: inputs, output, two models, and what one more run holds, in fp32 on another draw or in float64.

    Of a run's results as many of the largest size count as forward makes, three at most.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    results: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                results.append(math.prod(result.shape) * 4)
            return result

    try:
        with torch.device("meta"), torch.no_grad():
            model = modules.Model(*modules.get_init_inputs())
            given = modules.get_inputs()
            with Watch():
                output = model(*given)
        largest = max(results, default=0)
        out = output.numel() * 4 if isinstance(output, torch.Tensor) else largest
        parameters = sum(each.numel() for each in model.parameters()) * 4
    except Exception:
        return 3 * drawn + UNKNOWN_BYTES
    at_once = min(3, sum(2 * each > largest for each in results)) * largest
    held = drawn + out + 2 * parameters
    plain = 2 * drawn + out + at_once
    truth = 2 * drawn + 3 * parameters + 2 * at_once + out
    return int(held + max(plain, truth) + COMPARING_BYTES + CONTEXT_BYTES)
