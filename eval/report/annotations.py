"""Gate answers where a person reads them in CI: lines on the changed files, and a summary in Markdown.

Knows answers, sources and logs; judges nothing. A line is a best reading of the judge's words: a syntax error's own
line, the innermost frame of the file in a traceback, else what ModelNew.forward returns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbsub.eval.process.printable import one_line, shown_name
from kbsub.eval.run.gate import Judged, exit_code
from kbsub.eval.verdicts.kind import Answer

SHIFT = 2  # lines that upstream puts before the text it executes
LONGEST = 600  # characters of an annotation; GitHub cuts at 64 KB, a person much earlier
_FRAME = re.compile(r'File "<string>", line (\d+), in (\S+)')
# What upstream's static checker says -> what it saw in the text.
_SEEN = {
    "try-except": re.compile(r"\btry\s*:|\bexcept\b"),
    "'pass' statement": re.compile(r"\bpass\b"),
    "thread": re.compile(r"threading|concurrent\.futures|multiprocessing"),
    "stream": re.compile(r"Stream\s*\(|\.stream\b|_stream\s*\("),
}
_STATED = re.compile(r"^(?:[A-Z_]+: )?line (\d+): ")
_MARKS = {
    Answer.PASS: "pass",
    Answer.FAIL: "**FAIL**",
    Answer.UNCERTIFIED: "cannot be certified here",
    Answer.NOT_HERE: "not checked here",
}


def line_of(source: str, words: str, log: str) -> int:
    """The line, from 1, that an answer in these `words` is about; `log` is the output of the judge's process."""
    lines = source.count("\n") + 1
    if (stated := _STATED.match(words)) and int(stated[1]) <= lines:
        return int(stated[1])
    for said, seen in _SEEN.items():
        if said in words and (found := [n for n, text in enumerate(source.split("\n"), 1) if seen.search(text)]):
            return found[0]
    functions = _functions(source)
    for number, name in reversed(_FRAME.findall(log)):
        for shift in (SHIFT, 0):  # the official stage puts lines first, a worker may not
            line = int(number) - shift
            if name in {
                function.name for function in functions if function.lineno <= line <= (function.end_lineno or 0)
            }:
                return line
    return _answer_line(source)


def _functions(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _answer_line(source: str) -> int:
    """Where ModelNew.forward returns its answer; its class, or line 1, where there is none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 1
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ModelNew":
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name == "forward":
                    returns = [each.lineno for each in ast.walk(inner) if isinstance(each, ast.Return)]
                    return max(returns, default=inner.lineno)
            return node.lineno
    return 1


def github(judged: Sequence[Judged]) -> list[str]:
    """A workflow command a failed candidate, on the line of its first failure: "::error file=,line=,title=::words".

    What only could not be certified is a warning. A path is given as it was named, which in a workflow is from the
    root of the repository.
    """
    found = []
    for each in judged:
        if not each.failed:
            continue
        failures = [check for check in each.failed if check.answer is Answer.FAIL]
        first = (failures or each.failed)[0]
        stage = each.stages.get(_stage_of(first.name), {})
        line = line_of(each.source, first.words, str(stage.get("log", "")))
        words = "; ".join(f"{check.name}: {check.words[:LONGEST]}" for check in failures or each.failed)
        level = "error" if failures else "warning"
        title = f"kbsub gate: {each.file.stem}: {first.name}"
        found.append(
            f"::{level} file={_property(shown_name(each.file))},line={line},title={_property(title)}"
            f"::{_data(one_line(words[: 3 * LONGEST]))}"
        )
    return found


def _stage_of(check: str) -> str:
    from kbsub.eval.run.here import LOCAL
    from kbsub.eval.verdicts.register import OFFICIAL

    return OFFICIAL if check == LOCAL else check


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def summary(judged: Sequence[Judged], required: Sequence[str], facts: Mapping[str, Any]) -> str:
    """A step summary in Markdown: the outcome, a row a candidate and check, and what the run stood on."""
    code = exit_code([check for each in judged for check in each.checks])
    outcome = {0: "passed", 1: "failed", 3: "not certified"}.get(code, f"exit code {code}")
    lines = [
        f"### kbsub gate: {outcome}",
        "",
        f"Required: {', '.join(required)}. " + ", ".join(f"{name}: {_cell(value)}" for name, value in facts.items()),
        "",
        "| candidate | check | answer | words |",
        "|---|---|---|---|",
    ]
    for each in judged:
        name = _cell(shown_name(each.file.stem))
        for check in each.checks:
            if check.answer in _MARKS:
                words = check.words if len(check.words) <= LONGEST else check.words[:LONGEST] + " ..."
                lines.append(f"| {name} | {check.name} | {_MARKS[check.answer]} | {_cell(words)} |")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    text = one_line(str(value)).replace("\\", "\\\\")
    for sign in "|<>`*_[]":  # a candidate's words must not become markup of the page
        text = text.replace(sign, f"\\{sign}" if sign not in "<>" else {"<": "&lt;", ">": "&gt;"}[sign])
    return text


def append_summary(path: Path, text: str) -> None:
    """Append to a file such as $GITHUB_STEP_SUMMARY; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)
