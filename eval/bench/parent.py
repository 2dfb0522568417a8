"""The parent of a benchmark: starts the child, starts it again without a program that killed it, keeps what it sent.

Owns the result file: after every method of every scene the rows are joined into it, atomically. Imports no torch.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from kbsub.eval.bench.plan import BenchPlan, SceneSpec
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.record import Environment
from kbsub.eval.results.timing import Timing
from kbsub.eval.tasks.cell import cell_of

TARGET = "kbsub.eval.bench.child:run"
GRACE_S = 45.0  # over the budget, before a child counts as hung: compiling cannot be interrupted half-way
LEAST_S = 20.0  # a restarted child gets at least this
ENDINGS_OF_THE_CHILD = (Status.CRASHED, Status.TIMEOUT, Status.OUT_OF_MEMORY, Status.RUNTIME_ERROR)

Isolate = Callable[..., Outcome]


@dataclass
class BenchRecord:
    """What one run found out. `scenes`: the child's last event of each scene, by scene id."""

    run: str
    plan: BenchPlan
    scenes: dict[str, dict[str, Any]] = field(default_factory=dict)
    dropped: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)  # scene id -> name -> row
    skipped: dict[str, str] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    environment: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    confined: dict[str, Any] | None = None  # what the newest child was confined by, before its code began
    failure: str | None = None  # why the run as a whole ended early

    def rows(self, scene: SceneSpec) -> dict[str, dict[str, Any]]:
        """Every program of a scene with status, timing or reason; drops of the child and of the parent included."""
        found = dict(self.scenes.get(scene.id, {}).get("rows", {}))
        found.update(self.dropped.get(scene.id, {}))
        for stem, reason in scene.not_run.items():
            found[stem] = {"status": Status.NOT_RUN.value, "reason": reason}
        missing = self.skipped.get(scene.id) or self.failure or "the run ended before it"
        for name in (*scene.candidates, *scene.baselines):
            found.setdefault(name, {"status": Status.NOT_RUN.value, "reason": missing, "missing": True})
        return found


def run_id() -> str:
    """The name of one run: when it started, to the microsecond. Samples are paired within a run only."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def run_bench(
    plan: BenchPlan,
    *,
    on_event: Callable[[dict[str, Any]], None] | None = None,
    on_record: Callable[[BenchRecord], None] | None = None,
    isolate: Isolate = run_isolated,
) -> BenchRecord:
    """Run the plan to its end, whatever single programs do; `on_record` is called whenever there is more to keep.

    All programs share a cell, whose cache no other set of candidates uses.
    A program during which the child died gets the child's status in that scene, and the scene is measured again
    without it; a program that killed the child twice is left out everywhere.
    """
    record = BenchRecord(run_id(), plan)
    started = time.monotonic()
    deaths: dict[str, int] = {}
    last: dict[str, Any] = {}

    def hear(event: dict[str, Any]) -> None:
        if event.get("bench", {}).get("kind") != "dropped":  # said while that program is still the one at work
            last.clear()
            last.update(event)
        if on_event is not None:
            on_event(event)
        if "bench" in event:
            _keep(record, _checked(event["bench"]))
            if on_record is not None and event["bench"]["kind"] in ("scene", "floors"):
                on_record(record)

    def entered(confined: dict[str, Any]) -> None:
        record.confined = confined

    cell = cell_of([each.sha256 for each in plan.candidates.values()], plan.task, plan.kernelbench)
    while True:
        payload = _payload(record, deaths, time.monotonic() - started)
        if not payload["scenes"]:
            break
        last.clear()
        limit = payload["budget_s"] + GRACE_S
        outcome = isolate(TARGET, payload, timeout_s=limit, on_progress=hear, cell=cell, on_entered=entered)
        if outcome.status is Status.OK:
            break
        culprit, scene = last.get("program"), last.get("scene")
        if not isinstance(culprit, str) or outcome.status not in ENDINGS_OF_THE_CHILD:
            record.failure = f"{outcome.status}: {outcome.message}"
            record.notes.append(f"{record.failure}\n{outcome.log[-2000:]}")
            break
        deaths[culprit] = deaths.get(culprit, 0) + 1
        row = {"status": outcome.status.value, "reason": outcome.message}
        record.dropped.setdefault(str(scene), {}).setdefault(culprit, row)
        record.notes.append(f"{culprit} ended the process in {scene}: {outcome.message}; the others go on without it")
    if on_record is not None:
        on_record(record)
    return record


def _checked(event: Any) -> dict[str, Any]:
    """A child's event with what `_keep`, the tables and the printing read in it; TypeError or KeyError without.

    The frames that carry it are checked already (process/result_frames.py); an exception here ends the child alone.
    """
    kind = event["kind"]
    if kind == "scene":
        for name, row in event["rows"].items():
            Status(row["status"])
            for block in (row.get("timing") or {}).values():
                Timing.model_validate(block)
            if not isinstance(row.get("reason", ""), (str, type(None))):
                raise TypeError(f"the reason of {name} is no text")
        bool(event["finished"])
    if kind in ("scene", "dropped", "skipped") and not isinstance(event["scene"], str):
        raise TypeError("a scene without a name")
    if kind == "dropped":
        Status(event["status"])
    for key in {"dropped": ("name", "reason"), "skipped": ("reason",), "note": ("text",)}.get(kind, ()):
        if not isinstance(event[key], str):
            raise TypeError(f"{key} is no text")
    if kind == "environment":
        Environment.model_validate({"project_commit": None, **event["environment"]})
    if kind == "floors" and not all(isinstance(value, (int, float)) for value in event["floors"].values()):
        raise TypeError("a floor that is no number")
    return event  # type: ignore[no-any-return]


def _keep(record: BenchRecord, event: dict[str, Any]) -> None:
    kind = event["kind"]
    if kind == "scene":
        record.scenes[event["scene"]] = event
    elif kind == "dropped":
        row = {"status": event["status"], "reason": event["reason"]}
        record.dropped.setdefault(event["scene"], {})[event["name"]] = row
    elif kind == "skipped":
        record.skipped[event["scene"]] = event["reason"]
    elif kind == "floors":
        record.floors.update(event["floors"])
    elif kind == "environment":
        record.environment = event["environment"]
    elif kind == "note":
        record.notes.append(event["text"])


def _payload(record: BenchRecord, deaths: dict[str, int], used_s: float) -> dict[str, Any]:
    """What is left to do for a (new) child: unfinished scenes without the programs that are out."""
    plan = record.plan
    scenes = []
    for scene in plan.scenes:
        if record.scenes.get(scene.id, {}).get("finished"):
            continue
        out = {name for name in record.dropped.get(scene.id, {}) if name in (*scene.candidates, *scene.baselines)}
        out |= {name for name, count in deaths.items() if count > 1}
        for name in out - set(record.dropped.get(scene.id, {})):
            reason = "it ended the process twice before this scene"
            record.dropped.setdefault(scene.id, {})[name] = {"status": Status.NOT_RUN.value, "reason": reason}
        spec: dict[str, Any] = {
            "key": scene.key,
            "precision": scene.precision,
            "shape": scene.shape,
            "rounds": scene.rounds,
        }
        spec["candidates"] = [name for name in scene.candidates if name not in out]
        spec["baselines"] = [name for name in scene.baselines if name not in out]
        if spec["candidates"] or spec["baselines"]:
            scenes.append(spec)
    floors = None
    if plan.floors and "copy_gb_s" not in record.floors:
        floors = {"chain": plan.chain.model_dump() if plan.chain is not None else None}
    return {
        "task": plan.task,
        "kernelbench": plan.kernelbench,
        "device": plan.device,
        "methods": plan.methods,
        "protocol": asdict(plan.protocol),
        "budget_s": max(plan.budget_s - used_s, LEAST_S),
        "floors": floors,
        "sources": {stem: candidate.source for stem, candidate in plan.candidates.items()},
        "other_functions": [stem for stem, candidate in plan.candidates.items() if not candidate.same_function],
        "scenes": scenes,
    }
