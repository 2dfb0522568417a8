"""The referee's verdict as a record, its words and its gate answer. No torch, no judge."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from kbsub.eval.results.record import Record
from kbsub.eval.tasks.cases import PARAMETERS_NOT_SET
from kbsub.eval.verdicts.kind import Answer, Asked, Column, VerdictKind, listed

AGREES_WITHIN = 0.05  # upstream's time and the referee's, as a share of the referee's
# Upstream lets a written output wait in L2 and times one call alone; that explains a half, never more.
DECEIVED_BELOW = 0.5
WIDE = 1.05  # an interval that reaches farther above the time says nothing of it


class RefereeFloor(Record):
    """Times (ms) of a call's `bytes` at the device's peak and at the copy measured here; GB/s.

    one_call_peak_ms: of one call alone, as upstream times it, all of L2 left out.
    """

    bytes: int
    copy_gb_s: float
    copy_ms: float
    peak_gb_s: float | None = None
    peak_ms: float | None = None
    one_call_peak_ms: float | None = None


class Referee(Record):
    """`wrong` of `outputs` that were compared, and the time of a call by a clock outside: ms in [low, high].

    by: "slope" between batches of calls[0] and calls[1], or "batch": what a batch of calls[1] takes for each, where its
    cost by itself (intercept_ms) is not that of a null candidate. problems: what was found, beyond wrong outputs too.
    spread: the largest difference between two answers of the reference's own to one input.
    """

    KEY: ClassVar[str] = "referee"

    outputs: int
    wrong: int
    problems: list[str]
    device: str
    confined: dict[str, Any] | None = None
    precision: str
    tolerance: float
    ms: float | None = None
    low: float | None = None
    high: float | None = None
    by: str | None = None
    calls: list[int] | None = None
    rounds: int | None = None
    slope_ms: float | None = None
    few_ms: float | None = None
    many_ms: float | None = None
    intercept_ms: float | None = None
    null_intercept_ms: float | None = None
    warm_ms: float | None = None
    late_samples: int | None = None  # batches whose answers could not be looked at before another word
    # ms by which the answers of a batch of few and of many could be looked at later than the null candidate's (medians)
    late_ms: tuple[float, float] | None = None
    held: bool | None = None  # the candidate's processes stood still whenever contents were drawn
    spread: float | None = None
    tells_apart: bool | None = None  # the predicate refuses the answer to one draw for another
    contents: str | None = None
    floor: RefereeFloor | None = None
    samples_ms: dict[str, list[float]] | None = None
    seconds: float | None = None  # from the end of the trials to the record
    device_bytes: int | None = None  # taken on the GPU, by whomever, while the answers of a large batch are alive
    parameters_changed: bool | None = None  # False: the reference has some, and the candidate's could not be set
    notes: list[str] | None = None
    official: bool | None = None

    @property
    def good(self) -> bool:
        return self.outputs > 0 and not self.wrong and not self.problems

    def flags(self, upstream_ms: float | None) -> list[str]:
        """What must be said of the two times, none of which is a failure by itself."""
        found = []
        if self.by == "batch":
            found.append("a share of whole batches: they do not cost by themselves what a null candidate's do")
        if self.held is False:
            found.append("its processes did not stand still while contents were drawn")
        if self.ms is not None and self.floor is not None and self.ms < self.floor.copy_ms:
            found.append(f"under the copy floor ({self.floor.copy_ms:.4f} ms)")
        if (ratio := self.ratio(upstream_ms)) is not None and abs(ratio - 1) > AGREES_WITHIN:
            found.append(f"upstream's time is {ratio:.2f} of it")
        return found

    def ratio(self, upstream_ms: float | None) -> float | None:
        """Upstream's time over the referee's."""
        return upstream_ms / self.ms if upstream_ms and self.ms else None

    def under_the_floor(self, upstream_ms: float | None) -> list[str]:
        """The times that no program can have, in words."""
        if self.floor is None or self.floor.peak_ms is None or self.floor.peak_gb_s is None:
            return []
        at = f"{self.floor.bytes} bytes at the device's peak of {self.floor.peak_gb_s:.0f} GB/s"
        found = []
        if self._at_most() < self.floor.peak_ms:
            found.append(f"below the floor: {self.ms:.4f} ms, {at} take {self.floor.peak_ms:.4f} ms")
        alone = self.floor.one_call_peak_ms
        if upstream_ms is not None and alone is not None and upstream_ms < alone:
            found.append(f"below the floor: upstream's {upstream_ms:.4g} ms, {at} take {alone:.4f} ms")
        return found

    def _at_most(self) -> float:
        """The upper end of the interval, but no wide one's: who sleeps in some batches makes it as wide as he likes."""
        ends = [math.inf if self.high is None else self.high, math.inf if self.ms is None else self.ms * WIDE]
        return min(ends)

    def deceives(self, upstream_ms: float | None) -> str | None:
        """The words for an upstream time that the call does not have; None."""
        fastest = min((each for each in (self.low, self.warm_ms) if each is not None), default=None)
        if upstream_ms is None or fastest is None or upstream_ms >= DECEIVED_BELOW * fastest:
            return None
        return f"upstream's clock was deceived: it read {upstream_ms:.4g} ms, a clock outside reads {self.ms:.4f} ms"


def upstream_ms(fields: Mapping[str, Any]) -> float | None:
    """Upstream's own mean (ms) of a row's fields, where it called the candidate correct."""
    said = fields.get("official") or {}
    found = said.get("runtime") if isinstance(said, Mapping) and said.get("correctness") else None
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) and found > 0 else None


def time_words(found: Referee) -> str:
    if found.ms is None or found.low is None or found.high is None:
        return "no time"
    return f"{found.ms:.4f} ms ({found.low:.4f} to {found.high:.4f})"


def answer(found: Referee | None, asked: Asked) -> tuple[Answer, str]:
    if found is None or found.outputs == 0:
        return Answer.UNCERTIFIED, "no output was compared"
    theirs = upstream_ms(asked.fields)
    words = f"{found.outputs - found.wrong}/{found.outputs} outputs right, {time_words(found)}"
    if not found.good:
        words = f"{listed(found.problems) or 'wrong outputs'} ({words})"
        return (Answer.PASS if asked.expect.get("official") == "fail" else Answer.FAIL), words
    impossible = found.under_the_floor(theirs)
    if deceived := found.deceives(theirs):
        impossible.append(deceived)
    if impossible:
        return Answer.FAIL, f"{listed(impossible)} ({words})"
    words = "; ".join([words, *found.flags(theirs)])
    if found.tells_apart is False:
        return Answer.UNCERTIFIED, f"the predicate takes the answer to one input for that to another ({words})"
    if found.parameters_changed is False:
        return Answer.UNCERTIFIED, f"{PARAMETERS_NOT_SET}, so that whether they are used is not known ({words})"
    if not found.device.startswith("cuda"):
        return Answer.UNCERTIFIED, f"the time of a GPU is promised; on a {found.device}: {words}"
    if found.ms is None or found.held is False:
        return Answer.UNCERTIFIED, words
    return Answer.PASS, words


def problems(found: Referee) -> list[str]:
    words = f"{found.wrong} of {found.outputs} outputs wrong: " if found.wrong else ""
    return [] if found.good or not found.outputs else [words + (listed(found.problems) or "no reason given")]


def brief(found: Referee) -> str:
    if not found.good:
        return f"{found.wrong} of {found.outputs} outputs wrong" if found.wrong else listed(found.problems)
    return f"{found.outputs} outputs right, {time_words(found)}"


def cell(found: Referee) -> str:
    if not found.good:
        return f"{found.wrong} wrong" if found.wrong else "refused"
    return "-" if found.ms is None else f"{found.ms:.4f}"


KIND = VerdictKind(
    name="referee",
    judge="kbsub.eval.verdicts.referee.judge:judge",
    record=Referee,
    brief=brief,
    answer=answer,
    order=5,
    few_calls=True,
    columns=(Column("referee ms", cell),),
    problems=problems,
    undeclarable=True,
    default=False,
)
