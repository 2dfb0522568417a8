"""Upstream's baseline files (`baseline_time_torch.json` ...): same names, same nesting, numbers by its own function.

`{"level1": {"40_LayerNorm.py": {mean, std, min, max, num_trials, hardware, device, precision}}}`: the first seven are
what upstream's measure_ref_program_time returned; `precision` is added, because the files upstream ships are bf16 and
do not say so. One child process a measurement; the file is written after each. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbsub.eval.bench.baselines import BASELINES
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.model import write_json_atomic

TARGET = "kbsub.eval.bench.baselines:measure"


@dataclass(frozen=True)
class BaselinePlan:
    """Which tasks ("level1_40") and baselines (keys of BASELINES with a file of upstream's) go into which folder."""

    tasks: tuple[str, ...]
    baselines: tuple[str, ...]
    precision: str
    trials: int
    kernelbench: Path
    device: str
    timeout_s: float
    folder: Path


def measure_all(
    plan: BaselinePlan,
    *,
    say: Callable[[str], None] = lambda text: None,
    isolate: Callable[..., Outcome] = run_isolated,
) -> list[str]:
    """Measure everything of the plan; returns what failed, in words. A failure leaves no entry and stops nothing."""
    failed = []
    for name in plan.baselines:
        baseline = BASELINES[name]
        assert baseline.upstream_file is not None  # the command lets no other name through
        path = plan.folder / baseline.upstream_file
        for task in plan.tasks:
            outcome = isolate(TARGET, _payload(plan, name, task), timeout_s=plan.timeout_s)
            words = f"{task} {baseline.title} {plan.precision}"
            if outcome.status is not Status.OK or outcome.value is None:
                failed.append(f"{words}: {outcome.status}: {outcome.message}")
                say(failed[-1])
                continue
            entry = {**outcome.value["stats"], "precision": plan.precision}
            add_entry(path, outcome.value["level"], outcome.value["name"], entry)
            say(f"{words}: {entry['mean']} ms (written to {path})")
    return failed


def _payload(plan: BaselinePlan, name: str, task: str) -> dict[str, Any]:
    return {
        "task": task,
        "precision": plan.precision,
        "kernelbench": str(plan.kernelbench),
        "device": plan.device,
        "baseline": name,
        "trials": plan.trials,
    }


def add_entry(path: Path, level: int, name: str, entry: dict[str, Any]) -> None:
    """Put one problem's numbers into a baseline file; other entries stay. ValueError for a file of another precision.

    Upstream's analysis takes the level's table by name, so the three levels it knows are always there.
    """
    content: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    for table in content.values():
        for other, numbers in table.items():
            if numbers and numbers.get("precision", entry["precision"]) != entry["precision"]:
                raise ValueError(
                    f"{path}: {other} is {numbers['precision']}, this is {entry['precision']}; write to another --out"
                )
    content = {**{f"level{number}": {} for number in (1, 2, 3)}, **content}
    content.setdefault(f"level{level}", {})[name] = entry
    write_json_atomic(path, content)
