"""The source verdict as a record, its words and its gate answer. No torch, no judge."""

from __future__ import annotations

from typing import Any, ClassVar

from kbsub.eval.results.model import Official
from kbsub.eval.results.record import Record
from kbsub.eval.verdicts.kind import Answer, Asked, VerdictKind

SHOWN = 4  # names in one line


class StaticCheck(Record):
    """Upstream's own words on the text: `valid` is its answer to itself, and changes no verdict here."""

    valid: bool
    errors: list[str]
    warnings: list[str]
    backend: str


class Source(Record):
    """overrides: name of the task -> {"task", "file"}, both as source text. own_namespace: upstream's object for the
    file executed in a dict of its own; null where nothing is overridden or no GPU was there. own_speedup: eager's mean
    over the candidate's, both upstream's. static: null without a checkout.
    """

    KEY: ClassVar[str] = "source"

    overrides: dict[str, dict[str, str]]
    own_namespace: Official | None = None
    own_speedup: float | None = None
    static: StaticCheck | None = None


def overridden(found: dict[str, dict[str, Any]]) -> str:
    """ "redefines batch_size (16 -> 128), get_inputs (def)"."""
    named = [
        f"{name} ({each['task']} -> {each['file']})" if each["task"] not in ("def", "class") else name
        for name, each in found.items()
    ]
    more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
    return f"redefines {', '.join(named[:SHOWN])}{more}" if named else "redefines no name of the task"


def brief(found: Source) -> str:
    words = overridden(found.overrides)
    if found.own_namespace is not None:
        said = "correct" if found.own_namespace.passed else "wrong"
        words += f"; in its own namespace {said}" + (f", {found.own_speedup:.2f}x" if found.own_speedup else "")
    if found.static is not None and not found.static.valid:
        words += f"; upstream's static checker rejects it: {'; '.join(found.static.errors[:2])}"
    return words


def problems(found: Source) -> list[str]:
    own = found.own_namespace
    if own is None or own.passed:
        return []
    issue = own.metadata.get("correctness_issue") or own.metadata.get("runtime_error") or "no verdict"
    return [f"own namespace: compiled {own.compiled}, correct {own.correctness}, trials {own.trials}: {issue}"]


def answer(found: Source | None, asked: Asked) -> tuple[Answer, str]:
    """The task's own inputs are what a candidate is to be right on; the static checker's words change nothing."""
    if found is None:
        return Answer.UNCERTIFIED, "its source was not read"
    if wrong := problems(found):
        return Answer.FAIL, f"{brief(found)}; {wrong[0]}"
    if found.overrides and found.own_namespace is None:
        return Answer.UNCERTIFIED, brief(found)
    return Answer.PASS, brief(found)


KIND = VerdictKind(
    name="source",
    judge="kbsub.eval.verdicts.source.judge:judge",
    record=Source,
    brief=brief,
    answer=answer,
    order=6,
    problems=problems,
    few_calls=True,
    as_written=True,
    text_on_cpu=True,
    runs_candidate=True,
)
