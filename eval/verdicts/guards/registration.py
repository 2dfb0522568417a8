"""The guards' verdict as a record, its words and its gate answer. No torch, no judge."""

from __future__ import annotations

from typing import Any, ClassVar

from kbsub.eval.results.record import Record
from kbsub.eval.verdicts.kind import Answer, Asked, Column, VerdictKind, listed


class Guards(Record):
    """findings: [{guard, message, inside}]; checked: guards that could ask; not_checked: [{guard, reason}].

    checked_inside: those of `checked` that asked in the candidate's own process, so that their word is that process's;
    likewise a finding with `inside`. All others compared values in a process that executed no line of the candidate.
    confined: {"level", "lacks"} of the processes that did. Both are absent in older files, where every guard shared a
    process with the candidate.
    """

    KEY: ClassVar[str] = "guards"

    clean: bool
    findings: list[dict[str, Any]]
    checked: list[str] | None = None
    not_checked: list[dict[str, Any]] | None = None
    checked_inside: list[str] | None = None
    confined: Any = None


def answer(found: Guards | None, asked: Asked) -> tuple[Answer, str]:
    if found is not None and found.findings:
        return Answer.FAIL, listed([f"{finding['guard']}: {finding['message']}" for finding in found.findings])
    if found is None or not found.clean or not found.checked:
        return Answer.UNCERTIFIED, "no guard could ask its question"
    words = f"{len(found.checked)} guards clean"
    if found.checked_inside:
        words += f", {len(found.checked_inside)} of them by the word of the candidate's own process"
    if found.not_checked:
        words += "; not asked: " + ", ".join(f"{entry['guard']} ({entry['reason']})" for entry in found.not_checked)
    return Answer.PASS, words


def brief(found: Guards) -> str:
    return "clean" if found.clean else f"{len(found.findings)} findings"


def not_checked(found: Guards) -> str:
    checked, missed = found.checked or [], found.not_checked or []
    if found.findings or len(checked) >= max(len(missed), 1):
        return ""
    first = f", the first: {missed[0]['guard']}: {missed[0]['reason']}" if missed else ""
    return f"{len(missed)} of {len(checked) + len(missed)} guards could not ask{first}"


KIND = VerdictKind(
    name="guards",
    judge="kbsub.eval.verdicts.guards:judge",
    record=Guards,
    brief=brief,
    answer=answer,
    order=4,
    columns=(Column("guards", brief),),
    problems=lambda found: [f"{finding['guard']}: {finding['message']}" for finding in found.findings],
    not_checked=not_checked,
)
