"""Turns the rows of a run into gate answers: what was required, whether it holds, and what could not be certified here.

Reads rows and declarations, runs nothing, imports no torch. An answer never changes a verdict: it says whether a
verdict is what was required of this candidate. Declared failures count as kept promises; a control that passes what it
is declared to fail breaks its declaration, and that fails the gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kbsub.eval.process.cell import in_words
from kbsub.eval.process.isolated import Status
from kbsub.eval.verdicts.kind import Answer, Asked, VerdictKind
from kbsub.eval.verdicts.register import KINDS, OFFICIAL

EXIT_PASS, EXIT_FAIL, EXIT_USAGE, EXIT_UNCERTIFIED = 0, 1, 2, 3


@dataclass(frozen=True)
class Check:
    """`words` say what was seen, and for a failure what it breaks."""

    name: str
    answer: Answer
    words: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Judged:
    """One candidate of a gate: file, text, its row's stages ({name: {status, message, log}}), answers."""

    file: Path
    source: str
    stages: Mapping[str, Mapping[str, Any]]
    checks: Sequence[Check]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.answer in (Answer.FAIL, Answer.UNCERTIFIED)]


Fields = Mapping[str, Any]


def answers(
    fields: Fields,
    declaration: Mapping[str, Any],
    required: Sequence[str],
    *,
    library_on_cpu: bool = False,
    on_gpu: bool = True,
) -> list[Check]:
    """The answer to every check, required or not, for one row of a result file.

    `fields`: the row as `kbsub eval` writes it (`stages`, `official`, `bit_identity`, `stress`, `oracle`, `guards`).
    `declaration`: its candidates.toml row as JSON, or {}. `library_on_cpu`: a file without kernels of its own was run
    on the CPU; it then ran other library kernels than the ones its declaration speaks of. `on_gpu`: what the caller
    itself knows of this run; a row that claims a GPU where there was none was not written by a judge, and fails.
    """
    found = []
    for name in KINDS:
        if name not in required:
            found.append(Check(name, Answer.NOT_REQUIRED, "not required of this run"))
            continue
        stage = fields.get("stages", {}).get(name)
        if stage is None:
            found.append(Check(name, Answer.UNCERTIFIED, "was not run"))
            continue
        answer, words = _answer(name, fields, declaration, stage)
        if not on_gpu and (claim := _claims_a_gpu(KINDS[name], fields)):
            answer, words = Answer.FAIL, f"the {name} record {claim}, but this run had no GPU: no judge wrote that"
        numbers = KINDS[name].speaks_of_cuda and stage["status"] == Status.OK.value
        if answer is Answer.FAIL and numbers and library_on_cpu and declaration:
            answer = Answer.UNCERTIFIED
            words = f"the declaration speaks of the library's CUDA kernels, the CPU's gave: {words}"
        found.append(Check(name, answer, words, float(stage.get("seconds", 0.0))))
    return found


def confinements(fields: Fields) -> set[str]:
    """What the processes that ran this candidate were confined by, in words, as its stages say it."""
    stages = (fields.get("stages") or {}).values()
    return {in_words(end.get("confined")) for end in stages if end.get("confined") or end["status"] == Status.OK.value}


def exit_code(checks: Sequence[Check]) -> int:
    """0 every required check passed, 1 one failed, 3 none failed but one cannot be certified here."""
    given = {check.answer for check in checks}
    if Answer.FAIL in given:
        return EXIT_FAIL
    return EXIT_UNCERTIFIED if Answer.UNCERTIFIED in given else EXIT_PASS


def _answer(name: str, fields: Fields, declaration: Mapping[str, Any], stage: Mapping[str, Any]) -> tuple[Answer, str]:
    kind, status = KINDS[name], Status(stage["status"])
    if not kind.own_ending:
        if status in (Status.NOT_RUN, Status.NOT_CHECKED):
            words = stage.get("message") or "not run"
            return Answer.UNCERTIFIED, f"{status}: {words}" if status is Status.NOT_CHECKED else words
        if status is not Status.OK:
            return Answer.FAIL, f"{status}: {stage.get('message') or 'no message'}"
    found = fields.get(kind.key)
    try:
        record = None if found is None else kind.record.model_validate(found)
    except ValidationError as error:
        return Answer.FAIL, f"the {name} verdict is no record of its kind: {error.errors()[0]['loc']}"
    return kind.answer(record, Asked(fields, stage, declaration))


def _claims_a_gpu(kind: VerdictKind, fields: Fields) -> str:
    """What in the record of a check only a GPU could have made, in words; "" where there is nothing."""
    found = fields.get(kind.key) or {}
    if kind.name == OFFICIAL:
        return "holds a verdict of upstream's evaluator" if found.get("correctness") else ""
    said = " ".join(str(found.get(key, "")) for key in ("device", "reference") if isinstance(found.get(key), str))
    return f"says that it was made on {said.strip()}" if "cuda" in said else ""
