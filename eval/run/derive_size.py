"""Derives the sizes of a task from its reference program and tries them on it; in a child: the code is the task's own.

What an integer of the program is for is found out, not guessed from its name: halve it, and look which shapes change.
Costs come from a run on torch's "meta" device, where a tensor has a shape and no memory. Batch-like integers (they
change the first dimension of inputs and no parameter) shrink first, then other sizes of inputs, then widths.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from kbsub.adapters.integers import integers, most_bytes
from kbsub.adapters.refusal import short_error
from kbsub.adapters.task import SEED, Modules, Task, task_from_payload
from kbsub.eval.tasks.sizes import CHECK, OFFICIAL, SMALL, Costs, Size, TaskSizes, stated

BATCH, INPUT, WIDTH, FOLLOWS = "batch", "input", "width", "follows"
FOLLOWERS_FROM = 16  # an integer that changes no shape (groups) shrinks with a width that is a multiple of it
LEAST_FOLLOWER = 8
REAL_BYTES = 1 << 30  # where meta tensors will not do, inputs up to this are drawn
MUCH = 0.02  # of the score: a step that gains less is taken back


@dataclass(frozen=True)
class Limit:
    """What a size should stay within, and how far each kind of integer may shrink for it."""

    held: int  # bytes of inputs, parameters and outputs
    largest: int  # bytes
    flops: float
    least: Mapping[str, int]

    def score(self, costs: Costs) -> float:
        """0 within the limit; each doubling beyond one of its numbers adds 1."""
        return sum(self.doublings(costs))

    def doublings(self, costs: Costs) -> list[float]:
        """By how many doublings each of its numbers is exceeded."""
        pairs = ((costs.held, self.held), (costs.largest, self.largest), (costs.flops, self.flops))
        return [math.log2(max(1.0, cost / allowed)) for cost, allowed in pairs]


LIMITS = {
    CHECK: Limit(512 << 20, 512 << 20, 150e9, {BATCH: 2, INPUT: 32, WIDTH: 64}),
    SMALL: Limit(1 << 20, 1 << 20, 20e6, {BATCH: 2, INPUT: 8, WIDTH: 8}),
}


# ---- what a size costs ----


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The bytes of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, min(each.numel() * each.element_size(), _storage(each)))
        return found


def costs_of(task: Task) -> Costs:
    """What one call takes: on meta tensors, or on the CPU where the program does not run on those and draws little.

    Where they are not, outputs, largest and flops are 0: what is known is inputs and parameters. Raises what the
    reference program raises, and RuntimeError where it is not known what it would draw.
    """
    try:
        return _costs_on("meta", task)
    except Exception as error:
        drawn, partial = _without_a_call(task)
        if _little(drawn, task):
            return _costs_on("cpu", task)
        if drawn is None:
            raise RuntimeError(f"what its inputs take is not known: {short_error(error)}") from error
        return partial


def _little(drawn: int | None, task: Task) -> bool:
    """Whether the program may be run on a CPU to find something out. drawn: bytes of its inputs, None: not known."""
    return drawn <= REAL_BYTES if drawn is not None else most_bytes(task.source) <= REAL_BYTES


def _costs_on(device: str, task: Task) -> Costs:
    with torch.device(device), torch.no_grad(), _flops() as flops:
        modules = task.modules()
        inputs = list(modules.get_inputs())
        if device == "meta" and any(each.device.type != "meta" for each in _tensors(inputs)):
            raise RuntimeError("its inputs are not made where torch.device says")
        model = modules.Model(*modules.get_init_inputs())
        with _Largest() as largest:
            outputs = model(*inputs)
    seen: set[int] = set()
    return Costs(
        inputs=_bytes(inputs, seen),
        parameters=_bytes([*model.parameters(), *model.buffers()], seen),
        outputs=_bytes(outputs, seen),
        largest=largest.bytes,
        flops=int(flops.get_total_flops()),
    )


def _without_a_call(task: Task) -> tuple[int | None, Costs]:
    """(bytes of the inputs, None where they are not made on meta; inputs and, where they are known, parameters)."""
    seen: set[int] = set()
    with torch.device("meta"), torch.no_grad():
        try:
            modules = task.modules()
            inputs = list(modules.get_inputs())
        except Exception:
            return None, Costs()
        if any(each.device.type != "meta" for each in _tensors(inputs)):
            return None, Costs()
        found = _bytes(inputs, seen)
        try:
            model = modules.Model(*modules.get_init_inputs())
        except Exception:
            return found, Costs(inputs=found)
    return found, Costs(inputs=found, parameters=_bytes([*model.parameters(), *model.buffers()], seen))


def _flops() -> FlopCounterMode:
    return FlopCounterMode(display=False)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _bytes(values: Any, seen: set[int]) -> int:
    """Bytes that memory must hold: of views and expanded tensors only what lies behind them, each storage once."""
    count = 0
    for tensor in _tensors(values):
        if tensor.untyped_storage()._cdata not in seen:
            seen.add(tensor.untyped_storage()._cdata)
            count += min(tensor.numel() * tensor.element_size(), _storage(tensor))
    return count


# ---- what an integer is for ----

Shapes = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


def _shapes(task: Task) -> Shapes:
    """(of the inputs, of parameters and buffers)."""
    try:
        return _shapes_on("meta", task)
    except Exception:
        if not _little(_without_a_call(task)[0], task):
            raise
        return _shapes_on("cpu", task)


def _shapes_on(device: str, task: Task) -> Shapes:
    with torch.device(device), torch.no_grad():
        modules = task.modules()
        inputs = [tuple(each.shape) for each in _tensors(modules.get_inputs())]
        model = modules.Model(*modules.get_init_inputs())
    return inputs, [tuple(each.shape) for each in (*model.parameters(), *model.buffers())]


def kinds_of(task: Task) -> dict[str, str]:
    """Integer -> what it is for; those that make no size (a kernel's width, a number of layers) are left out."""
    try:
        own = _shapes(task)
    except Exception:  # a program that is not for meta: nothing can be found out
        return {}
    found = {}
    for name, value in integers(task.source).items():
        if value >= 2 and (kind := _kind(task, name, value, own)):
            found[name] = kind
    return found


def _kind(task: Task, name: str, value: int, own: Shapes) -> str:
    try:
        other = _shapes(task.at("other", {name: halved(value)}))
    except Exception:
        return ""
    for before, after in zip(own, other, strict=True):
        if [len(shape) for shape in before] != [len(shape) for shape in after]:
            return ""
    if other == own:
        return FOLLOWS if value >= FOLLOWERS_FROM else ""
    if other[1] != own[1]:
        return WIDTH
    rest = [[shape[1:] for shape in each[0]] for each in (own, other)]
    return BATCH if rest[0] == rest[1] else INPUT


def halved(value: int) -> int:
    """About half; an odd number stays odd, a multiple of a power of two up to 8 stays one where there is such."""
    half = value // 2
    if value % 2:
        return half if half % 2 else half + 1
    unit = min(8, value & -value)
    return max(half - half % unit, 0) or half


# ---- shrinking ----


@dataclass
class _Shrinking:
    """The values so far, and what they cost; `path`: all of that before each step, to go back."""

    task: Task
    kinds: Mapping[str, str]
    values: dict[str, int]
    costs: Costs
    path: list[tuple[dict[str, int], Costs]] = field(default_factory=list)

    def value(self, name: str) -> int:
        return self.values[name] if name in self.values else integers(self.task.source)[name]

    def towards(self, limit: Limit) -> None:
        """Shrink until the limit holds or no integer is left; batch-like ones first."""
        for kind in (BATCH, INPUT, WIDTH):
            names = [name for name, each in self.kinds.items() if each == kind]
            while names and limit.score(self.costs) > 0:
                name = max(names, key=self.value)
                if not self._step(name, kind, limit):
                    names.remove(name)

    def _step(self, name: str, kind: str, limit: Limit) -> bool:
        before, least = self.value(name), min(limit.least[kind], self.value(name))
        now, over = halved(before), limit.score(self.costs)
        times = int(max(limit.doublings(self.costs))) if kind == BATCH else 1  # each step costs a run
        for _ in range(times - 1):
            now = halved(now) if halved(now) >= least else now
        if now < least or now >= before:
            return False
        values = {**self.values, name: now}
        if kind == WIDTH:
            values |= self._following(before, now)
        alike = {each: now for each in self.kinds if self.value(each) == before}
        # Where one alone does not go (two inputs that must agree), all integers of its value shrink together.
        return self._took(values, over, limit) or (len(alike) > 1 and self._took({**values, **alike}, over, limit))

    def _took(self, values: dict[str, int], over: float, limit: Limit) -> bool:
        try:
            costs = costs_of(self.task.at("other", values))
        except Exception:
            return False
        if limit.score(costs) > over * (1 - MUCH):
            return False
        self.path.append((self.values, self.costs))
        self.values, self.costs = values, costs
        return True

    def _following(self, before: int, now: int) -> dict[str, int]:
        """Numbers of groups and the like that divide a width shrink with it."""
        found = {}
        for name, kind in self.kinds.items():
            count = self.value(name)
            if kind == FOLLOWS and count >= FOLLOWERS_FROM and before % count == 0:
                found[name] = max(LEAST_FOLLOWER, count * now // before)
        return found


def derive(task: Task, found: Callable[[TaskSizes], None] = lambda sizes: None) -> TaskSizes:
    """The sizes of `task`; `found` gets what is known, each time there is more.

    Raises what its reference raises where not even the official costs can be found out.
    """
    official = costs_of(task)
    sizes, why_not = {OFFICIAL: Size(costs=official)}, dict[str, str]()

    def known() -> TaskSizes:
        return TaskSizes(sha256=task.sha256, sizes=dict(sizes), why_not=dict(why_not))

    found(known())
    own = stated(task)
    shrinking = _Shrinking(task, {} if own else kinds_of(task), {}, official)
    for name, limit in LIMITS.items():
        if own:
            values = own.get(name, shrinking.values)
            shrinking.values, shrinking.costs = values, costs_of(task.at(name, values))
        else:
            shrinking.towards(limit)
            if limit.score(shrinking.costs):
                over = 2 ** max(limit.doublings(shrinking.costs))
                why_not[name] = f"{over:.3g} times what it should be: no other integer shrinks it"
        sizes[name] = Size(values=dict(shrinking.values), costs=shrinking.costs)
        found(known())
    _try_small(task, shrinking, sizes, why_not)
    found(known())
    return known()


def _try_small(task: Task, shrinking: _Shrinking, sizes: dict[str, Size], why_not: dict[str, str]) -> None:
    """Call the reference at the small size; where it refuses, at the one before, and so on."""
    refused, seconds = "", None
    while seconds is None and shrinking.costs.touched <= REAL_BYTES:
        try:
            seconds, own_call = timed_call(task.at(SMALL, shrinking.values))
        except Exception as error:
            refused = refused or short_error(error)
            if not shrinking.path:
                break
            shrinking.values, shrinking.costs = shrinking.path.pop()
        else:
            if own_call:
                why_not[OFFICIAL] = own_call
    if refused:
        why_not[SMALL] = f"the reference refuses a smaller one: {refused}"
    sizes[SMALL] = Size(values=dict(shrinking.values), costs=shrinking.costs, cpu_seconds=seconds)


def timed_call(task: Task) -> tuple[float, str]:
    """(seconds of the better of two calls of the reference on the CPU, why it refuses the official call or "").

    Upstream casts every input to the precision, integers too; a reference that only takes them as they are is called
    so, and said to refuse the official call. Raises what it raises in both.
    """
    modules: Modules = task.modules()
    torch.manual_seed(SEED)
    drawn = list(modules.get_inputs())
    with torch.no_grad():
        torch.manual_seed(SEED)
        model = modules.Model(*task.cast(modules.get_init_inputs())).to(task.dtype)
        why, inputs = "", task.cast(drawn)
        try:
            model(*inputs)
        except Exception as error:
            if all(each.is_floating_point() for each in _tensors(drawn)):
                raise
            why = f"the reference refuses its inputs as KernelBench casts them: {short_error(error)}"
            inputs = [each.to(task.dtype) if _is_float(each) else each for each in drawn]
            model(*inputs)
        started = time.perf_counter()
        model(*inputs)
        return float(f"{time.perf_counter() - started:.2g}"), why


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _json(sizes: TaskSizes) -> dict[str, Any]:
    return sizes.model_dump(mode="json")


def judge(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Target of a child: {"sizes": TaskSizes as JSON} of the payload's task; what is known is told on the way, too."""
    task = task_from_payload(payload)
    found = derive(task, lambda sizes: progress({"stage": "sizes", "sizes": _json(sizes)}))
    return {"sizes": _json(found)}


def judge_many(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Target of a child for several tasks ("tasks": their names), each finished one told at once as {"sizes", "task"}.

    Returns {"torch": its version}; a task whose sizes cannot be found out has {"why", "task"}.
    """
    torch.set_num_threads(1)
    for name in payload["tasks"]:
        progress({"stage": name, "task": name})
        try:
            found = derive(task_from_payload({**payload, "task": name}))
            progress({"stage": "sizes", "task": name, "sizes": _json(found)})
        except Exception as error:
            progress({"stage": "sizes", "task": name, "why": short_error(error)})
    return {"torch": torch.__version__}
