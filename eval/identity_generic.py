"""Bit identity for a task that is no LayerNorm: a candidate against the task's own Model, on official inputs.

Called by identity.py, which owns the run. What the reference cannot answer costs that case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from kbsub.adapters.task import SEED
from kbsub.eval.bitwise import judge_pair
from kbsub.eval.identity_cases import GROUPS
from kbsub.eval.refusal import reference_asked

if TYPE_CHECKING:
    from kbsub.eval.identity import Bench


class Refused(Exception):
    """The task's own program has no answer here; the message says why."""


def run_generic(bench: Bench) -> Iterator[dict[str, Any]]:
    """Any other task: its own Model, official inputs of three seeds, output only; weights seeded as upstream does."""
    with reference_asked(Refused):
        reference = _seeded(bench, bench.modules.Model, _init_inputs(bench))
        arguments = _init_inputs(bench)
    candidate = _seeded(bench, bench.candidate, arguments)
    for seed in GROUPS[0].seeds:
        label = {"name": f"official inputs, seed {seed}", "group": "official inputs", "seed": seed, "input": "official"}
        yield label
        try:
            inputs, expected = _official_answer(bench, reference, seed)
        except Refused as why:
            yield {**label, "skipped": str(why)}
            continue
        yield {**label, **judge_pair(expected, candidate(*inputs), bench.tolerance)}


def _init_inputs(bench: Bench) -> list[Any]:
    torch.manual_seed(SEED)
    return bench.task.cast(bench.modules.get_init_inputs(), bench.device)


def _seeded(bench: Bench, build: Callable[..., Any], arguments: list[Any]) -> Any:
    """A model built right after its constructor arguments were drawn, so that both sides draw the same weights."""
    return build(*arguments).to(device=bench.device, dtype=bench.task.dtype)


def _official_answer(bench: Bench, reference: Any, seed: int) -> tuple[list[Any], torch.Tensor]:
    """(inputs of a seed, the reference's output); raises Refused where it has none."""
    with reference_asked(Refused):
        torch.manual_seed(seed)
        inputs = bench.task.cast(bench.modules.get_inputs(), bench.device)
        expected = reference(*inputs)
    if not isinstance(expected, torch.Tensor):
        raise Refused(f"the reference returns {type(expected).__name__}, not one tensor")
    return inputs, expected
