"""How a finished identity verdict can contradict what candidates.toml declares. Must not know torch or the judge."""

from __future__ import annotations

from typing import Any

from kbsub.eval.operators.identity import FULL_SIZE
from kbsub.eval.tasks.declarations import Expect


def contradictions_of(expect: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Where a finished verdict, measured on CUDA, contradicts what was declared; [] if nowhere."""
    said = Expect.model_validate(expect)
    problems: list[str] = []
    different = [case["name"] for case in found["cases"] if "skipped" not in case and not case["identical"]]
    different += [case["name"] for case in found.get("secret", ()) if not case.get("identical", "skipped" in case)]
    distinct = found.get("repeated_runs", {}).get("distinct", 1)
    if said.identity == "pass" and different:
        problems.append(f"declared bit-identical, but {len(different)} cases differ, the first: {different[0]}")
    if distinct != 1:
        problems.append(f"repeated runs gave {distinct} different results; a candidate gives the same bits every time")
    if said.identity == "fail" and not different:
        problems.append("declared to differ from native somewhere, but every case is bit-identical")
    if said.beyond_tolerance is not None and found["precision"] == "fp32":
        for case in found["cases"]:
            if case["group"] != FULL_SIZE or "skipped" in case:
                continue
            declared_beyond = case["input"] in said.beyond_tolerance
            if case.get("allclose", False) == declared_beyond:
                words = ("beyond", "within") if declared_beyond else ("within", "beyond")
                problems.append(f"{case['name']}: declared {words[0]} {found['tolerance']:g} of native, is {words[1]}")
    return problems
