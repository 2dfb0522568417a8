"""What a kind of verdict is: its judge, its record, its words, its gate answer and its columns, said once.

A kind is one package under eval/verdicts with a module `registration` that defines KIND. Imports no torch: reports and
the parent process read kinds without importing a judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kbsub.eval.results.record import Record


class Answer(str, Enum):
    """The gate's answer to one required verdict of one candidate."""

    PASS = "pass"
    FAIL = "fail"
    UNCERTIFIED = "cannot be certified here"
    NOT_REQUIRED = "not required"
    NOT_HERE = "not checked here"  # --require correct-here asks for what this machine can say; this it cannot

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Asked:
    """What a gate answer may look at beside the verdict's own record.

    `fields`: the whole row; `stage`: how the judge's process ended ({status, message, seconds}); `declaration`: the
    candidates.toml row as JSON, {} for a file that nothing is declared of.
    """

    fields: Mapping[str, Any]
    stage: Mapping[str, Any]
    declaration: Mapping[str, Any]

    @property
    def expect(self) -> Mapping[str, Any]:
        return self.declaration.get("expect") or {}

    @property
    def control(self) -> bool:
        return self.declaration.get("contract") == "control"

    @property
    def accurate(self) -> bool:
        return bool(self.declaration.get("accurate"))


@dataclass(frozen=True)
class Column:
    """One column of the reports' table of verdicts; `cell` gets the kind's record."""

    heading: str
    cell: Callable[[Any], str]


@dataclass(frozen=True)
class VerdictKind:
    """One kind of verdict.

    name: what `--only` and `--require` call it. judge: "package.module:function", a target of process.isolated that
    returns a dict; it is stored under `record.KEY` of the row. brief: the record in a few words, for the terminal.
    answer: (record or None, Asked) -> the gate's answer and its words; asked only where the judge ended well, unless
    `own_ending`. order: where it stands among the kinds. default: part of `kbsub eval` without --only. shared: one
    child judges all declared candidates of a run. speaks_of_cuda: a declaration says what the library's CUDA kernels
    give, so that a library call on a CPU can break no promise.
    runs_candidate: the judge's own process executes the candidate, so it is started in the candidate's cell.
    problems: what a record of it holds against a candidate that declares nothing, one "name: reason" each; the first
    are shown, and such a row fails its run. undeclarable: no declaration but that of a control makes them right.
    not_checked: why a record is no verdict (next to nothing was asked), or "".
    as_written: on a GPU it judges the task as it is written, whatever --size says.
    text_on_cpu: on a CPU it only reads texts, those of the task as it is written.
    few_calls: it calls a candidate a dozen times, not hundreds, so that a larger size of the task ends in time.
    own_shapes: a task's declared operator brings shapes of its own to it on a CPU.
    """

    name: str
    judge: str
    record: type[Record]
    brief: Callable[[Any], str]
    answer: Callable[[Any, Asked], tuple[Answer, str]]
    order: int
    columns: tuple[Column, ...] = ()
    note: str = ""  # beside the name, wherever the verdict is shown
    default: bool = True
    shared: bool = False
    own_ending: bool = False
    speaks_of_cuda: bool = False
    runs_candidate: bool = False
    problems: Callable[[Any], list[str]] = lambda record: []
    undeclarable: bool = False
    not_checked: Callable[[Any], str] = lambda record: ""
    as_written: bool = False
    text_on_cpu: bool = False
    few_calls: bool = False
    own_shapes: bool = False
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.record.KEY)


LISTED = 3  # problems spelled out in an answer; the JSON of `kbsub eval` has them all


def listed(problems: list[str]) -> str:
    """The first problems in one line, and how many more there are."""
    more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
    return "; ".join(problems[:LISTED]) + more


def contradictions(found: list[str] | None) -> str:
    """The words for a verdict that contradicts what was declared of its candidate."""
    return f"; contradicts its declaration: {found[0]}" if found else ""
