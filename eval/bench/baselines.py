"""What PyTorch itself offers for a task: eager, TorchScript, the modes of torch.compile; and upstream's baseline files.

The table is data. Every baseline is the task's own Model, built like upstream builds it. Knows torch (inside functions)
and upstream's `measure_ref_program_time`; nothing of candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class BaselineProgram:
    """One row of the table. `own_graphs`: the mode replays CUDA graphs itself, so only upstream's methods time it."""

    title: str
    backend: str | None = None  # of torch.compile; None is not compiled
    mode: str | None = None
    own_graphs: bool = False
    upstream_file: str | None = None  # the name upstream's generate_baseline_time.py gives its file
    floor: bool = False  # not the task at all: what moving the same input and output takes; never ranked


BASELINES: dict[str, BaselineProgram] = {
    "copy": BaselineProgram("copy of the input", floor=True),
    "eager": BaselineProgram("eager", upstream_file="baseline_time_torch.json"),
    "torchscript": BaselineProgram("TorchScript (traced)"),
    "compile_default": BaselineProgram(
        "torch.compile default",
        "inductor",
        "default",
        upstream_file="baseline_time_torch_compile_inductor_default.json",
    ),
    "compile_max_autotune_no_cudagraphs": BaselineProgram(
        "torch.compile max-autotune-no-cudagraphs",
        "inductor",
        "max-autotune-no-cudagraphs",
        upstream_file="baseline_time_torch_compile_inductor_max-autotune-no-cudagraphs.json",
    ),
    "compile_reduce_overhead": BaselineProgram(
        "torch.compile reduce-overhead",
        "inductor",
        "reduce-overhead",
        own_graphs=True,
        upstream_file="baseline_time_torch_compile_inductor_reduce-overhead.json",
    ),
    "compile_max_autotune": BaselineProgram(
        "torch.compile max-autotune",
        "inductor",
        "max-autotune",
        own_graphs=True,
        upstream_file="baseline_time_torch_compile_inductor_max-autotune.json",
    ),
    "compile_cudagraphs": BaselineProgram(
        "torch.compile cudagraphs backend",
        "cudagraphs",
        None,
        own_graphs=True,
        upstream_file="baseline_time_torch_compile_cudagraphs.json",
    ),
}
# What `kbsub bench` runs unless told otherwise; the cudagraphs backend is upstream's extra file.
DEFAULT_BASELINES = tuple(name for name in BASELINES if name != "compile_cudagraphs")


def require_known(names: list[str]) -> list[str]:
    """The names, or ValueError for one that is not in the table."""
    for name in names:
        if name not in BASELINES:
            raise ValueError(f"--baselines {name}: known are {', '.join(BASELINES)}")
    return names


def build(name: str, model: Any, arguments: list[Any]) -> Callable[..., Any]:
    """The program of one baseline from a Model instance that is on its device; compiled on its first call.

    Raises whatever torch raises when this machine cannot compile (no C compiler, no Triton).
    """
    import torch

    baseline = BASELINES[name]
    if baseline.floor:
        return copy_first_input
    if name == "torchscript":
        with torch.no_grad():
            trace: Any = torch.jit.trace
            traced: Callable[..., Any] = trace(model, tuple(arguments), check_trace=False)
        return traced
    if baseline.backend is None:
        program: Callable[..., Any] = model
        return program
    compiled: Callable[..., Any] = torch.compile(model, backend=baseline.backend, mode=baseline.mode)
    return compiled


def copy_first_input(*arguments: Any) -> Any:
    """A fresh copy of the first tensor: the same bytes in and out as a task that keeps its shape, and no arithmetic."""
    import torch

    return next(value for value in arguments if isinstance(value, torch.Tensor)).clone()


def compiled_frames() -> int:
    """How many frames torch.compile has compiled so far; a baseline that adds none fell back to eager."""
    import torch._dynamo.utils as dynamo

    return int(dynamo.counters["frames"].get("ok", 0))


def measure(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Child target: upstream's own measure_ref_program_time for one task and one baseline, unmodified.

    payload: the task keys of kbsub.adapters.task.task_from_payload, "baseline", "trials", "device". Returns
    {"name": the problem's file name, "level": its level, "stats": what upstream returned}.
    """
    from kbsub.adapters.evaluator import import_upstream
    from kbsub.adapters.task import task_from_payload
    from kbsub.eval.process.isolated import JudgeFailure, Status

    task = task_from_payload(payload)
    baseline = BASELINES[payload["baseline"]]
    progress({"stage": "measure", "case": f"{task.name} {baseline.title}"})
    upstream = import_upstream(Path(payload["kernelbench"]))
    import torch

    stats = upstream.module.timing.measure_ref_program_time(
        ref_arch_name=task.name,
        ref_arch_src=task.source,
        num_trials=payload["trials"],
        use_torch_compile=baseline.backend is not None,
        torch_compile_backend=baseline.backend,
        torch_compile_options=baseline.mode,
        device=torch.device(payload["device"]),
        verbose=False,
        precision=task.precision,
    )
    if stats is None:  # upstream prints the exception and returns nothing
        raise JudgeFailure(
            Status.RUNTIME_ERROR, f"upstream could not time {task.name} as {baseline.title}: see its log"
        )
    return {"name": task.name, "level": task.level, "stats": stats}
