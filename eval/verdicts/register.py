"""The stages of `kbsub eval`: which function judges, under which key of a row its dict goes, how it reads in a table.

A stage is one judge run in one child process for one candidate. Its dict is stored as it is; the row's status comes
from the official stage alone. To add a stage, add a line here. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kbsub.eval.process.isolated import Status


@dataclass(frozen=True)
class Stage:
    """`target` is run by run_isolated; `key` is where its dict goes in a row; `brief` says that dict in a few words."""

    name: str
    target: str
    key: str
    brief: Callable[[Mapping[str, Any]], str]


def _identity(found: Mapping[str, Any]) -> str:
    return f"{found.get('identical')}/{found.get('total')} bit-equal" + _contradictions(found)


def _stress(found: Mapping[str, Any]) -> str:
    kinds = ("passed", "nearer_than_reference", "apart", "failed", "refused", "skipped")
    words = [f"{found[key]} {key.replace('_', ' ')}" for key in kinds if found.get(key)]
    return (", ".join(words) or "no case") + _contradictions(found)


def _oracle(found: Mapping[str, Any]) -> str:
    cases = [case for case in found.values() if isinstance(case, Mapping) and "nearer" in case]
    nearer = sum(case["nearer"] in ("candidate", "equal") for case in cases)
    return f"as near as the reference or nearer in {nearer}/{len(cases)}" if cases else "no case"


def _guards(found: Mapping[str, Any]) -> str:
    return "clean" if found.get("clean") else f"{len(found.get('findings', []))} findings"


def _official(found: Mapping[str, Any]) -> str:
    return str((found.get("official") or found.get("cpu_check") or {}).get("trials"))


def _contradictions(found: Mapping[str, Any]) -> str:
    said = found.get("contradictions") or []
    return f"; contradicts its declaration: {said[0]}" if said else ""


STAGES = {
    stage.name: stage
    for stage in (
        Stage("official", "kbsub.eval.verdicts.official.judge:judge", "official", _official),
        Stage("identity", "kbsub.eval.verdicts.identity.judge:judge", "bit_identity", _identity),
        Stage("stress", "kbsub.eval.suite.judge:judge", "stress", _stress),
        Stage("oracle", "kbsub.eval.operators.compare.oracle:judge", "oracle", _oracle),
        Stage("guards", "kbsub.eval.verdicts.guards:judge", "guards", _guards),
    )
}
DEFAULT_STAGES = ("official", "identity", "stress", "oracle")

# After one of these from the official stage the others would only repeat it, at the price of a timeout each.
ENDS_THE_ROW = (Status.COMPILE_ERROR, Status.TIMEOUT, Status.CRASHED)
# The row, or one of its stages, did what was asked of it, or could not be asked here and says why.
HONEST = (Status.OK, Status.NOT_RUN)
