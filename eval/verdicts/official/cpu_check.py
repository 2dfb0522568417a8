"""A local check without a GPU: the official predicate and seeds, in upstream's order, on the CPU.

Never an official verdict, and never stored as one: PyTorch's CPU kernels add in another order than its CUDA kernels,
and nothing is timed. For candidates made of library calls, or, through the host executor, of a CUDA source. Memory: x,
both outputs and the candidate's own temporaries; the official shape of level1_40 takes 0.8 GB and what those need.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kbsub.adapters.candidate import asks_for_a_gpu, load_candidate
from kbsub.adapters.task import OFFICIAL_SIZE, SEED, Modules, Task, trial_seeds
from kbsub.eval.operators.compare.predicate import CHUNK_ELEMENTS, OFFICIAL_TOLERANCE
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory

if TYPE_CHECKING:
    import torch


def run(candidate_source: str, task: Task, progress: Any, *, hosted: bool = False) -> dict[str, Any]:
    """{cpu_check: {certified, correctness, trials, seeds, max_abs, provenance ...}, verdict: {status, reason}}.

    At the size of `task`. `hosted` runs the candidate's CUDA source with the host executor. Raises JudgeFailure:
    COMPILE_ERROR from loading, RUNTIME_ERROR or OUT_OF_MEMORY from the candidate's own code, NOT_RUN when it asks for
    a GPU.
    """
    import torch

    progress({"stage": "reference"})
    modules = task.modules()
    torch.manual_seed(SEED)
    init_inputs = task.cast(modules.get_init_inputs())
    with torch.no_grad():
        torch.manual_seed(SEED)
        reference = modules.Model(*init_inputs).to(dtype=task.dtype)
        progress({"stage": "loading"})
        model_class = load_candidate(candidate_source, task, build_dir=True, modules=modules)
        if hosted:
            from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, adopt

            adopt(modules.context, SMALL_LIMITS, HostExecutor())
            model_class = modules.context["ModelNew"]
        torch.manual_seed(SEED)
        candidate = _own_code("the constructor", lambda: model_class(*init_inputs).to(dtype=task.dtype))
        seeds = trial_seeds()
        largest, issues = [], []
        for index, seed in enumerate(seeds, start=1):
            progress({"stage": "trial", "index": index, "of": len(seeds), "seed": seed})
            difference, issue = _trial(reference, candidate, modules, task, seed, f"trial {index} (seed {seed})")
            largest.append(difference)
            if issue:
                issues.append(issue)
            if issue and "shape" in issue:
                break  # as upstream does
    wrong_shape = any("shape" in issue for issue in issues)
    passed = 0 if wrong_shape else len(seeds) - len(issues)
    check = {
        "certified": False,
        "correctness": passed == len(seeds),
        "trials": f"({passed} / {len(seeds)})",
        "seeds": seeds,
        "max_abs": float(torch.tensor(largest).max()),  # unlike Python's max, a NaN stays
        "provenance": task.provenance,
        "device": "cpu",
        "executor": "host executor" if hosted else "torch",
        "size": task.size,
    }
    status = Status.INCORRECT_SHAPE if wrong_shape else Status.INCORRECT_NUMERICAL if issues else Status.OK
    how = "by the host executor" if hosted else "on the CPU"
    size = f", {task.size} size" if task.size != OFFICIAL_SIZE else ""
    reason = issues[0] if issues else f"a local check {how}{size}, not an official verdict"
    return {"cpu_check": check, "verdict": {"status": status.value, "reason": reason}}


def _trial(
    reference: torch.nn.Module, candidate: torch.nn.Module, modules: Modules, task: Task, seed: int, where: str
) -> tuple[float, str | None]:
    """One trial in upstream's order: (largest difference, what is wrong or None). Its tensors die with it."""
    import torch

    torch.manual_seed(seed)
    inputs = task.cast(modules.get_inputs())
    torch.manual_seed(seed)
    expected = reference(*inputs)
    found = _own_code(where, lambda: candidate(*inputs))
    if getattr(found, "shape", None) != expected.shape:
        kind = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        return 0.0, f"Output shape mismatch: expected {tuple(expected.shape)}, got {kind}"
    passes, largest = _own_code(where, lambda: _allclose(expected, found, OFFICIAL_TOLERANCE[task.dtype]))
    return largest, None if passes else f"Output mismatch, largest difference {largest:g} in {where}"


def _allclose(expected: torch.Tensor, found: torch.Tensor, tolerance: float) -> tuple[bool, float]:
    """torch.allclose(expected, found) and the largest difference, by parts: the whole is close when every part is.

    Raises what torch.allclose raises for another dtype, which upstream counts against the candidate, too.
    """
    import torch

    passes, largest = True, []
    parts = (torch.split(tensor.reshape(-1), CHUNK_ELEMENTS) for tensor in (expected, found))
    for e, f in zip(*parts, strict=True):
        passes = torch.allclose(e, f, atol=tolerance, rtol=tolerance) and passes
        largest.append((e - f).abs().max() if e.numel() else torch.zeros(()))
    return passes, float(torch.stack([part.float() for part in largest]).max())


def _own_code(where: str, call: Callable[[], Any]) -> Any:
    """Run the candidate's code; its exceptions become a row that says where."""
    try:
        return call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if asks_for_a_gpu(text):
            raise JudgeFailure(Status.NOT_RUN, f"needs an NVIDIA GPU ({text[:200]})") from error
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
        raise JudgeFailure(status, f"{text[:1000]} in {where}") from error
