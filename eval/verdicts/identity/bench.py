"""What every identity case of one run shares. Knows neither the cases nor how they are judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kbsub.adapters.task import Modules, Task
from kbsub.eval.operators.compare.predicate import OFFICIAL_TOLERANCE
from kbsub.eval.operators.identity import IdentitySuite, Setting
from kbsub.eval.verdicts.identity.subject import Subject


@dataclass
class Bench:
    """What every case of one run shares: the task, the candidate's process and the words of the verdict."""

    task: Task
    modules: Modules
    subject: Subject
    suite: IdentitySuite | None  # None: the operator knows no cases
    setting: Setting
    secret_seed: int | None = None
    cases: list[dict[str, Any]] = field(default_factory=list)
    secret: list[dict[str, Any]] = field(default_factory=list)  # those of the secret seed, in no count

    @property
    def tolerance(self) -> float:
        return OFFICIAL_TOLERANCE[self.task.dtype]
