"""How many calls a batch has, and how many rounds there are: from memory, and from what one call took."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

LADDER = ((8, 24), (4, 12), (2, 6), (1, 3), (1, 2))
AT_LEAST_ON_CPU = 6  # calls; a busy machine makes any call slow
MOST_CALLS = 480  # of quick programs, whose batches would else be too short for a clock
LONG_ENOUGH_MS = 5.0  # of a batch of many
MOST_BYTES = {"cuda": 13_500_000_000, "cpu": 500_000_000}  # of inputs and answers of one batch together
OF_QUICK = {"cuda": 4_000_000_000, "cpu": 250_000_000}  # of a batch of more than 24 calls
SECONDS = {"cuda": 8.0, "cpu": 2.0}  # for the rounds of one candidate, comparison included
MOST_ROUNDS, LEAST_ROUNDS = 17, 5
MOST_PARTS = 4000  # tensors of one message


@dataclass(frozen=True)
class BatchPlan:
    """Batches of `few` and of `many` calls; rounds: at most, least: at least, seconds: when no other is begun."""

    few: int
    many: int
    rounds: int
    least: int
    seconds: float


def plan_of(device: torch.device, call_bytes: int, tensors: int) -> int:
    """The most calls that a batch may have, for inputs and answers of `call_bytes` in so many tensors."""
    kind = device.type
    free = torch.cuda.mem_get_info(device)[0] if kind == "cuda" else 2 * MOST_BYTES["cpu"]
    room = min(MOST_BYTES[kind], free // 2)
    fits = room // max(call_bytes, 1)
    if fits > 24:
        fits = max(24, OF_QUICK[kind] // max(call_bytes, 1))
    return int(min(fits, MOST_CALLS, max(2, MOST_PARTS // tensors)))


def ladder(device: torch.device, room: int, call_s: float, batch_s: float) -> BatchPlan:
    """The largest batches that fit, of a program whose call, its comparison included, takes `call_s` seconds, and of
    which every batch takes `batch_s` by itself."""
    seconds = SECONDS[device.type]
    for few, many in LADDER:
        quick_enough = ((few + many) * call_s + 2 * batch_s) * LEAST_ROUNDS <= seconds
        if many <= room and (quick_enough or (device.type == "cpu" and many <= AT_LEAST_ON_CPU)):
            return BatchPlan(few, many, MOST_ROUNDS, LEAST_ROUNDS, seconds)
    few, many = next(pair for pair in LADDER[::-1] if pair[1] <= room)
    return BatchPlan(few, many, LEAST_ROUNDS, LEAST_ROUNDS, seconds)


def quick(plan: BatchPlan, device: torch.device, room: int, call_ms: float, cost_s: float) -> BatchPlan:
    """More calls a batch for a program of `call_ms`, where `cost_s` (a call with its comparison) leaves the time."""
    wanted = math.ceil(LONG_ENOUGH_MS / max(plan.many * call_ms, 1e-3))
    affordable = int(plan.seconds / ((plan.few + plan.many) * max(cost_s, 1e-6) * MOST_ROUNDS))
    factor = max(1, min(wanted, affordable, room // plan.many))
    return replace(plan, few=factor * plan.few, many=factor * plan.many)
