"""Compiles CUDA candidates for every architecture and holds each kernel to its budget of registers, memory and spills.

    kbsub measure resources submissions/*/*.py
    kbsub measure resources --write tests/resource_budget.toml CANDIDATE.py ...

Needs NVRTC and no GPU. What is compiled and what counts as a finding is host_executor/compile_gate.py's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kbsub.eval.host_executor.compile_gate import (
    DEVICES,
    budget_of,
    compile_source,
    findings,
    read_budget,
    source_and_builds,
    write_budget,
)
from kbsub.eval.measure.project import project_path
from kbsub.eval.tasks.declarations import declaration_of

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
        if "CUDA_SOURCE =" not in path.read_text(encoding="utf-8"):
            continue
        declaration = declaration_of(path)
        precisions = declaration.precision if declaration else ("fp32",)
        built = []
        for arch in DEVICES:
            source, builds = source_and_builds(path, precisions, arch)
            for options, module in builds.items():
                try:
                    compiled = compile_source(source, options, arch)
                except ImportError as error:
                    print(f"no NVRTC here ({error}): pip install 'kb-submissions[cuda13]'", file=sys.stderr)
                    return 3
                built.append(compiled.resources)
                budget = budget_of(built) if given.write else budgets.get(path.stem, {})
                bad += findings(path.stem, source, options, arch, compiled, budget, module)
        budgets[path.stem] = budget_of(built)
        print(f"{path.stem}: {len(built)} builds")
    if given.write:
        write_budget(given.write, budgets)
    print("\n".join(bad) or "no findings")
    return 1 if bad else 0
