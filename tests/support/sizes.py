"""The small size of level1_40 as a judge's payload has it, for tests that call a judge on a CPU without a runner."""

from __future__ import annotations

from kbsub.adapters.task import load_task
from kbsub.eval.tasks.sizes import SMALL, Size, size_payload, stated

_VALUES = stated(load_task(1, 40, kernelbench=None))[SMALL]
SMALL_LEVEL1_40 = size_payload(SMALL, Size(values=_VALUES))
SMALL_TASK = load_task(1, 40, kernelbench=None).at(SMALL, _VALUES)
