"""At which size of a task each stage judges here, and why; what does not fit is said before anything is drawn.

The official verdict on a GPU is of the task as it is written. Every other stage takes the largest size that fits the
memory and the time there is. RunSizes come from eval/tasks/sizes.py, or, for a program that nobody recorded, from one
small child. Must not know what a stage does. Imports no torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kbsub.adapters.integers import most_bytes
from kbsub.adapters.task import Task
from kbsub.eval.process.isolated import MEMORY_LIMIT_VARIABLE, run_isolated
from kbsub.eval.run.machine_facts import gpu_index, gpu_memory_bytes, memory_limit_bytes
from kbsub.eval.tasks.sizes import OFFICIAL, SIZES, SMALL, Costs, Size, TaskSizes, known_sizes, stated
from kbsub.eval.tasks.task_file import read_task_file, task_file
from kbsub.eval.verdicts.kind import VerdictKind

TARGET = "kbsub.eval.run.derive_size:judge"
TIMEOUT_S = 60.0
SURELY_SMALL = 4 << 20  # bytes; a program whose numbers cannot make more needs no other size and no child
SURELY_FITS = 1 << 30  # the same for a GPU, and for what can be refused
WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Budget:
    """What one call may take so that a stage ends in time: bytes (`Costs.touched`) and floating-point operations.

    copies: how many times what a call touches a stage holds at once, roughly.
    """

    touched: int
    flops: float
    copies: int


# (on a GPU, a handful of calls) -> budget. A GPU's hundreds of calls at 1 GiB take about a minute on an H200.
BUDGETS = {
    (True, True): Budget(1 << 40, 1e13, 4),
    (True, False): Budget(1 << 30, 150e9, 8),
    (False, True): Budget(1 << 30, 20e9, 4),
    (False, False): Budget(16 << 20, 200e6, 8),
}


@dataclass(frozen=True)
class Choice:
    """The size of one stage. refused: why this machine cannot hold it, with the way out; "" where it can."""

    name: str
    values: Mapping[str, int] = field(default_factory=dict)
    why: str = ""
    refused: str = ""

    def record(self) -> dict[str, Any]:
        """As a row says it."""
        return {"name": self.name, "values": dict(self.values), "why": self.why}


@dataclass(frozen=True)
class RunSizes:
    """The sizes of the task of one run on one device ("cpu", "cuda:1"). asked: --size, or ""."""

    task: Task
    device: str
    known: TaskSizes
    asked: str = ""

    def of(self, stage: VerdictKind, *, hosted: bool = False) -> Choice:
        """The size at which a stage judges a candidate. hosted: its kernels are executed on the CPU."""
        on_gpu = self.device != "cpu"
        if stage.text_on_cpu and not on_gpu:  # the numbers of a smaller size are not the task's: a file redefines those
            return Choice(OFFICIAL, why="it reads the texts of the task as it is written")
        if stage.as_written and on_gpu:
            return self._fitting(OFFICIAL, "upstream's evaluator judges the task as it is written")
        if self.asked:
            return self._fitting(self.asked, f"--size {self.asked}")
        if stage.own_shapes and not on_gpu and self._operator():
            return Choice("operator", why="the operator's own cases, at small shapes on a CPU")
        if hosted:
            return self._fitting(SMALL, "every thread of a kernel is executed on the CPU")
        budget = BUDGETS[on_gpu, stage.few_calls]
        there = _there(self.device)
        names = list(self.known.sizes)
        for name in names[:-1]:
            costs = self.known.sizes[name].costs
            unknown = costs is None and (on_gpu or stage.few_calls)
            if unknown or (costs is not None and _within(costs, budget, there)):
                return self._fitting(name, "" if name == OFFICIAL else f"the largest that fits {_where(on_gpu)}")
        return self._fitting(names[-1], "the smallest there is" if len(names) > 1 else "")

    def _fitting(self, name: str, why: str) -> Choice:
        size = self.known.sizes.get(name)
        if size is None:
            words = self.known.why_not.get(name, f"no {name} size of {self.task.slug} is known")
            return Choice(name, why=why, refused=f"{words}; --size {OFFICIAL} judges it as it is written")
        return Choice(name, size.values, why, self._refusal(size))

    def _refusal(self, size: Size) -> str:
        there = _there(self.device)
        if size.costs is None or there is None:
            return ""
        on_cpu, width = self.device == "cpu", WIDTH[self.task.precision]
        parts = {name: getattr(size.costs, name) * width // 4 for name in ("inputs", "parameters", "outputs")}
        drawn = size.costs.inputs if on_cpu else 0  # in fp32, whatever the precision, before it is cast
        if max(sum(parts.values()), drawn) <= there:
            return ""
        words = " and ".join(f"{_gb(count)} of {name}" for name, count in parts.items() if count)
        more = "a machine with more memory, or one with a large NVIDIA GPU" if on_cpu else "a GPU with more memory"
        where = "this machine can give" if on_cpu else "this GPU has"
        return (
            f"{self.task.slug} is too large for here: {words} in {self.task.precision}, at least; {where} "
            f"{_gb(there)}. Nothing was drawn. Run it on {more}"
        )

    def _operator(self) -> bool:
        folder = self.task.folder
        return (read_task_file(folder) if folder is not None else task_file(self.task.slug)).operator is not None


def sizes_for(task: Task, task_text: str, kernelbench: str | None, device: str, asked: str = "") -> RunSizes:
    """The sizes of a task for a run on `device`. Asks a child where nobody recorded them, once a process.

    Where they cannot be found out, there is the official one alone, and everything goes on as if nobody had asked.
    """
    return RunSizes(task, device, _known(task, task_text, kernelbench, device, asked), asked)


def _known(task: Task, task_text: str, kernelbench: str | None, device: str, asked: str) -> TaskSizes:
    own = stated(task)
    found = known_sizes(task)
    if found is not None and all(found.sizes[name].values == values for name, values in own.items()):
        return found
    official = {OFFICIAL: Size()}
    surely = most_bytes(task.source) <= (SURELY_SMALL if device == "cpu" and not own else SURELY_FITS)
    if surely and (own or asked in ("", OFFICIAL)):
        # What is stated is believed, without its costs: on the CPU, stages of many calls then take the smallest.
        return TaskSizes(sha256=task.sha256, sizes={**official, **{name: Size(values=own[name]) for name in own}})
    derived = _derived(task_text, task.precision, kernelbench, device, task.sha256)
    why = {name: f"no {name} size of {task.slug} could be derived" for name in SIZES[1:]}
    return derived or TaskSizes(sha256=task.sha256, sizes=official, why_not=why)


@functools.lru_cache(maxsize=64)
def _derived(text: str, precision: str, kernelbench: str | None, device: str, sha256: str) -> TaskSizes | None:
    """The sizes from a child, as far as it came; None: it knows none. `sha256` is in the key only: files are edited."""
    limit = memory_limit_bytes()
    variables = {MEMORY_LIMIT_VARIABLE: str(limit)} if limit else {}
    told: list[TaskSizes] = []

    def note(event: dict[str, Any]) -> None:
        if event.get("stage") == "sizes":
            told.append(TaskSizes.model_validate(event["sizes"]))

    payload = {"task": text, "kernelbench": kernelbench}
    run_isolated(TARGET, payload, timeout_s=TIMEOUT_S, on_progress=note, env=variables)
    return told[-1] if told else None  # of a child that did not come to its end, too


def _within(costs: Costs, budget: Budget, there: int | None) -> bool:
    fits = there is None or budget.copies * costs.touched <= there
    return fits and costs.touched <= budget.touched and costs.flops <= budget.flops


def _there(device: str) -> int | None:
    """Bytes of memory that a candidate may take on the device; None where nobody can tell."""
    return memory_limit_bytes() if device == "cpu" else gpu_memory_bytes(gpu_index(device))


def _where(on_gpu: bool) -> str:
    return "this GPU's memory and the time" if on_gpu else "the CPU's memory and the time"


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
