"""The oracle verdict as a record, its words and its gate answer. No torch, no judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from kbsub.eval.results.record import Record
from kbsub.eval.tasks.cases import SECRET
from kbsub.eval.verdicts.kind import Answer, Asked, Column, VerdictKind, listed


class OracleCase(Record):
    """One case: errors against the float64 answer. Non-finite numbers may be the strings "inf" and "nan"."""

    candidate_max_abs: float
    reference_max_abs: float | None = None
    candidate_max_ulp: float | None = None
    reference_max_ulp: float | None = None
    candidate_allclose: bool | None = None
    reference_allclose: bool | None = None
    candidate_bound_ratio: float | None = None
    reference_bound_ratio: float | None = None
    candidate_special_mismatches: int | None = None
    reference_special_mismatches: int | None = None
    candidate_worst: Any = None
    reference_worst: Any = None
    nearer: str | None = None  # "candidate", "reference" or "equal"
    rstd_overflows_fp32: bool | None = None


class Oracle(Record):
    """Case name -> OracleCase. secret: cases with a secret seed, which are in no count; absent in older files."""

    KEY: ClassVar[str] = "oracle"
    __pydantic_extra__: dict[str, OracleCase]

    secret: dict[str, OracleCase] | None = None

    @property
    def cases(self) -> dict[str, OracleCase]:
        return self.__pydantic_extra__

    def worst(self, side: str = "candidate_max_abs") -> tuple[float, str] | None:
        """The largest max abs error over the cases, and the case. NaN (no number where the formula has one) is worse
        than any number."""
        found = [(value, name) for name, case in self.cases.items() if (value := getattr(case, side)) is not None]
        return max(found, key=lambda pair: math.inf if math.isnan(pair[0]) else pair[0]) if found else None

    def nearer(self, *sides: str) -> str:
        """In how many of the cases that name a nearer side it is one of these: "3/32"."""
        named = [case for case in self.cases.values() if case.nearer is not None]
        return f"{sum(case.nearer in sides for case in named)}/{len(named)}"


def answer(found: Oracle | None, asked: Asked) -> tuple[Answer, str]:
    """Accurate candidates within the bound everywhere; others no farther than the tolerance where native is within."""
    if found is None or not found.cases:
        return Answer.UNCERTIFIED, "no case has a float64 answer here"
    problems = _too_far(found.cases, accurate=asked.accurate)
    problems += _secret_too_far(found, problems, accurate=asked.accurate)
    words = f"as near to the float64 answer as native or nearer in {found.nearer('candidate', 'equal')}"
    words += f", plus {len(found.secret)} secret cases" if found.secret else ""
    if problems and asked.control:
        return Answer.PASS, f"a control, beyond the tolerance in {len(problems)} cases: {words}"
    return (Answer.FAIL, f"{listed(problems)} ({words})") if problems else (Answer.PASS, words)


def problems(found: Oracle) -> list[str]:
    known = _too_far(found.cases)
    return known + _secret_too_far(found, known)


def _secret_too_far(found: Oracle, known: list[str], *, accurate: bool = False) -> list[str]:
    """The secret cases that are too far where the same case of the seed that everybody knows is not."""
    far = _too_far(found.secret or {}, accurate=accurate)
    return [each for each in far if each.removeprefix(SECRET).split(": ")[0] not in {k.split(": ")[0] for k in known}]


def _too_far(cases: Mapping[str, OracleCase], *, accurate: bool = False) -> list[str]:
    problems = []
    for name, case in cases.items():
        if case.rstd_overflows_fp32:
            continue  # the float64 answer is beyond float32 there; listed apart
        if accurate and (not case.candidate_allclose or (case.candidate_bound_ratio or 0) > 1):
            ratio = f"{case.candidate_bound_ratio} of the bound"
            problems.append(f"{name}: max abs error {case.candidate_max_abs}, {ratio}")
        elif not accurate and case.reference_allclose and not case.candidate_allclose:
            problems.append(f"{name}: max abs error {case.candidate_max_abs}, native's {case.reference_max_abs}")
    return problems


def brief(found: Oracle) -> str:
    return f"as near as the reference or nearer in {found.nearer('candidate', 'equal')}" if found.cases else "no case"


KIND = VerdictKind(
    name="oracle",
    judge="kbsub.eval.suite.judge:judge_oracle",
    record=Oracle,
    brief=brief,
    answer=answer,
    order=3,
    columns=(Column("nearer than eager", lambda found: found.nearer("candidate") if found.cases else "-"),),
    shared=True,
    problems=problems,
    not_checked=lambda found: "" if found.cases else "no case has a float64 answer",
    speaks_of_cuda=True,
)
