"""Where the time of one judge goes, from what its process says while it runs; and the age of this process.

Knows the names of the official judge's steps and nothing of what they find. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from kbsub.eval.process.tree import start_ticks

# step that ends a phase -> (the phase, the step before it). Upstream's evaluator says the middle five itself.
_STEPS = (
    ("import", "start"),  # a Python with the judge's modules, in the cell
    ("reference", "import"),  # torch and upstream's package
    ("loading", "upstream"),
    ("trial", "build"),  # the candidate is executed, compiled and constructed
    ("floor", "upstream"),  # trials and times
)
REST = "other"


class Phases:
    """Listens to one judge: `heard` is its on_progress, `entered` its on_entered. Times in seconds from `began` on."""

    def __init__(self, on_progress: Callable[[dict[str, Any]], None]) -> None:
        self.began, self.at = time.monotonic(), dict[str, float]()
        self._on_progress = on_progress

    def entered(self, confined: Mapping[str, Any]) -> None:
        self.at["cell"] = time.monotonic() - self.began

    def heard(self, event: dict[str, Any]) -> None:
        step = event.get("stage")
        if any(step == known for known, _ in _STEPS):  # a candidate may send events, too, and must not fill memory
            self.at.setdefault(str(step), time.monotonic() - self.began)
        self._on_progress(event)

    def seconds(self, whole: float) -> dict[str, float]:
        """{cell, start, import, build, upstream, other} -> seconds, without those that the judge did not come to.

        whole: seconds from the start of the process to its end; the phases add up to it.
        """
        found, last = dict[str, float](), 0.0
        for step, phase in (("cell", "cell"), *_STEPS):
            if step in self.at:
                found[phase] = found.get(phase, 0.0) + max(0.0, self.at[step] - last)
                last = max(last, self.at[step])
        found[REST] = max(0.0, whole - last)
        return {phase: round(seconds, 3) for phase, seconds in found.items()}


def age_s() -> float | None:
    """Seconds since this process was started, its interpreter's own start included; None where nobody says."""
    try:
        ticks = start_ticks(os.getpid())
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK") if ticks else None
    except (AttributeError, OSError, ValueError):
        return None


def in_words(whole: float | None, phases: Mapping[str, float], judges: float) -> str:
    """One line: the whole process, its judges by phase, and what is neither. whole: `age_s` at the end."""
    parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())
    words = f"seconds: judges {judges:.2f} ({parts})"
    return words if whole is None else f"{words}; before and after them {whole - judges:.2f}; in all {whole:.2f}"
