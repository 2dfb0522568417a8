"""Judges a file's source: what it redefines of the task, its verdict in a namespace of its own, the static checker.

The official verdict is of the file as upstream executes it, in the reference's dict. Where that changes a name of the
task, upstream's same function judges the file a second time here, executed in a dict of its own; the two stand apart.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kbsub.adapters import evaluator, static_checker
from kbsub.adapters.overrides import in_its_own_namespace, overrides
from kbsub.adapters.refusal import short_error
from kbsub.adapters.task import Task, task_from_payload
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.verdicts.source.registration import overridden


def judge(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target for run_isolated: the `source` record.

    Raises JudgeFailure NOT_RUN, with what the texts say, where a second verdict is due and there is no GPU or checkout.
    """
    task = task_from_payload(payload)
    source, checkout = payload["candidate_source"], payload.get("kernelbench")
    found: dict[str, Any] = {"overrides": overrides(task.source, source)}
    if checkout:
        found["static"] = static_checker.check(Path(checkout), source, task.precision)
    if not found["overrides"]:
        return found
    if payload["device"] == "cpu" or not checkout:
        needs = "an NVIDIA GPU" if payload["device"] == "cpu" else "the verified checkout (kbsub fetch)"
        words = f"{overridden(found['overrides'])}; the verdict in a namespace of its own needs {needs}"
        raise JudgeFailure(Status.NOT_RUN, words, found)
    return found | _own_namespace(task, source, Path(checkout), payload["device"], progress, found)


def _own_namespace(
    task: Task, source: str, checkout: Path, device: str, progress: Any, found: dict[str, Any]
) -> dict[str, Any]:
    """{own_namespace, own_speedup} from upstream's evaluator."""
    import torch

    if not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, f"torch {torch.__version__} sees no NVIDIA GPU; see: kbsub doctor", found)
    upstream = evaluator.import_upstream(checkout)
    try:
        returned = evaluator.evaluate(upstream, task, in_its_own_namespace(source), device, progress, build_of=source)
    except Exception as error:
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
        words = f"in its own namespace: escaped upstream's evaluator, no verdict: {short_error(error)}"
        raise JudgeFailure(status, words, found) from error
    said = evaluator.verbatim(upstream, returned)["official"]
    mine, reference = said.get("runtime") or -1.0, said.get("ref_runtime") or -1.0
    timed = bool(said["correctness"]) and mine > 0 and reference > 0
    return {"own_namespace": said, "own_speedup": reference / mine if timed else None}
