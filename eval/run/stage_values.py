"""Checks what a stage's child process sent before it becomes a part of a row: keys and types, never what is true.

A candidate shares the child's memory, so the dict of a stage may hold anything that JSON can. What passes here can be
stored, shown and judged by the gate without an exception. Must not know how a stage comes to its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kbsub.adapters.candidate import asks_for_a_gpu
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.process.result_frames import SHAPE_ERRORS
from kbsub.eval.results.model import Baseline, Candidate, Result
from kbsub.eval.results.record import Environment
from kbsub.eval.results.timing import Timing
from kbsub.eval.verdicts.kind import VerdictKind
from kbsub.eval.verdicts.register import OFFICIAL

Times = dict[str, dict[str, Any]]  # method -> a timing block


class _Verdict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    status: str
    reason: str | None


class _Run(BaseModel):
    """Upstream's object in our words; runtimes in ms, -1 where upstream timed nothing."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    compiled: bool | None
    correctness: bool | None
    trials: str | None
    metadata: dict[str, Any]
    runtime: float | None = None
    ref_runtime: float | None = None


class _Check(BaseModel):
    """The local check on a CPU."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    correctness: bool
    trials: str
    compiled: bool | None = None


class _Floors(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)

    memory_ms: float | None = None
    copy_gb_s: float | None = None


class _Official(BaseModel):
    """All that the official stage may put into a row."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    verdict: _Verdict | None = None
    official: _Run | None = None
    cpu_check: _Check | None = None
    timing: Times | None = None
    reference: Times | None = None
    floors: _Floors | None = None
    environment: dict[str, Any] = Field(default_factory=dict)


def stage_problem(fields: Mapping[str, Any], stage: VerdictKind, found: Mapping[str, Any]) -> str | None:
    """What is malformed in `found`, a stage's dict, for the row `fields`; None when nothing is."""
    if not found:
        return None
    try:
        if stage.name == OFFICIAL:
            _check_official(found)
        else:
            Candidate.model_validate({**fields, stage.key: {k: v for k, v in found.items() if k != "environment"}})
        if stage.name != OFFICIAL:
            stage.brief(stage.record.model_validate(found))
    except ValidationError as error:
        return ".".join(map(str, error.errors()[0]["loc"])) or "its form"
    except SHAPE_ERRORS as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def is_environment(block: Any) -> bool:
    """Whether the machine's facts, as a child sent them, can go into a result file."""
    try:
        Environment.model_validate({"project_commit": None, **block})
    except SHAPE_ERRORS:  # pydantic's ValidationError is a ValueError
        return False
    return True


def keep_reference(key: str, reference: Mapping[str, Any] | None, result: Result) -> None:
    """The eager time of the first official run, unless `kbsub bench` has measured it side by side with others."""
    timing = {method: Timing.model_validate(block) for method, block in (reference or {}).items()}
    if timing:
        known = result.baselines.get(key, Baseline())
        result.baselines[key] = known.model_copy(update={"timing": {**timing, **known.timing}})


def _check_official(found: Mapping[str, Any]) -> None:
    answer = _Official.model_validate(found)
    if answer.verdict is not None:
        Status(answer.verdict.status)
    for times in (answer.timing or {}, answer.reference or {}):
        for block in times.values():
            Timing.model_validate(block)
            if not isinstance(block.get("mean_ms", 0.0), (int, float)):
                raise TypeError("mean_ms is no number")


def without_a_gpu(fields: Mapping[str, Any], stage: VerdictKind, outcome: Outcome) -> Outcome:
    """How a stage ended on a CPU: what asks for a GPU was not run. A file that was wrong before it asked stays so."""
    if outcome.status in (Status.OK, Status.NOT_RUN) or not asks_for_a_gpu(outcome.message):
        return outcome
    found = outcome.value
    if found and stage.name != OFFICIAL and stage_problem(fields, stage, dict(found)) is None:
        if stage.problems(stage.record.model_validate(found)):
            return outcome
    words = f"needs an NVIDIA GPU ({outcome.message[:200]})"
    return Outcome(Status.NOT_RUN, None, words, outcome.log, outcome.seconds)
