"""What a worker does around a call so that a fault shows: memory that is not fresh, work that is late.

Also for a judge's own models. Knows tensors and streams; nothing of requests or verdicts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

SLEEP_CYCLES = 40_000_000  # about 20 ms of a GPU clock: longer than any forward of these tasks takes to start


@dataclass(frozen=True)
class Poison:
    """What a call finds in memory that is not fresh: `value`, in `blocks` freed blocks of the size of a tensor.

    shape, dtype: of that tensor; without them, of each float input. everywhere: NaN in whatever torch allocates during
    the call, too. empty_cache: before the blocks are made, the allocator gives back what it holds (CUDA).
    """

    value: float = math.nan
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    blocks: int = 1
    everywhere: bool = False
    empty_cache: bool = False

    def record(self) -> dict[str, Any]:
        """As it stands in a request."""
        return {**asdict(self), "value": self.value.hex(), "dtype": str(self.dtype).removeprefix("torch.")}


def spoil_freed(told: Mapping[str, Any], inputs: Any, device: torch.device) -> None:
    """Leave a value in freed blocks of memory: they are what a fresh output is made of.

    told: a Poison's record. Without a shape, the blocks have the sizes of the float inputs.
    """
    if told["empty_cache"] and device.type == "cuda":
        torch.cuda.empty_cache()
    forms = [(each.shape, each.dtype) for each in inputs if _is_float(each)]
    if told["shape"] is not None:
        forms = [(torch.Size(told["shape"]), getattr(torch, told["dtype"]))]
    value = float.fromhex(told["value"])
    for shape, dtype in forms:
        blocks = [torch.full(shape, value, dtype=dtype, device=device) for _ in range(told["blocks"])]
        del blocks


@contextlib.contextmanager
def spoiled_allocations() -> Iterator[None]:
    """Every tensor that torch allocates without initialising it is full of NaN in here."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def behind_slow_work(model: Callable[..., Any], inputs: Any, *, side: bool) -> tuple[Any, Any]:
    """Call on a stream (side: another than the current one), behind slow work on it that fills copies of `inputs`.

    Returns the output as a reader on that stream saw it at once, and the output itself, finished. A kernel launched
    elsewhere reads NaN, or is read before it has written.
    """
    fills = [_is_float(each) for each in inputs]
    staged = [torch.full_like(each, float("nan")) if fill else each for each, fill in zip(inputs, fills, strict=True)]
    stream: torch.cuda.Stream = torch.cuda.Stream() if side else torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    with torch.no_grad(), torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        for to, value, fill in zip(staged, inputs, fills, strict=True):
            if fill:
                to.copy_(value)
        result = model(*staged)
        seen = result.clone() if isinstance(result, torch.Tensor) else result
    stream.synchronize()
    if not side:
        torch.cuda.synchronize()
    return seen, result


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
