"""Bit identity where the operator knows no cases: a candidate against the task's own Model, on official inputs.

Called by judge.py, which owns the run. What the reference cannot answer costs that case.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kbsub.adapters.refusal import reference_asked
from kbsub.adapters.task import SEED
from kbsub.eval.operators.compare.bitwise import judge_pair
from kbsub.eval.operators.identity import SECRET
from kbsub.eval.remote.values import ValueProblem
from kbsub.eval.suite.one_tensor import as_one, exact_problem
from kbsub.eval.verdicts.identity.bench import Bench
from kbsub.eval.verdicts.identity.subject import WrongForm

SEEDS = (0, 1, 2)
SECRET_NAME = "official inputs, secret seed"


class Refused(Exception):
    """The task's own program has no answer here; the message says why."""


def run_generic(bench: Bench) -> Iterator[dict[str, Any]]:
    """Official inputs of three seeds and of the secret one, output only; weights are seeded as upstream does."""
    with reference_asked(Refused):
        arguments = _init_inputs(bench)
        torch.manual_seed(SEED)
        reference = bench.modules.Model(*arguments).to(device=bench.setting.device, dtype=bench.task.dtype)
    try:
        bench.subject.build(arguments)
    except ValueProblem as why:
        raise Refused(f"the constructor's arguments cannot be handed to the candidate's process: {why}") from why
    public: list[Any] = []
    for seed in (*SEEDS, *((bench.secret_seed,) if bench.secret_seed is not None else ())):
        label = {"name": f"official inputs, seed {seed}", "group": "official inputs", "seed": seed, "input": "official"}
        secret = seed == bench.secret_seed
        label = {**label, "name": SECRET_NAME, "group": SECRET} if secret else label
        called = SEEDS[0] if secret else seed  # what the candidate's process is seeded with, as the reference is
        yield label
        try:
            inputs, expected = _official_answer(bench, reference, seed, called)
            if secret and _same(inputs, public):
                raise Refused("the task's own inputs are the same for every seed")
            public = public or inputs
        except Refused as why:
            yield {**label, "skipped": str(why)}
            continue
        try:
            got = bench.subject.run(inputs, called)["output"]
        except ValueProblem as why:
            yield {**label, "skipped": f"the inputs cannot be handed to the candidate's process: {why}"}
            continue
        except WrongForm as why:
            yield {**label, "identical": False, "allclose": False, "reason": str(why)}
            continue
        problem = exact_problem(expected, got)
        unequal = {"identical": False, "allclose": False, "reason": problem} if problem else {}
        yield {**label, **judge_pair(expected, got, bench.tolerance), **unequal}


def _init_inputs(bench: Bench) -> list[Any]:
    torch.manual_seed(SEED)
    return bench.task.cast(bench.modules.get_init_inputs(), bench.setting.device)


def _same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=False))
    return bool(pairs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b or a == b
        for a, b in pairs
    )


def _official_answer(bench: Bench, reference: Any, seed: int, called: int) -> tuple[list[Any], torch.Tensor]:
    """(inputs of a seed, the reference's output, called after `called`); raises Refused where it has none."""
    with reference_asked(Refused):
        torch.manual_seed(seed)
        inputs = bench.task.cast(bench.modules.inputs_on(bench.setting.device), bench.setting.device)
        torch.manual_seed(called)  # again before each side's call, as upstream does
        expected = as_one(reference(*inputs))
    if not isinstance(expected, torch.Tensor):
        raise Refused(f"the reference returns {type(expected).__name__}, not one tensor")
    return inputs, expected
