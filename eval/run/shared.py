"""The stress and oracle stages of one run: one child process for all declared candidates, so that the reference and
the float64 answer of a case are computed once.

Only this repository's own declared candidates share a child. A file of somebody else's gets one of its own, whatever
lies beside it or is vouched for: it must not be able to touch what its neighbours are judged with. No torch here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.suite.batch import Finished, run_batch
from kbsub.eval.suite.records import ended_without, no_verdict

SHARES = "shares_a_child"  # the payload key of a candidate that may be run beside others
_OWN = (
    "stem",
    "candidate",
    "candidate_source",
    "declaration",
    SHARES,
)  # of a stage payload: what is not common to the run


@dataclass
class SharedStages:
    """`neighbours()`: the stage payloads of every candidate of the run that may share a child and run here.

    stages: those of the run; with "oracle" alone only the cases of the error table are run. timeout_s: a candidate.
    """

    neighbours: Callable[[], Sequence[Mapping[str, Any]]]
    stages: Sequence[str]
    timeout_s: float
    env: Mapping[str, str]
    found: dict[str, Finished] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # what each of `found` was computed from

    def outcome(self, stage: str, payload: Mapping[str, Any], on_progress: Callable[[dict[str, Any]], None]) -> Outcome:
        """The stage of one candidate; the first call of one that shares a child runs all of those.

        A candidate whose file was edited since is run again, alone: its row holds verdicts on one version only.
        """
        started = time.monotonic()
        stem = str(payload["stem"])
        if stem not in self.found or self.sources[stem] != payload["candidate_source"]:
            batch = [payload]
            if payload.get(SHARES) and stem not in self.found:
                others = [each for each in self.neighbours() if each["stem"] not in (stem, *self.found)]
                batch += [each for each in others if each.get("size") == payload.get("size")]
            common = {key: value for key, value in payload.items() if key not in _OWN}
            common["oracle_only"] = "stress" not in self.stages
            self.found |= run_batch(
                [{key: each[key] for key in _OWN if key in each} for each in batch],
                common,
                timeout_s=self.timeout_s * len(batch),
                on_progress=on_progress,
                env=self.env,
            )
            self.sources |= {str(each["stem"]): str(each["candidate_source"]) for each in batch}
        return as_outcome(self.found[stem], stage, time.monotonic() - started)


def as_outcome(found: Finished, stage: str, seconds: float) -> Outcome:
    """One stage of a finished candidate: what there is of it is kept, however the run ended."""
    value = (found.stress if stage == "stress" else found.oracle) if found.rows else None
    status, message = found.status, found.message
    if status is Status.OK and value is None:
        status, message = Status.NOT_CHECKED, "no case was run"
    elif status is Status.OK and (why := no_verdict(stage, found.rows)):
        status, message = ended_without(why), why
    log = found.log if found.status is not Status.OK or status is not Status.OK else ""
    return Outcome(status, value, message, log, seconds, found.facts.get("confined"))
