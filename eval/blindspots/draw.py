"""Upstream's inputs, bit for bit, drawn by several threads and put on the device as they are made.

`get_inputs` runs unchanged on the CPU's generator, as upstream runs it. Large `torch.rand`, `randn` and `randint` calls
in it are made in pieces: the same generator, the same words in the same order (`mersenne`), each piece copied to the
device at once, so that the host never holds a whole input. What get_inputs then computes of them runs on the device
where that gives the same bits (copies, one IEEE operation); for anything else (a softmax) the draw is made again
entirely on the host.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kbsub.eval.blindspots.mersenne import states_ahead

LARGE = 1 << 26  # elements; a smaller draw takes less than a second, and is left to torch
LOG2_SEGMENT = 26  # words of a thread's share
CHUNK = 1 << 23  # elements made at once: 32 MiB of pinned memory a thread
THREADS_VARIABLE = "KBSUB_DRAW_THREADS"

# What gives the same bits on a GPU as on a CPU: selections, copies, casts, and one correctly rounded operation.
# Division is none: torch multiplies by the reciprocal of a scalar there.
EXACT = frozenset(
    "add sub rsub mul neg __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __neg__ "
    "__eq__ __gt__ __lt__ __ge__ __le__ eq gt lt ge le "
    "abs bool float int long to type contiguous clone view reshape flatten permute transpose t unsqueeze squeeze "
    "expand __getitem__ triu tril size dim numel __get__ is_floating_point requires_grad_ detach clamp".split()
)


class NotExact(Exception):
    """get_inputs computes something of a large draw that a GPU may round in another way."""


def seed_everything(seed: int) -> None:
    """Upstream's set_seed: the CPU's generator and the current GPU's."""
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


def draw(get_inputs: Callable[[], list[Any]], seed: int, device: str) -> tuple[list[Any], str]:
    """(upstream's inputs of a trial, how they were drawn). Large ones lie on `device` already; nothing is cast."""
    seed_everything(seed)
    pieces = _Pieces(device)
    try:
        with pieces:
            inputs = list(get_inputs())
    except (NotExact, RuntimeError) as why:  # RuntimeError: a small draw on the host meets a large one on the device
        seed_everything(seed)
        return list(get_inputs()), f"on the host, as a whole: {str(why).splitlines()[0]}"
    return inputs, f"in pieces: {pieces.count} large draw(s)" if pieces.count else "on the host"


class _Pieces(TorchFunctionMode):
    """Makes large draws in pieces, and watches what is computed of them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.count = device, 0
        self.fillers: dict[Any, Callable[..., Any]] = {torch.rand: _rand, torch.randn: _randn, torch.randint: _randint}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.fillers and (made := self.fillers[func](args, kwargs)) is not None:
            size, dtype, fill = made
            if math.prod(size) >= LARGE:
                self.count += 1
                return in_pieces(size, dtype, fill, self.device)
        name = getattr(func, "__name__", str(func))
        on_device = self.count and self.device != "cpu" and any(_is_there(each) for each in args)
        if on_device and name not in EXACT:
            raise NotExact(f"{name} of a large draw may round differently on a GPU")
        return func(*args, **kwargs)


def _is_there(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


_Made = tuple[tuple[int, ...], torch.dtype, Callable[[torch.Tensor, torch.Generator], Any]]


def _size(args: Sequence[Any]) -> tuple[int, ...] | None:
    values = args[0] if len(args) == 1 and isinstance(args[0], (tuple, list)) else args
    return tuple(values) if all(isinstance(each, int) for each in values) else None


def _rand(args: Any, kwargs: Any) -> _Made | None:
    size = _size(args)
    return None if size is None or kwargs else (size, torch.float32, lambda out, g: out.uniform_(generator=g))


def _randn(args: Any, kwargs: Any) -> _Made | None:
    size = _size(args)
    if size is None or kwargs or math.prod(size) % 16:  # an odd end draws its last 16 values again
        return None
    return size, torch.float32, lambda out, g: out.normal_(generator=g)


def _randint(args: Any, kwargs: Any) -> _Made | None:
    if kwargs or len(args) not in (2, 3) or not isinstance(args[-1], (tuple, list)):
        return None
    low, high = (0, args[0]) if len(args) == 2 else args[:2]
    if not 0 < high - low < 1 << 32:
        return None  # a wider range takes two words an element
    return tuple(args[-1]), torch.int64, lambda out, g: out.random_(low, high, generator=g)


def in_pieces(size: tuple[int, ...], dtype: torch.dtype, fill: Callable[..., Any], device: str) -> torch.Tensor:
    """A tensor on `device` with what one call would have drawn; torch's generator stands where that call leaves it."""
    count = math.prod(size)
    segment = 1 << LOG2_SEGMENT
    segments = -(-count // segment)
    with torch._C.DisableTorchFunction():
        flat = torch.empty(count, dtype=dtype, device=device)
        with ThreadPoolExecutor(max_workers=int(os.environ.get(THREADS_VARIABLE) or os.cpu_count() or 1)) as pool:
            jobs = [
                pool.submit(_segment, flat, index * segment, min(count, (index + 1) * segment), state, fill)
                for index, state in enumerate(states_ahead(torch.get_rng_state(), LOG2_SEGMENT, segments))
            ]
            ends = [job.result() for job in jobs]
        torch.set_rng_state(ends[-1])
        return flat.view(size)


def _segment(flat: torch.Tensor, begin: int, end: int, state: torch.Tensor, fill: Callable[..., Any]) -> torch.Tensor:
    """Fills flat[begin:end] from a generator at `state`; returns where it then stands."""
    generator = torch.Generator()
    generator.set_state(state)
    buffer = None
    if flat.device.type == "cuda":
        torch.cuda.set_device(flat.device)  # of this thread
        buffer = torch.empty(min(CHUNK, end - begin), dtype=flat.dtype, pin_memory=True)
    for start in range(begin, end, CHUNK):
        stop = min(end, start + CHUNK)
        if buffer is None:
            fill(flat[start:stop], generator)
        else:
            fill(buffer[: stop - start], generator)
            flat[start:stop].copy_(buffer[: stop - start])
    return generator.get_state()
