"""Writes gate answers for machines: JUnit XML, which CI systems show, and JSON. Knows answers, judges nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from kbsub.eval.process.printable import one_line, shown_name
from kbsub.eval.results.model import jsonable, write_json_atomic
from kbsub.eval.run.gate import Check, exit_code
from kbsub.eval.run.here import NAME as HERE
from kbsub.eval.verdicts.kind import Answer
from kbsub.eval.verdicts.register import KINDS

Candidates = Mapping[str, Sequence[Check]]


def as_json(candidates: Candidates, required: Sequence[str], facts: Mapping[str, Any]) -> dict[str, Any]:
    """{schema, exit_code, required, not_required, **facts, candidates: {key: {check: {answer, words}}}}."""
    return {
        "schema": 1,
        "exit_code": exit_code([check for checks in candidates.values() for check in checks]),
        "required": list(required),
        "not_required": [] if HERE in required else [name for name in KINDS if name not in required],
        **facts,
        "candidates": {
            key: {check.name: {"answer": check.answer.value, "words": check.words} for check in checks}
            for key, checks in candidates.items()
        },
    }


STDOUT = Path("-")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write the JSON; a path "-" is stdout."""
    if path == STDOUT:
        print(json.dumps(jsonable(content), indent=1, ensure_ascii=False, allow_nan=False))
    else:
        write_json_atomic(path, content)


def as_junit(candidates: Candidates, facts: Mapping[str, Any]) -> JUnitXml:
    """One suite a candidate, one case a check that was asked.

    Failed: a failure; cannot be certified here: an error; not checked here (correct-here): skipped. What was not
    required is no case: a property names it.
    """
    document = JUnitXml("kbsub gate")
    for key, checks in candidates.items():
        suite = TestSuite(shown_name(key))
        for name, value in facts.items():
            suite.add_property(name, one_line(str(value)))
        if left_out := [check.name for check in checks if check.answer is Answer.NOT_REQUIRED]:
            suite.add_property("not required", ", ".join(left_out))
        for check in checks:
            if check.answer is Answer.NOT_REQUIRED:
                continue
            case = TestCase(check.name, shown_name(f"{facts.get('task', 'task')}.{key}"), check.seconds)
            outcome = {
                Answer.FAIL: Failure,
                Answer.UNCERTIFIED: Error,
                Answer.NOT_HERE: Skipped,
            }.get(check.answer)
            if outcome is not None:
                case.result = [outcome(one_line(f"{check.answer}: {check.words}"), check.answer.value)]
            else:
                case.system_out = one_line(check.words)
            suite.add_testcase(case)
        document.add_testsuite(suite)
    document.update_statistics()
    return document


def write_junit(path: Path, candidates: Candidates, facts: Mapping[str, Any]) -> None:
    """Write the XML; folders are made. A path "-" is stdout."""
    if path == STDOUT:
        print(as_junit(candidates, facts).tostring().decode("utf-8"))
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    as_junit(candidates, facts).write(str(path), pretty=True)
