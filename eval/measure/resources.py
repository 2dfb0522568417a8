"""Compiles CUDA candidates for every architecture and holds each kernel to its budget of registers, memory and spills.

    kbsub measure resources submissions/*/*.py
    kbsub measure resources --write tests/resource_budget.toml CANDIDATE.py ...

Needs NVRTC and no GPU. What is compiled and what counts as a finding is host_executor/compile_gate.py's.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.eval.host_executor.compile_gate import (
    DEVICES,
    Resources,
    budget_of,
    compile_source,
    findings,
    read_budget,
    rehearse,
    write_budget,
)
from kbsub.eval.process.isolated import JudgeFailure, Status, run_isolated
from kbsub.eval.run.project import project_path
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.tasks.declarations import declaration_of

EXAMINE = "kbsub.eval.measure.resources:examine"
LIMIT_S = 600.0
BUDGET = "tests/resource_budget.toml"  # of a checkout


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: findings of each file; with --write, the budget file anew. 0 clean, 1 findings, 3 no NVRTC."""
    parser = argparse.ArgumentParser(prog="kbsub measure resources", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, metavar="BUDGET", help="write the budget file from these builds")
    parser.add_argument("--budget", type=Path, help=f"the budget file; default: {BUDGET} of the checkout")
    given = parser.parse_args(arguments)
    try:
        budgets = read_budget(given.write or given.budget or project_path(BUDGET, "--budget"))
    except FileNotFoundError as error:
        parser.error(str(error))
    bad: list[str] = []
    for path in given.files:
        text = path.read_text(encoding="utf-8")
        if "CUDA_SOURCE =" not in text:
            continue
        declaration = declaration_of(path)
        payload = {
            "source": text,
            "stem": path.stem,
            "precisions": list(declaration.precision) if declaration else ["fp32"],
            "budget": None if given.write else budgets.get(path.stem, {}),
        }
        cell = cell_of([hashlib.sha256(text.encode()).hexdigest()], str(path), None)
        outcome = run_isolated(EXAMINE, payload, timeout_s=LIMIT_S, cell=cell)
        if outcome.status is Status.NOT_RUN:
            print(outcome.message, file=sys.stderr)
            return 3
        if outcome.value is None:
            bad.append(f"{path.stem}: {outcome.status}: {outcome.message}")
            continue
        budgets[path.stem] = outcome.value["budget"]
        bad += outcome.value["findings"]
        print(f"{path.stem}: {outcome.value['builds']} builds")
    if given.write:
        write_budget(given.write, budgets)
    print("\n".join(bad) or "no findings")
    return 1 if bad else 0


def examine(payload: dict[str, Any], progress: Any) -> dict[str, Any]:
    """Target of the child, in the candidate's cell: {"budget": as budget_of, "findings": [words], "builds": a number}.

    `budget`: that of its kernels; None: the one that these builds need. NOT_RUN without NVRTC.
    """
    stem, budget = payload["stem"], payload["budget"]
    built: list[Mapping[str, Resources]] = []
    found: list[str] = []
    for arch in DEVICES:
        rehearsal = rehearse(payload["source"], payload["precisions"], DEVICES[arch])
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
