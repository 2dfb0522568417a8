"""The child's half: the variants of some tasks through upstream's trials, one record a task. Holds no candidate.

A trial is drawn once for all variants that are still in; a variant leaves with its first failing trial. One that cannot
be made (memory, time, a dtype that forward does not take) is listed with the reason and costs nothing else.
"""

from __future__ import annotations

import gc
import math
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kbsub.adapters import evaluator
from kbsub.adapters.environment import facts
from kbsub.adapters.task import Task, task_from_payload
from kbsub.eval.blindspots import arithmetic, variants
from kbsub.eval.blindspots.margin import Margin, judged
from kbsub.eval.blindspots.reference import NotTried, Reference, ReferenceFails, Trial, seeds_of
from kbsub.eval.blindspots.variants import Variant
from kbsub.eval.process.isolated import is_out_of_memory

LATE_S = 20.0  # how long after the deadline a task may go on that was begun before it
Progress = Callable[[dict[str, Any]], None]


def judge(payload: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Target for run_isolated: {"environment"}. One progress event {"stage": "record", "record": ...} a task.

    payload: tasks [{"task", "size": {name, values}}], kernelbench, device, precision, limit_s a task, deadline
    (time.time() after which no task is begun), memory_bytes (of the GPU, what this process may take; None: all).
    """
    device = payload["device"]
    upstream = evaluator.import_upstream(Path(payload["kernelbench"]))
    if device != "cpu":
        torch.cuda.set_device(torch.device(device if ":" in device else f"{device}:0"))
        if payload.get("memory_bytes"):
            total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, payload["memory_bytes"] / total))
    environment = facts(device)
    gc.freeze()  # or every collection walks through all that torch has imported: half a second each
    for item in payload["tasks"]:
        if time.time() >= payload["deadline"]:
            break
        task = task_from_payload({**payload, **item})
        progress({"stage": "task", "case": task.slug})
        started = time.monotonic()
        tolerance = upstream.module.get_tolerance_for_precision(task.dtype)
        granted = min(payload["limit_s"], payload["deadline"] + LATE_S - time.time())
        record = _Run(task, item["size"]["values"], device, float(tolerance), started + granted).record()
        record |= {"environment": environment, "granted_s": granted, "seconds": round(time.monotonic() - started, 2)}
        progress({"stage": "record", "record": record})
        _tidy()
    return {"environment": environment}


def _tidy() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def why(error: BaseException) -> str:
    """An exception in one line, without torch's advice."""
    if is_out_of_memory(error):
        return "out of memory"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:240]


class _Run:
    """One task: its rows so far, by variant name."""

    def __init__(self, task: Task, values: dict[str, int], device: str, tolerance: float, until: float) -> None:
        self.task, self.values, self.device, self.tolerance, self.until = task, values, device, tolerance, until
        self.rows: dict[str, dict[str, Any]] = {}
        self.not_tried: list[dict[str, str]] = []
        self.drawn: list[str] = []
        self.peak = 0

    def record(self) -> dict[str, Any]:
        seeds, another = seeds_of()
        found: dict[str, Any] = {
            "task": self.task.slug,
            "name": self.task.name,
            "sha256": self.task.sha256,
            "provenance": self.task.provenance,
            "precision": self.task.precision,
            "tolerance": self.tolerance,
            "size": self.task.size,
            "values": self.values,
            "seeds": seeds,
            "another_seed": another,
        }
        try:
            with torch.no_grad():
                self._judge(seeds, another)
        except Exception as error:
            traceback.print_exc()
            found["error"] = str(error) if isinstance(error, NotTried) else why(error)
            if isinstance(error, ReferenceFails):
                fails = Variant(arithmetic.AGAIN, "unstable", "", Trial.run)
                self._note(fails, Margin(False, math.inf, 0, 0, False, str(error)), 1)
            elif not is_out_of_memory(error):
                _raise_if_broken(error)
        found["drawn"] = sorted(set(self.drawn))
        found["variants"] = list(self.rows.values())
        found["not_tried"] = self.not_tried
        if self.device != "cpu":
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        return found

    def _judge(self, seeds: list[int], another: int) -> None:
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        reference = Reference(self.task, self.device, another)
        try:
            elsewhere = reference.profile()
        except Exception as error:
            if not is_out_of_memory(error):
                reference.trial(seeds[0])  # raises ReferenceFails where upstream's own inputs do it, too
            raise
        alive = self._all(reference, elsewhere)
        del elsewhere
        for number, seed in enumerate(seeds, 1):
            if not alive or self._late():
                break
            trial = reference.trial(seed)
            self.drawn.append(trial.drawn)
            alive = [each for each in alive if self._through(each, trial, number)]
            del trial
        for each in alive:
            row = self.rows.get(each.name)
            if row is None:
                self._leave_out(each.name, "time limit")
            elif row["trials"] < len(seeds):
                row["passed"] = None  # not failed, but the time was up

    def _all(self, reference: Reference, elsewhere: torch.Tensor) -> list[Variant]:
        again, *truths = arithmetic.expected(reference)
        found = [again, *variants.outputs(reference, elsewhere), *variants.inputs(self._shapes(reference))]
        for group in (variants.operators(reference), variants.parameters(reference)):
            found += group.chosen
            for what, reason in group.left_out:
                self._leave_out(what, reason)
        return [*found, *arithmetic.arithmetic(reference), *truths]  # float64 last: it may take what time there is

    @staticmethod
    def _shapes(reference: Reference) -> list[Any]:
        """The inputs as tensors without memory: only shapes are asked for."""
        given = reference.other_inputs()
        return [each.to("meta") if isinstance(each, torch.Tensor) else each for each in given]

    def _late(self) -> bool:
        return time.monotonic() > self.until

    def _leave_out(self, name: str, reason: str) -> None:
        self.not_tried.append({"name": name, "why": reason})

    def _through(self, variant: Variant, trial: Trial, number: int) -> bool:
        """Puts a variant through one trial; whether it is still in."""
        if variant.free:
            self._note(variant, Margin(True, 0.0, 0, trial.output.numel(), True), number)
            self.rows[variant.name]["same"] = True
            return True
        if self._late():
            return True  # _judge says so of all that are still in
        try:
            margin = judged(trial.output, variant.make(trial), self.tolerance, whole=variant.blind == "hostile")
        except NotTried as reason:
            self._drop(variant, str(reason))
            return False
        except Exception as error:
            if not is_out_of_memory(error):
                _raise_if_broken(error)
            self._drop(variant, why(error))
            del error
            _tidy()
            return False
        self._note(variant, margin, number)
        return margin.passed

    def _drop(self, variant: Variant, reason: str) -> None:
        self.rows.pop(variant.name, None)
        self._leave_out(variant.name, reason)

    def _note(self, variant: Variant, margin: Margin, number: int) -> None:
        row = self.rows.setdefault(
            variant.name,
            {"name": variant.name, "blind": variant.blind, "words": variant.words, "share": 0.0, "trials": 0},
        )
        row["passed"], row["trials"] = margin.passed, number
        row["share"] = max(row["share"], float(f"{margin.share:.3g}"))
        if not margin.passed:
            row["failed_at"] = number
            row["whole"] = margin.whole
            if margin.whole:
                row["failing"] = [margin.failing, margin.elements]
            if margin.why:
                row["why"] = margin.why


def _raise_if_broken(error: Exception) -> None:
    """A device that answers nothing any more ends the process: the parent begins again behind this task."""
    text = str(error)
    if "CUDA error" in text and "out of memory" not in text:
        traceback.print_exc()
        os._exit(70)
