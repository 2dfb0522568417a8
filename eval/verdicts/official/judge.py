"""The official stage: upstream's verdict verbatim, and beside it the floor of the hardware.

`compiled` and `correctness` are copied from the object that upstream's function returns, and come from nowhere else;
the 10x flag is upstream's word, inside its metadata. Without a GPU the stage says NOT_RUN, or runs a library-only
candidate on the CPU as a *local check* under another key. Must not know stress, identity, oracle or guards.
"""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

from kbsub.adapters import environment, evaluator
from kbsub.adapters.candidate import cuda_source_of, source_problem
from kbsub.adapters.task import Task, task_from_payload
from kbsub.eval.bench.floors import copy_bandwidth, memory_floor_ms
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory

# What upstream's None means: the file raised while it was executed, and the text looked like a lock to it.
_NONE_MESSAGE = (
    "upstream's evaluator returned None instead of a verdict: the file raised while it was executed, with a text that "
    'holds "lock" or "No such file or directory" (its scripts crash on that)'
)


def judge(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target for run_isolated. On a GPU: {official, verdict, timing, reference, floors, environment}.

    `verdict` is {status, reason} of the row, read off upstream's object by `status_of`. On a CPU: {cpu_check, verdict,
    environment}. Raises JudgeFailure NOT_RUN where nothing can be judged.
    """
    progress({"stage": "import"})  # seconds of it on a cold disk: a bar that stands still says why
    task = task_from_payload(payload)
    if payload["device"] == "cpu":
        return _judge_on_cpu(payload, task, progress)
    device = payload["device"] if ":" in payload["device"] else f"{payload['device']}:0"
    if not payload.get("kernelbench"):
        raise JudgeFailure(Status.NOT_RUN, "upstream's evaluator needs the verified checkout; get it with: kbsub fetch")
    import torch

    if not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, f"torch {torch.__version__} sees no NVIDIA GPU; see: kbsub doctor")
    upstream = evaluator.import_upstream(Path(payload["kernelbench"]))
    found: dict[str, Any] = {"official": None}
    try:
        returned = evaluator.evaluate(upstream, task, payload["candidate_source"], device, progress)
    except Exception as error:
        raise _escaped(error, {**found, **_facts(device, upstream)}) from error
    found |= evaluator.verbatim(upstream, returned)
    status, reason = status_of(found["official"])
    if found["official"]["metadata"].get("compilation_error_name") == "SyntaxError":
        # upstream's one word for two things: no ModelNew reads the same
        reason = source_problem(payload["candidate_source"]) or reason
    found["verdict"] = {"status": status.value, "reason": reason}
    progress({"stage": "floor"})
    found["floors"] = memory_floor(task, device)
    progress({"stage": "environment"})
    return found | _facts(device, upstream)


def status_of(official: dict[str, Any]) -> tuple[Status, str | None]:
    """One word, and a reason when it is not OK, for what upstream said; it adds no judgement of its own."""
    metadata = official["metadata"]
    if official["compiled"] is None:
        return Status.COMPILE_ERROR, _NONE_MESSAGE
    if not official["compiled"]:
        return Status.COMPILE_ERROR, _words(metadata, "compilation_error")
    if official["correctness"]:
        if "error_during_performance" in metadata:
            return Status.RUNTIME_ERROR, f"correct, then failed while timed: {metadata['error_during_performance']}"
        return Status.OK, None
    if "runtime_error" in metadata:
        out_of_memory = "OutOfMemory" in str(metadata.get("runtime_error_name"))
        return Status.OUT_OF_MEMORY if out_of_memory else Status.RUNTIME_ERROR, _words(metadata, "runtime_error")
    issue = str(metadata.get("correctness_issue", ""))
    if "shape mismatch" in issue:
        return Status.INCORRECT_SHAPE, issue
    largest = max((float(text) for text in metadata.get("max_difference", [])), default=math.nan)
    return Status.INCORRECT_NUMERICAL, f"{issue}: trials {official['trials']}, largest difference {largest:g}"


def memory_floor(task: Task, device: str) -> dict[str, Any]:
    """{memory_ms, copy_gb_s, bytes}: bytes of inputs, parameters and outputs over a copy measured now; {} without.

    Runs after upstream's evaluation, so that it cannot disturb it; a device left with a sticky error gives {}.
    """
    import torch

    try:
        bandwidth = copy_bandwidth(torch.device(device))
        moved = bytes_moved(task, device)
    except Exception as error:
        return {"memory_absent": f"{type(error).__name__}: {error}"[:300]}
    return {"memory_ms": memory_floor_ms(moved, bandwidth), "copy_gb_s": bandwidth, "bytes": moved}


def bytes_moved(task: Task, device: str) -> int:
    """Bytes that any implementation must move once: floating inputs, parameters, buffers, and the outputs.

    Shapes come from one call of the reference on `device`: "meta" allocates nothing, but its operators are Python and
    cost 800 imports, the better part of a second and several on a slow disk; a GPU answers in milliseconds. Raises
    whatever a reference program that cannot run there raises.
    """
    import torch

    modules = task.modules()
    with torch.device(device), torch.no_grad():
        inputs = task.cast(modules.get_inputs(), device)
        model = modules.Model(*task.cast(modules.get_init_inputs(), device)).to(device=device, dtype=task.dtype)
        outputs = model(*inputs)
    leaves = [
        *inputs,
        *model.parameters(),
        *model.buffers(),
        *(outputs if isinstance(outputs, (tuple, list)) else [outputs]),
    ]
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _judge_on_cpu(payload: dict[str, Any], task: Task, progress: Any) -> dict[str, Any]:
    needs = cuda_source_of(payload["candidate_source"])
    hosted = needs == "CUDA_SOURCE" and bool(payload.get("host_executor"))
    if needs and not hosted:
        way_out = "; --device cpu runs its kernels on the host" if needs == "CUDA_SOURCE" else ""
        raise JudgeFailure(Status.NOT_RUN, f"needs an NVIDIA GPU ({needs}){way_out}")
    from kbsub.eval.verdicts.official import cpu_check

    check = cpu_check.run(payload["candidate_source"], task, progress, hosted=hosted)
    return {**check, "environment": environment.facts("cpu")}


def _facts(device: str, upstream: evaluator.Upstream) -> dict[str, Any]:
    """{environment: facts}; {} after an error that left the device unusable, so that it hides no verdict."""
    try:
        return {"environment": environment.facts(device, upstream.stand_ins)}
    except Exception:
        traceback.print_exc()
        return {}


def _escaped(error: Exception, found: dict[str, Any]) -> JudgeFailure:
    """An exception that upstream let through, as a row of its own with what is known until then."""
    status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
    text = f"{type(error).__name__}: {error}".split("\nCUDA kernel errors might")[0]
    return JudgeFailure(status, f"escaped upstream's evaluator, no verdict: {text[:1000]}", found)


def _words(metadata: dict[str, Any], key: str) -> str:
    name = metadata.get(f"{key}_name")
    text = str(metadata.get(key, "no reason given"))
    return f"{name}: {text}" if name else text
