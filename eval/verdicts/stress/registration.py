"""The stress verdict as a record, its words and its gate answer. No torch, no judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from kbsub.adapters.refusal import REFERENCE_REFUSES
from kbsub.eval.results.record import Record
from kbsub.eval.suite.records import NO_TIME, declared_stress, no_verdict, secret_problems, secret_words, unexpected
from kbsub.eval.tasks.cases import FAIL, NEARER, SKIPPED
from kbsub.eval.verdicts.kind import Answer, Asked, Column, VerdictKind, contradictions, listed


class Stress(Record):
    """How the cases ended, and every case as a row. `nearer_than_reference`, `apart`: absent in older files."""

    KEY: ClassVar[str] = "stress"

    passed: int
    failed: int
    refused: int
    skipped: int
    cases: Any
    nearer_than_reference: int | None = None
    apart: int | None = None
    equal_nan: bool | None = None
    device: str | None = None
    precision: str | None = None
    shapes: str | None = None
    complete: bool | None = None
    seconds: float | None = None
    shared_by: int | None = None
    peak_extra_bytes: int | None = None  # of all processes together (in older files there was one)
    peak_extra_bytes_of: dict[str, int] | None = None  # "judge", "candidate" (its own word), "shared" memory
    secret: Any = None  # rows of cases with a secret seed, which are in no count; absent in older files
    rstd_overflows_fp32: list[str] | None = None
    contradictions: list[str] | None = None
    host_executor: bool | None = None
    native: str | None = None
    parameters_set: str | None = None  # how its parameters were set: by key, by order and shape ...; "not at all"
    eps_set: str | None = None
    left_out: dict[str, int] | None = None  # why -> how many cases have no meaning for this task
    process: str | None = None  # "worker": the judge ran no line of the candidate; absent in older files
    confined: Any = None  # {"level", "lacks"} of that process


COUNTS = ("passed", "nearer_than_reference", "apart", "failed", "refused", "skipped")


def brief(found: Stress) -> str:
    counts = {key: getattr(found, key) for key in COUNTS}
    words = ", ".join(f"{count} {key.replace('_', ' ')}" for key, count in counts.items() if count)
    return (words or "no case") + secret_words(found.secret or ()) + contradictions(found.contradictions)


def answer(found: Stress | None, asked: Asked) -> tuple[Answer, str]:
    rows = list((found.cases if found is not None else None) or [])
    ran = [row for row in rows if row["class"] != SKIPPED]
    if found is None or not ran:
        return Answer.UNCERTIFIED, "no case could be run here"
    words = ", ".join(f"{n} {key}" for key in ("passed", "failed", "refused", "skipped") if (n := getattr(found, key)))
    secret = list(found.secret or [])
    words += f"{secret_words(secret)} (equal_nan=True)"
    if found.parameters_set not in (None, "by key"):
        words += f"; parameters set {found.parameters_set}"
    if why := no_verdict("stress", [*rows, *secret]):
        return Answer.UNCERTIFIED, why
    if refused := sum(str(row.get("reason", "")).startswith(REFERENCE_REFUSES) for row in rows):
        words += f"; {refused} cases skipped because {REFERENCE_REFUSES}"
    precision = str(asked.fields.get("precision", "fp32"))
    declared, elsewhere = _runnable(declared_stress(asked.declaration, precision), rows, ran)
    if elsewhere:
        words += f"; cases of {', '.join(elsewhere)} cannot be run here"
    if asked.control and not declared:
        disagreeing = [row["name"] for row in ran if row["class"] in (FAIL, NEARER)]
        if not disagreeing and elsewhere:
            return Answer.UNCERTIFIED, words
        if not disagreeing:
            return Answer.FAIL, f"declared a control, but fails no case: {words}"
        return Answer.PASS, f"fails as a control does ({disagreeing[0]} first): {words}"
    problems = unexpected(ran, declared, accurate=asked.accurate) + secret_problems(rows, secret)
    if not problems and (late := sum(row.get("reason") == NO_TIME for row in (*rows, *secret))):
        return Answer.UNCERTIFIED, f"{late} cases were not asked, {NO_TIME}: a larger --timeout asks them ({words})"
    return (Answer.FAIL, f"{listed(problems)} ({words})") if problems else (Answer.PASS, words)


def _runnable(
    declared: Mapping[str, Sequence[str]], rows: Sequence[Mapping[str, Any]], ran: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, list[str]], list[str]]:
    """The declared patterns, and apart from them those whose every case was skipped on this machine."""
    here: dict[str, list[str]] = {}
    elsewhere = []
    for way, patterns in declared.items():
        for pattern in patterns:
            known = any(fnmatchcase(row["name"], pattern) for row in rows)
            if known and not any(fnmatchcase(row["name"], pattern) for row in ran):
                elsewhere.append(pattern)
            else:
                here.setdefault(way, []).append(pattern)
    return here, elsewhere


def _count(key: str) -> Callable[[Stress], str]:
    def cell(found: Stress) -> str:
        value = getattr(found, key)
        return "-" if value is None else str(value)

    return cell


def problems(found: Stress) -> list[str]:
    rows = [*found.cases, *(found.secret or ())]
    return [f"{row['name']}: {row.get('reason', 'no reason given')}" for row in rows if row["class"] == FAIL]


KIND = VerdictKind(
    name="stress",
    judge="kbsub.eval.suite.judge:judge",
    record=Stress,
    brief=brief,
    answer=answer,
    order=2,
    columns=(
        Column("stress passed", _count("passed")),
        Column("nearer", _count("nearer_than_reference")),
        Column("apart", _count("apart")),
        Column("failed", _count("failed")),
        Column("refused", _count("refused")),
        Column("skipped", _count("skipped")),
    ),
    note="equal_nan=True",
    problems=problems,
    not_checked=lambda found: no_verdict("stress", [*found.cases, *(found.secret or ())]),
    shared=True,
    speaks_of_cuda=True,
)
