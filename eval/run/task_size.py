"""Whether a task fits this machine at all, found out without drawing its inputs, and said before anything is run.

One small child a run executes the reference program on torch's "meta" device, where a tensor has a shape and no memory.
What comes out is a lower bound: inputs, parameters and one output, each once in the task's precision. Nothing that
would have fit is refused; where the bound cannot be had, everything goes on as if nobody had asked. Knows no candidate.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from kbsub.adapters.task import Task, task_from_payload
from kbsub.eval.process.isolated import MEMORY_LIMIT_VARIABLE, Status, run_isolated
from kbsub.eval.run.machine_facts import memory_limit_bytes

TARGET = "kbsub.eval.run.task_size:estimate"
TIMEOUT_S = 60.0
SURELY_FITS = 1 << 30  # bytes; a task whose numbers cannot make more is not worth the two seconds of a child
HOLDS_A_RUN = (
    "official",
    "identity",
    "referee",
)  # stages that hold inputs, parameters and output of the task's own shape


def too_large(task: Task, task_text: str, kernelbench: str | None, device: str) -> dict[str, str]:
    """Stage name -> why it cannot be run here, with the way out; {} where everything fits or nobody can tell.

    Stages that shrink a task (a LayerNorm on a CPU) are not in it. Imports no torch; asks a child once a process.
    """
    if most_bytes(task.source) <= SURELY_FITS:
        return {}
    limit = memory_limit_bytes() if device == "cpu" else None
    found = _asked(task_text, task.precision, kernelbench, device, task.sha256)
    there = limit if device == "cpu" else (found or {}).get("gpu_free")
    return {} if found is None or there is None else refusals(task, found, there, device)


def refusals(task: Task, found: Mapping[str, Any], there: int, device: str) -> dict[str, str]:
    """`too_large` from an estimate (see `estimate`) and the bytes that are there."""
    parts = [f"{_gb(found[key])} of {key}" for key in ("inputs", "parameters", "outputs") if found[key]]
    needed = sum(found[key] for key in ("inputs", "parameters", "outputs"))
    more = "a machine with more memory, or one with a large NVIDIA GPU" if device == "cpu" else "a GPU with more memory"
    where = "this machine can give" if device == "cpu" else "this GPU has free"
    ending = f"{where} {_gb(there)}. Nothing was drawn. Run it on {more}"
    refused = {}
    if needed > there:
        refused = dict.fromkeys(
            ("official",) if found["shrinks"] else HOLDS_A_RUN,
            f"{task.slug} is too large for here: {' and '.join(parts)} in {task.precision}, at least; {ending}",
        )
    if device == "cpu" and found["drawn"] > there and not found["shrinks"]:  # other stages draw, and may then skip
        words = f"{task.slug} is too large for here: its inputs alone are drawn as {_gb(found['drawn'])}; {ending}"
        refused = {**dict.fromkeys(("stress", "oracle", "guards"), words), **refused}
    return refused


@functools.lru_cache(maxsize=64)
def _asked(text: str, precision: str, kernelbench: str | None, device: str, sha256: str) -> dict[str, Any] | None:
    """The estimate from a child; None where it has none. `sha256` is in the key only: a file may be edited."""
    limit = memory_limit_bytes()
    payload = {"task": text, "precision": precision, "kernelbench": kernelbench, "device": device}
    variables = {MEMORY_LIMIT_VARIABLE: str(limit)} if limit and device == "cpu" else {}
    outcome = run_isolated(TARGET, payload, timeout_s=TIMEOUT_S, env=variables)
    return outcome.value if outcome.status is Status.OK else None


def estimate(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
    """Target of the child: bytes of {inputs, parameters, outputs} in the task's precision, {drawn} as get_inputs makes
    them, {shrinks}: a bare LayerNorm, which most stages run smaller on a CPU, {gpu_free}: bytes, None on a CPU.

    None where the reference program does more than make tensors (reads values, calls numpy).
    """
    import torch

    task = task_from_payload(payload)
    try:
        with torch.device("meta"), torch.no_grad():
            modules = task.modules()
            inputs = list(modules.get_inputs())
            model = modules.Model(*modules.get_init_inputs())
    except Exception:  # whatever a reference program raises: there is no estimate, and the run goes on without
        return None
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    if any(tensor.device.type != "meta" for tensor in tensors):
        return None
    seen: set[int] = set()
    width = task.dtype.itemsize
    held = {"inputs": _elements(tensors, seen), "parameters": _elements([*model.parameters(), *model.buffers()], seen)}
    held["outputs"] = _elements(_outputs(model, inputs), seen)
    leaves = [module for module in model.modules() if not list(module.children())]
    return {
        **{key: count * width for key, count in held.items()},
        "drawn": sum(tensor.untyped_storage().nbytes() for tensor in tensors),
        "shrinks": len(leaves) == 1 and isinstance(leaves[0], torch.nn.LayerNorm),
        "gpu_free": None if payload["device"] == "cpu" else torch.cuda.mem_get_info(torch.device(payload["device"]))[0],
    }


def _outputs(model: Any, inputs: list[Any]) -> list[Any]:
    """What one call gives; [] where it cannot be called without values."""
    import torch

    try:
        with torch.device("meta"), torch.no_grad():
            output = model(*inputs)
    except Exception:
        return []
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _elements(values: list[Any], seen: set[int]) -> int:
    """Elements that memory must hold: of views and expanded tensors only what lies behind them, each storage once."""
    import torch

    count = 0
    for value in values:
        if isinstance(value, torch.Tensor) and value.device.type == "meta":
            storage = value.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                count += min(value.numel(), storage.nbytes() // value.element_size())
    return count


def most_bytes(source: str) -> float:
    """More bytes than the numbers written in a program are likely to make: every one of them multiplied, as float64.

    Infinity where the text computes with powers or shifts or cannot be parsed. Only decides whether a child is asked.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return math.inf
    if any(isinstance(node, (ast.Pow, ast.LShift)) for node in nodes):
        return math.inf
    product = 8.0
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            product *= max(float(abs(node.value)), 1.0) if abs(node.value) < 1e30 else math.inf
    return product


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
