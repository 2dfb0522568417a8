"""`--require correct-here`: gate answers for a machine that cannot certify everything, from the answers there are.

What can be checked here is required, what cannot is named, and of each candidate something must have been executed and
found right. No word says official: on a CPU upstream's evaluator does not run. Reads rows and text, runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.adapters import static_checker
from kbsub.adapters.candidate import cuda_source_of, source_problem
from kbsub.eval.process.result_frames import SHAPE_ERRORS
from kbsub.eval.run.gate import Check, Judged, answers
from kbsub.eval.run.runner import Plan, Row
from kbsub.eval.verdicts.kind import Answer
from kbsub.eval.verdicts.register import OFFICIAL

NAME = "correct-here"
LOCAL = "local-check"  # what the official stage is called where upstream's evaluator did not run
TEXT, SOURCE = "text", "source"
EXECUTED = (OFFICIAL, LOCAL, "stress", "oracle")  # checks that compared an output of the candidate with something


def judged_rows(plan: Plan, rows: Sequence[Row], *, here: bool) -> dict[str, Judged]:
    """Row key -> the gate's answers of a run. `here`: the answers to --require correct-here."""
    found = {}
    on_gpu = plan.device != "cpu"
    for row in rows:
        declaration, wrong = plan.declaration_for(row.file)
        library_on_cpu = not on_gpu and cuda_source_of(row.source) is None
        try:
            checks = answers(row.fields, declaration, plan.stages, library_on_cpu=library_on_cpu, on_gpu=on_gpu)
            if here:
                text = text_check(row.source, row.unreadable, plan.kernelbench, plan.precision)
                checks = answers_here(checks, row.fields, text, on_gpu=on_gpu)
        except SHAPE_ERRORS as error:  # what a child sent is of no form that a judge sends: this row's failure alone
            words = f"its row is malformed: {type(error).__name__}: {error}"
            checks = [Check(name, Answer.FAIL, words) for name in plan.stages]
        if wrong:
            checks = [*checks, Check("declaration", Answer.FAIL, wrong)]
        found[row.key] = Judged(row.file, row.source, row.fields.get("stages", {}), checks)
    return found


def answers_here(checks: Sequence[Check], fields: Mapping[str, Any], text: Check, *, on_gpu: bool) -> list[Check]:
    """`checks` (kbsub.eval.run.gate.answers, every kind required) as answers to what can be known on this machine.

    `fields`: the row. `text`: what text_check says. A check that cannot be certified here is NOT_HERE, but a candidate
    of which nothing was executed and found right fails: it would have come through without a case.
    """
    found = [text, *(_here(check, fields, on_gpu) for check in checks)]
    failed = any(check.answer is Answer.FAIL for check in found)
    if not failed and not any(check.name in EXECUTED and check.answer is Answer.PASS for check in found):
        words = (
            "nothing of it was executed on this machine, so nothing is known of its answers: gate it on a machine with "
            "a GPU"
        )
        found.append(Check(NAME, Answer.FAIL, words))
    return found


def _here(check: Check, fields: Mapping[str, Any], on_gpu: bool) -> Check:
    local = fields.get("cpu_check") or {} if check.name == OFFICIAL and not on_gpu else None
    name = check.name if local is None else LOCAL
    if check.answer is not Answer.UNCERTIFIED:
        return Check(name, check.answer, check.words, check.seconds)
    if local is not None and local.get("correctness") is True:
        words = f"{local.get('trials')} trials within the official tolerance on the CPU; no official verdict"
        return Check(name, Answer.PASS, words, check.seconds)
    # A name of the task defined again: what was executed here ran on other inputs than the task's.
    if check.name == SOURCE and (fields.get(SOURCE) or {}).get("overrides"):
        return Check(
            name, Answer.FAIL, f"{check.words}: it was run here on what the file made of the task", check.seconds
        )
    return Check(name, Answer.NOT_HERE, check.words, check.seconds)


def text_check(source: str, unreadable: str | None, kernelbench: Path | None, precision: str) -> Check:
    """What can be said of a file without executing it: it parses, defines ModelNew, and upstream's checker takes it."""
    problem = unreadable or source_problem(source)
    if problem:
        return Check(TEXT, Answer.FAIL, problem)
    if kernelbench is None:
        return Check(
            TEXT, Answer.PASS, "it parses and names ModelNew; upstream's static checker was not asked: kbsub fetch"
        )
    said = static_checker.check(kernelbench, source, precision)
    if said["errors"]:
        return Check(TEXT, Answer.FAIL, f"upstream's static checker refuses it: {'; '.join(said['errors'])}")
    return Check(TEXT, Answer.PASS, "it parses, names ModelNew, and upstream's static checker takes it")
