"""The referee: correctness and time by a process that owns everything but the candidate's calls.

`judge` runs in a child process with the payload of `kbsub eval` and executes no line of the candidate, which lives in a
worker in its own cell. Every call gets contents of its own, drawn anew for every batch, in a secret order, changed once
more just before the clock starts; the clock is here; every answer is sampled when the candidate says "done" and then
compared with the reference by upstream's predicate. Nothing here is an official verdict.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import hashlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kbsub.adapters.candidate import cuda_source_of
from kbsub.adapters.refusal import modules_of, reference_asked
from kbsub.adapters.task import CORRECTNESS_TRIALS, SEED, Modules, Task, task_from_payload
from kbsub.eval.operators.compare.predicate import OFFICIAL_TOLERANCE
from kbsub.eval.process.isolated import JudgeFailure, Status, is_out_of_memory
from kbsub.eval.remote.model import RemoteError, Worker
from kbsub.eval.remote.ring import CallRing, tensors_of
from kbsub.eval.tasks.cases import PARAMETERS_NOT_SET
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.tasks.task_file import read_task_file, task_file
from kbsub.eval.verdicts.referee import floors
from kbsub.eval.verdicts.referee.contents import Contents
from kbsub.eval.verdicts.referee.null import Null
from kbsub.eval.verdicts.referee.numbers import estimate, null_of
from kbsub.eval.verdicts.referee.plan import BatchPlan, ladder, plan_of, quick
from kbsub.eval.verdicts.referee.rounds import Match, of_itself

Progress = Callable[[dict[str, Any]], None]
SOME_CALLS, SLOW_CALL_S = 4, 0.5  # to find out what a call costs, comparison included
SHARE_OF_TIME = 0.9  # of the judge's own limit, for the candidate
WARM_UPS = 3  # upstream's, before it times
NULLS = 3  # batches of the null candidate beside each of the candidate's: cheap, and its noise is not to count
PARAMETERS_CHANGE = 2  # rounds before the least there are: until then they are those of the constructor, as upstream's
ENOUGH_WRONG = 2  # batches with wrong answers; more would only repeat it
WAIT_POLICY = "OMP_WAIT_POLICY"
OFFICIAL_JUDGE = "kbsub.eval.verdicts.official.judge"


class _Unasked(Exception):
    """The reference has no answer to compare with; the message says why."""


def judge(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The `referee` part of a result.

    Optional payload keys: "referee_rounds" (how many), "referee_replay" (graph replays beside, of honest files),
    "referee_turn" (a file: judges that share it take their times one after the other). Raises JudgeFailure, with what
    was found until then: NOT_RUN where the reference has no answer to compare with or the device holds no two calls;
    else as the candidate's process ends.
    """
    task = task_from_payload(payload)
    device = _device(payload)
    modules = modules_of(task)
    small = {} if device.type == "cuda" or payload.get("full") else _shrink(task, modules)
    limit = SHARE_OF_TIME * float(payload.get("timeout_s") or 300.0)
    like = _like_upstream(payload)
    source = payload["candidate_source"]
    checkout = Path(payload["kernelbench"]) if payload.get("kernelbench") else None
    digest = hashlib.sha256(source.encode()).hexdigest()
    # How threads wait is told to the official verdict's process too.
    variables = {name: os.environ[name] for name in (WAIT_POLICY,) if name in os.environ}
    cell = replace(cell_of([digest], str(payload["task"]), checkout), variables=variables)
    progress({"stage": "start"})
    # Both processes import torch while the reference is made ready here; no candidate is loaded before.
    null = Null(device, limit, like)
    try:
        with Worker.spawn(source, task, cell=cell, device=device, timeout_s=limit, like=like) as worker:
            with _turn(payload.get("referee_turn")):  # all that the device is asked for, but no import
                with reference_asked(_Unasked):
                    scene = _Scene(task, modules, device)
                null.load(scene.room)
                progress({"stage": "loading"})
                worker.load()
                found = _Run(scene, worker, null, progress, payload).finished()
            return {**found, "notes": [*found.get("notes", []), f"at the small size {small}"]} if small else found
    except _Unasked as why:
        raise JudgeFailure(Status.NOT_RUN, str(why)) from why
    except RemoteError as error:
        raise JudgeFailure(error.status, error.message) from error
    finally:
        null.close()


def _device(payload: dict[str, Any]) -> torch.device:
    device = torch.device(payload["device"])
    if device.type == "cpu":
        if needs := cuda_source_of(payload["candidate_source"]):
            raise JudgeFailure(Status.NOT_RUN, f"{needs}: its time is a GPU's; run this where there is an NVIDIA GPU")
        return device
    if not torch.cuda.is_available():
        raise JudgeFailure(Status.NOT_RUN, "torch sees no GPU; on a machine without one use --device cpu")
    torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
    return torch.device("cuda", torch.cuda.current_device())


def _shrink(task: Task, modules: Modules) -> dict[str, int]:
    """Lower the sizes that the task's own functions read, as the task says for a CPU; {} where it says nothing."""
    said = read_task_file(task.folder) if task.folder is not None else task_file(task.slug)
    small = said.sizes.small or {}
    if not all(name in modules.context for name in small):
        return {}
    modules.context.update(small)
    return dict(small)


def _like_upstream(payload: dict[str, Any]) -> dict[str, Any]:
    """What a candidate's process is made to look like: that of the official verdict."""
    return {"modules": [OFFICIAL_JUDGE], "kernelbench": payload.get("kernelbench")}


class _Scene:
    """The reference, its inputs and answers, and how many calls there is room for. It raises what the task raises."""

    def __init__(self, task: Task, modules: Modules, device: torch.device) -> None:
        self.task, self.device = task, device
        self.tolerance = OFFICIAL_TOLERANCE[task.dtype]
        torch.manual_seed(SEED)
        self.init_inputs = task.cast(list(modules.get_init_inputs()), device)
        torch.manual_seed(SEED)
        with torch.no_grad():
            self.reference = modules.Model(*self.init_inputs).to(device=device, dtype=task.dtype)
        self.contents = Contents(task, modules, device)
        inputs = tensors_of(self.contents.template)
        input_bytes = sum(each.numel() * each.element_size() for each in inputs)
        if plan_of(device, input_bytes, 1) < 2:
            raise _Unasked(f"two calls on {input_bytes / 1e9:.1f} GB of inputs each do not fit here")
        why, self.spread, self.tells_apart = of_itself(self.reference, self.contents, self.tolerance)
        if why is not None:
            raise _Unasked(f"two answers of the reference to one input are not within the tolerance: {why}")
        if not self.tells_apart:
            self.contents.scaled = True
            _, _, self.tells_apart = of_itself(self.reference, self.contents, self.tolerance)
        arguments = self.contents.draw(1)
        with torch.no_grad():
            answer = copy.deepcopy(self.reference)(*arguments)
        self.answer_bytes = [each.numel() * each.element_size() for each in tensors_of(answer)]
        if not self.answer_bytes:
            raise _Unasked("the reference returns no tensor")
        self.needed = floors.needed_bytes(inputs, self.reference, answer)
        self.call_bytes = sum(self.answer_bytes) + input_bytes
        self.room = plan_of(device, self.call_bytes, len(self.answer_bytes) + len(inputs))
        if self.room < 2:
            raise _Unasked(f"two calls of {self.call_bytes / 1e9:.1f} GB each do not fit beside the reference")
        self.l2 = floors.l2_bytes(device)


class _Run:
    """One candidate's rounds, and their record."""

    def __init__(self, scene: _Scene, worker: Worker, null: Null, progress: Progress, payload: dict[str, Any]) -> None:
        self.scene, self.worker, self.null, self.progress = scene, worker, null, progress
        self.notes: list[str] = []
        self.record: dict[str, Any] = {}
        self.samples: dict[str, list[float]] = {"few": [], "many": [], "null_few": [], "null_many": []}
        self.looks: dict[str, list[float]] = {name: [] for name in self.samples}
        self.rounds = int(payload.get("referee_rounds") or 0)
        self.match: Match | None = None
        self.replay = bool(payload.get("referee_replay"))
        self.started = time.monotonic()
        self.ends_at = self.started + worker.timeout_s

    def _announce(self, event: dict[str, Any]) -> None:
        """Say where it is, and leave the next request no more time than there is."""
        self.progress(event)
        self.worker.timeout_s = max(1.0, self.ends_at - time.monotonic())

    def finished(self) -> dict[str, Any]:
        """The record; JudgeFailure with what there is of it where the candidate's process, or memory, ends early."""
        at = "construction"
        try:
            model = self.worker.construct(self.scene.init_inputs)
            at = "state"
            self.match = match = Match(self.scene.reference, model, self.scene.contents, self.scene.l2)
            at = "trials"
            self._trials(match)
            at = "rounds"
            self.started = time.monotonic()
            match.ring = CallRing(model, self.scene.contents.template, self.scene.room, self.scene.answer_bytes)
            plan = self._primed(match)
            self._rounds(match, plan)
            at = "state after the calls"
            self._state(match)
            self._times(match, plan)
        except RemoteError as error:
            raise JudgeFailure(error.status, f"{at}: {error.message}", self._found()) from error
        except JudgeFailure:
            raise
        except Exception as error:
            status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.RUNTIME_ERROR
            raise JudgeFailure(status, f"{at}: {type(error).__name__}: {error}", self._found()) from error
        finally:
            if self.match is not None and self.match.ring is not None:
                self.match.ring.close()
        return self._found()

    def _trials(self, match: Match) -> None:
        """As upstream: trials without gradients, then warm-ups with them."""
        for index in range(CORRECTNESS_TRIALS):
            self._announce({"stage": "trial", "index": index + 1, "of": CORRECTNESS_TRIALS})
            match.trial(grad=False)
        for _ in range(WARM_UPS):
            match.trial(grad=True)

    def _primed(self, match: Match) -> BatchPlan:
        """How many calls and rounds, from a batch of each size; these also show where answers will lie."""

        def timed(calls: int) -> tuple[float, float]:
            """(ms of the batch by its clock, seconds of everything about it)"""
            began = time.monotonic()
            return match.batch(calls), time.monotonic() - began

        _, call_s = timed(1)
        batch_s, some = 0.0, min(SOME_CALLS, self.scene.room)
        if call_s < SLOW_CALL_S and some > 1:  # the first is slower than the others; what a batch costs is told apart
            batch_s = timed(1)[1]
            timed(some)
            call_s = max(0.0, timed(some)[1] - batch_s) / (some - 1)
            batch_s = max(0.0, batch_s - call_s)
        plan = ladder(self.scene.device, self.scene.room, call_s, batch_s)
        match.slots = plan.many
        seconds = [timed(calls) for calls in (plan.many, plan.few, plan.many)]
        call_ms = (seconds[2][0] - seconds[1][0]) / (plan.many - plan.few)
        plan = quick(plan, self.scene.device, self.scene.room, call_ms, seconds[2][1] / plan.many)
        if plan.many > match.slots:
            match.slots = plan.many
            match.batch(plan.many)
        self.null.match(call_ms)
        for _ in range(2):
            for calls in (plan.few, plan.many):
                self.null.run(calls)
        if self.scene.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.scene.device)
            self.record["device_bytes"] = total - free
        return plan

    def _rounds(self, match: Match, plan: BatchPlan) -> None:
        assert match.ring is not None
        wanted = self.rounds or plan.rounds
        started = time.monotonic()
        for index in range(wanted):
            if index >= plan.least and time.monotonic() - started > plan.seconds:
                break
            if match.tally.spoiled_batches >= ENOUGH_WRONG:
                break
            self._announce({"stage": "round", "index": index + 1, "of": wanted})
            if index == plan.least - PARAMETERS_CHANGE:
                self._change(match)
            sizes = [("few", plan.few), ("many", plan.many)]
            random.SystemRandom().shuffle(sizes)
            for name, calls in sizes:
                took, looked = match.batch(calls), match.looked_ms
                with match.ring.held():  # what would delay the null candidate could sleep as long in small batches
                    for _ in range(NULLS):
                        self.samples[f"null_{name}"].append(self.null.run(calls, match.flush))
                        self.looks[f"null_{name}"].append(self.null.looked_ms)
                self.samples[name].append(took)
                self.looks[name].append(looked)
            if self.replay:
                self.samples.setdefault("replay", []).append(match.ring.replayed_ms())

    def _change(self, match: Match) -> None:
        """New parameters, after the state that calls left was looked at."""
        self._state(match)
        changed = match.change_parameters()
        if changed is not None:
            self.record["parameters_changed"] = changed
        if changed is False:
            self.notes.append(f"{PARAMETERS_NOT_SET}: neither names, order nor shapes are those of the reference")

    def _state(self, match: Match) -> None:
        if problem := match.state_problem():
            match.tally.note(problem)

    def _times(self, match: Match, plan: BatchPlan) -> None:
        few, many = self.samples["few"], self.samples["many"]
        if len(few) < plan.least:
            return
        calls = (plan.few, plan.many)
        null = null_of((self.samples["null_few"], self.samples["null_many"]), self.null.before_ms, calls)
        looks = {name: statistics.median(each) for name, each in self.looks.items()}
        late = (looks["few"] - looks["null_few"], looks["many"] - looks["null_many"])
        found = estimate(few, many, calls, null, late)
        self.record |= {**vars(found), "calls": list(calls), "rounds": len(few), "late_ms": list(late)}
        if self.scene.device.type == "cuda":
            self.record["floor"] = floors.floors(self.scene.device, self.scene.needed, plan.many)
            self._warm(match)

    def _warm(self, match: Match) -> None:
        """The time with inputs that may still lie in L2, for problems of which several calls fit there."""
        few, many = 8, 24
        if self.scene.room < many or 2 * many * self.scene.call_bytes > self.scene.l2:
            return
        samples = [(match.batch(few, warm=True), match.batch(many, warm=True)) for _ in range(5)]
        times = [sorted(each)[2] for each in zip(*samples, strict=True)]
        # Who sleeps in small batches makes the slope small, not what is left of a large one without a batch's own cost.
        share = (times[1] - float(self.record["null_intercept_ms"])) / many
        self.record["warm_ms"] = max(0.0, (times[1] - times[0]) / (many - few), share) or None

    def _found(self) -> dict[str, Any]:
        tally = self.match.tally if self.match is not None else None
        floor = self.record.get("floor")
        record = {key: value for key, value in self.record.items() if key != "floor"}
        return {
            "outputs": tally.outputs if tally else 0,
            "wrong": tally.wrong if tally else 0,
            "problems": list(tally.problems) if tally else [],
            "device": self.scene.device.type,
            "confined": self.worker.confined(),
            "precision": self.scene.task.precision,
            "tolerance": self.scene.tolerance,
            "spread": self.scene.spread,
            "tells_apart": self.scene.tells_apart,
            "contents": self.scene.contents.way + (", scaled" if self.scene.contents.scaled else ""),
            "late_samples": tally.late_samples if tally else 0,
            "samples_ms": {key: [round(each, 5) for each in value] for key, value in self.samples.items()},
            "official": False,
            "seconds": round(time.monotonic() - self.started, 2),
            **{key: _finite(value) for key, value in record.items()},
            **({"floor": floor} if floor else {}),
            "held": tally is not None and not tally.unheld,
            **({"notes": self.notes} if self.notes else {}),
        }


@contextlib.contextmanager
def _turn(path: str | None) -> Iterator[None]:
    """Alone among the judges that were given this file: what is timed here is timed by one of them at a time."""
    if path is None:
        yield
        return
    with Path(path).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
