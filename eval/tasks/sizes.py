"""The sizes of a task: official (as written), check (about 512 MB in all) and small (a CPU, the host executor).

A task of this repository states them in task.toml; those of KernelBench's problems are recorded in
`kernelbench_sizes.json`, which `kbsub measure sizes` makes (names and numbers, none of upstream's code). No torch.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kbsub.adapters.pin import PIN
from kbsub.adapters.task import OFFICIAL_SIZE, Task
from kbsub.eval.tasks.task_file import read_task_file, task_file
from kbsub.eval.tasks.toml_file import FrozenModel

OFFICIAL, CHECK, SMALL = SIZES = (OFFICIAL_SIZE, "check", "small")  # the largest first
RECORDED = Path(__file__).with_name("kernelbench_sizes.json")


class Costs(FrozenModel):
    """What one call takes at a size, in fp32. Bytes of what get_inputs draws, of parameters and buffers, of the
    outputs, and of the largest tensor that the forward makes; floating-point operations of products and convolutions.
    """

    inputs: int = 0
    parameters: int = 0
    outputs: int = 0
    largest: int = 0
    flops: int = 0

    @property
    def held(self) -> int:
        """Bytes that memory must hold at least: inputs, parameters and one output."""
        return self.inputs + self.parameters + self.outputs

    @property
    def touched(self) -> int:
        """Bytes of one call, as an order of magnitude: what is held, and the largest tensor on the way."""
        return self.held + self.largest


class Size(FrozenModel):
    """New values for the integers of the reference program ({}: as written), and what a call takes.

    costs: None where nobody has found out. cpu_seconds: of one call on the CPU of whoever recorded it.
    """

    values: dict[str, int] = Field(default_factory=dict)
    costs: Costs | None = None
    cpu_seconds: float | None = None


class TaskSizes(FrozenModel):
    """The sizes of one task, by name. `sha256`: of the program they were derived from. why_not: of sizes that are no
    smaller than the next larger one, or that the reference refuses, in words."""

    sha256: str
    sizes: dict[str, Size]
    why_not: dict[str, str] = Field(default_factory=dict)


class RecordedSizes(FrozenModel):
    """The committed file: the sizes of KernelBench's problems at one pin, by slug."""

    pin: str
    torch: str
    tasks: dict[str, TaskSizes]


class SizesError(ValueError):
    """A file of sizes that cannot be believed; the message names it."""


@functools.lru_cache(maxsize=1)
def recorded(path: Path = RECORDED) -> RecordedSizes:
    """What was recorded at the pin. SizesError for a file that is none."""
    try:
        return RecordedSizes.model_validate(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise SizesError(f"{path.name}: cannot be read ({error}); make it again with: kbsub measure sizes") from error


def stated(task: Task) -> dict[str, dict[str, int]]:
    """The sizes that the task's own task.toml states, by name; {} where it states none."""
    found = read_task_file(task.folder) if task.folder is not None else task_file(task.slug)
    return {name: values for name in (CHECK, SMALL) if (values := getattr(found.sizes, name)) is not None}


def known_sizes(task: Task) -> TaskSizes | None:
    """The recorded sizes of exactly this program; None: they must be derived."""
    known = recorded()
    found = known.tasks.get(task.slug) if task.provenance == f"kernelbench@{PIN}" and known.pin == PIN else None
    return found if found is not None and found.sha256 == task.sha256 else None


def size_payload(name: str, size: Size) -> dict[str, Any]:
    """The "size" of a judge's payload."""
    return {"name": name, "values": dict(size.values)}
