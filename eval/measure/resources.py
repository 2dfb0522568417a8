"""Compiles CUDA candidates for every architecture and holds each kernel to its budget of registers, memory and spills.

    kbsub measure resources submissions/*/*.py
    kbsub measure resources --write CANDIDATE.py ...

A budget lies beside its candidate, in the task folder's resources.toml. Needs NVRTC and no GPU. What is compiled and
what counts as a finding is host_executor/compile_gate.py's; the shapes that say which builds there are come from the
task folder and from the task's own program.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.adapters.checkout import checkout_or_none
from kbsub.adapters.task import TaskError, task_from_payload
from kbsub.eval.host_executor.compile_gate import (
    BUDGET_FILE,
    DEVICES,
    Resources,
    budget_of,
    compile_source,
    findings,
    read_budget,
    rehearse,
    shapes_of,
    write_budget,
)
from kbsub.eval.process.isolated import JudgeFailure, Status, run_isolated
from kbsub.eval.tasks.cases import CaseShape
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.tasks.declarations import declaration_of
from kbsub.eval.tasks.grid import named, own_shape, to_json
from kbsub.eval.tasks.task_file import task_text

NO_SHAPES = "its folder tells them: [[grid]] in task.toml, [[shape]] in cases.toml, [[shapes]] in bench.toml"
EXAMINE = "kbsub.eval.measure.resources:examine"
LIMIT_S = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: findings of each file; with --write, the budgets anew. 0 clean, 1 findings, 2 wrong, 3 no NVRTC."""
    parser = argparse.ArgumentParser(prog="kbsub measure resources", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="write the budgets that these builds need")
    parser.add_argument("--budget", type=Path, help=f"the budget file; default: {BUDGET_FILE} beside each candidate")
    given = parser.parse_args(arguments)
    if missing := [str(path) for path in given.files if not path.is_file()]:
        parser.error(f"{missing[0]}: no such file; name candidate files, as in submissions/level1_40/split_flat.py")
    bad: list[str] = []
    kernelbench = checkout_or_none()
    for path in given.files:
        text = path.read_text(encoding="utf-8")
        if "CUDA_SOURCE =" not in text:
            continue
        place = given.budget or path.parent / BUDGET_FILE
        budgets = read_budget(place)
        declaration = declaration_of(path)
        payload = {
            "source": text,
            "stem": path.stem,
            "precisions": list(declaration.precision) if declaration else ["fp32"],
            "budget": None if given.write else budgets.get(path.stem, {}),
            "task": task_text(path.parent),
            "kernelbench": None if kernelbench is None else str(kernelbench),
            "shapes": list(map(to_json, shapes_of(path.parent))),
        }
        cell = cell_of([hashlib.sha256(text.encode()).hexdigest()], str(path), kernelbench)
        outcome = run_isolated(EXAMINE, payload, timeout_s=LIMIT_S, cell=cell)
        if outcome.status is Status.NOT_RUN:
            print(outcome.message, file=sys.stderr)
            return 3
        if outcome.value is None:
            bad.append(f"{path.stem}: {outcome.status}: {outcome.message}")
            continue
        if given.write:
            write_budget(place, {**budgets, path.stem: outcome.value["budget"]})
        bad += outcome.value["findings"]
        print(f"{path.stem}: {outcome.value['builds']} builds")
    print("\n".join(bad) or "no findings")
    return 1 if bad else 0


def examine(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target of the child, in the candidate's cell: {"budget": as budget_of, "findings": [words], "builds": a number}.

    `budget`: that of its kernels; None: the one that these builds need. NOT_RUN without NVRTC.
    """
    stem, budget = payload["stem"], payload["budget"]
    shapes = [named(**each) for each in payload["shapes"]] + _own(payload)
    built: list[Mapping[str, Resources]] = []
    found: list[str] = []
    for arch in DEVICES:
        rehearsal = rehearse(payload["source"], payload["precisions"], DEVICES[arch], shapes)
        if not rehearsal.launched:
            found.append(f"{stem} for {arch}: none of {len(shapes)} known shapes makes it launch anything; {NO_SHAPES}")
        source = str(rehearsal.space["CUDA_SOURCE"])
        for options, module in rehearsal.modules.items():
            try:
                compiled = compile_source(source, options, arch)
            except ImportError as error:
                words = f"no NVRTC here ({error}): pip install 'kb-submissions[cuda13]'"
                raise JudgeFailure(Status.NOT_RUN, words) from error
            built.append(compiled.resources)
            allowed = budget_of(built) if budget is None else budget
            found += findings(stem, source, options, arch, compiled, allowed, module)
    return {"budget": budget_of(built), "findings": found, "builds": len(built)}


def _own(payload: Mapping[str, Any]) -> list[CaseShape]:
    """The task's own shape, where its program is at hand: beside the candidates, embedded, or in a checkout."""
    if payload["task"] is None:
        return []
    try:
        shape = own_shape(task_from_payload({**payload, "precision": "fp32"}))
    except TaskError:
        return []  # a KernelBench problem without a checkout
    return [] if shape is None else [shape]
