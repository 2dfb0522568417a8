"""What a starter says of its task: shapes and dtypes, and which attributes of the model are numbers.

The reference runs on torch's meta device, which computes shapes and no values: a task of any size takes no memory. In
a child process, since it is somebody's program and needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kbsub.adapters.task import task_from_payload

TARGET = "kbsub.eval.starter.facts:judge"


def nothing_known(problem: str | None) -> dict[str, Any]:
    """What `judge` returns before it has found anything out, and what counts where it did not end."""
    return {"inputs": [], "init_inputs": [], "output": None, "numbers": [], "problem": problem}


def judge(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """{inputs, init_inputs, output: in words; numbers: attribute names; problem: why some are unknown, or None}."""
    import torch

    found = nothing_known(None)
    try:
        modules = task_from_payload(payload).modules()
        with torch.device("meta"), torch.no_grad():
            inputs = modules.get_inputs()
            found["inputs"] = [in_words(each) for each in inputs]
            init_inputs = modules.get_init_inputs()
            found["init_inputs"] = [in_words(each) for each in init_inputs]
            model = modules.Model(*init_inputs)
            found["numbers"] = [name for name, value in vars(model).items() if type(value) in (int, float)]
            found["output"] = in_words(model(*inputs))
    except Exception as error:  # a program that needs values: the starter says less, and is as right
        found["problem"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return found


def in_words(value: Any) -> str:
    """A tensor as "float32 (16, 16384)", a list or tuple of tensors one by one, anything else as Python writes it."""
    import torch

    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, list | tuple) and any(isinstance(each, torch.Tensor) for each in value):
        return ", ".join(in_words(each) for each in value)
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + " ..."


def write(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target for run_isolated: the starter as `kbsub new` writes it; {step: what its kernel computes, or None}."""
    from kbsub.eval.starter.reference import rewrite
    from kbsub.eval.starter.text import starter

    task = task_from_payload(payload)
    known = judge(payload, progress)
    reference = rewrite(task.source, known["numbers"])
    file = Path(payload["file"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(starter(task, reference, payload["style"], known, f"kbsub eval {file.name}"), "utf-8")
    return {"step": reference.step.text if reference.step else None}
