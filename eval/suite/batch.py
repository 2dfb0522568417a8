"""Runs the stress suite and the oracle over several candidates in one child process, so that the reference and oracle
values of a case are computed once, and loses nothing when a candidate takes the child down.

Every finished row arrives here at once. When the child ends early, the candidate it was running gets the row of that
case, and a new child goes on with what is left. This is the parent's side: no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.suite.records import ended_without, no_verdict, oracle_record, stress_record
from kbsub.eval.tasks.cases import CLASSES, FAIL, Row

TARGET = "kbsub.eval.suite.judge:judge_many"
MAX_CRASHES = 3  # of one candidate (one, when it is a timeout); the rest of its cases are then not run
Progress = Callable[[dict[str, Any]], None]
Runner = Callable[..., Outcome]


@dataclass
class Finished:
    """One candidate's share of a batch. status OK: every case has a row (its class says what became of it).

    NOT_CHECKED: the rows are no verdict (next to nothing was judged, or the reference refuses the task itself).
    """

    stem: str
    status: Status = Status.NOT_RUN
    message: str = ""
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    declaration: Mapping[str, Any] = field(default_factory=dict)

    @property
    def stress(self) -> dict[str, Any]:
        """The `.stress` entry of a result file."""
        return stress_record(self.rows, self.facts, self.declaration)

    @property
    def oracle(self) -> dict[str, Any]:
        """The `.oracle` entry of a result file."""
        return oracle_record(self.rows)


def run_batch(
    candidates: Sequence[Mapping[str, Any]],
    common: Mapping[str, Any],
    *,
    timeout_s: float,
    on_progress: Progress | None = None,
    env: Mapping[str, str] | None = None,
    runner: Runner = run_isolated,
) -> dict[str, Finished]:
    """{stem: Finished} of the stage contract's candidate payloads (or {"baseline": name, "stem": name}).

    common: task, precision, kernelbench, device, and what else `kbsub.eval.suite.judge.judge_many` takes.
    timeout_s: seconds for one child. Nothing a candidate does raises here.
    """
    finished = {
        str(each["stem"]): Finished(str(each["stem"]), declaration=each.get("declaration") or {}) for each in candidates
    }
    crashes: Counter[str] = Counter()
    pending = list(candidates)
    while pending:
        share = _Share(finished, on_progress)
        done = {stem: [row["name"] for row in each.rows] for stem, each in finished.items()}
        outcome = runner(
            TARGET,
            {**common, "candidates": pending, "done": done},
            timeout_s=timeout_s,
            on_progress=share.note,
            env=env,
        )
        stems = [str(each["stem"]) for each in pending]
        if outcome.status is Status.OK and not _well_formed(outcome.value):
            outcome = replace(outcome, status=Status.CRASHED, message="the child sent a result that is none of stress")
        if outcome.status is Status.OK:
            _close(finished, stems, outcome)
            break
        if share.running is None:
            if len(pending) > 1:  # it ended before the first case: which file was it?
                for each in pending:
                    alone = run_batch(
                        [each], common, timeout_s=timeout_s, on_progress=on_progress, env=env, runner=runner
                    )
                    finished.update(alone)
                break
            _drop(finished[stems[0]], outcome, outcome.status)
            break
        culprit, case, seed = share.running
        if all(row["name"] != case for row in finished[culprit].rows):
            finished[culprit].rows.append(_lost(case, seed, outcome))
        crashes[culprit] += 1
        if crashes[culprit] >= MAX_CRASHES or outcome.status is Status.TIMEOUT:
            _drop(finished[culprit], outcome, outcome.status)
            pending = [each for each in pending if str(each["stem"]) != culprit]
    return finished


class _Share:
    """Notes what the child says: the case that runs, the rows that are finished."""

    def __init__(self, finished: dict[str, Finished], on_progress: Progress | None) -> None:
        self.finished, self.on_progress = finished, on_progress
        self.running: tuple[str, str, int] | None = None

    def note(self, event: dict[str, Any]) -> None:
        """Raises one of SHAPE_ERRORS for an event that stress never sends; it ends the child."""
        stem = event.get("candidate")
        if stem in self.finished:
            if event.get("stage") == "case":
                self.running = (str(stem), str(event["case"]), int(event.get("seed", 0)))
            elif event.get("stage") == "row":
                self.finished[str(stem)].rows.append(_checked_row(event["row"]))
        if self.on_progress is not None:
            self.on_progress({key: value for key, value in event.items() if key != "row"})


def _checked_row(row: Any) -> Row:
    """A row as the child sends it; TypeError or ValueError for what is none."""
    if not isinstance(row, dict) or not isinstance(row.get("name"), str):
        raise TypeError("a row without a name")
    if row.get("class") not in CLASSES:
        raise ValueError("a row without a class")
    if not isinstance(row.get("oracle", {}), dict) or not isinstance(row.get("reason", ""), str):
        raise TypeError("a row whose oracle or reason has the wrong type")
    return row


def _well_formed(value: Mapping[str, Any] | None) -> bool:
    """Whether a result is what `judge_many` returns: {facts, failed}, and the keys of facts known."""
    if value is None:
        return False
    failed = value.get("failed", {})
    facts_are = isinstance(value.get("facts", {}), dict)
    return facts_are and isinstance(failed, dict) and all(isinstance(words, str) for words in failed.values())


def _close(finished: dict[str, Finished], stems: Sequence[str], outcome: Outcome) -> None:
    value = outcome.value or {}
    for stem in stems:
        entry = finished[stem]
        entry.facts = {**value.get("facts", {}), **value.get("confined", {}).get(stem, {})}
        entry.log = outcome.log
        if stem in value.get("failed", {}):
            entry.status = Status(value.get("statuses", {}).get(stem, Status.COMPILE_ERROR))
            entry.message = value["failed"][stem]
        else:
            why = no_verdict("stress", entry.rows) if entry.rows else ""
            entry.status, entry.message = (ended_without(why), why) if why else (Status.OK, "")


def _drop(entry: Finished, outcome: Outcome, status: Status) -> None:
    entry.status, entry.message, entry.log = status, outcome.message, outcome.log


def _lost(case: str, seed: int, outcome: Outcome) -> Row:
    return {
        "name": case,
        "class": FAIL,
        "reason": f"{outcome.status}: {outcome.message}",
        "equal_nan": True,
        "seed": seed,
    }
