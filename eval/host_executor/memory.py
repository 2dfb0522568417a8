"""Tensors in guarded memory: a page that faults behind (and before) each, and poison where nothing was written.

The end of a tensor meets its guard page (to 16 bytes, the alignment a vector load needs), so reading one element late
is a fault. What precedes it on its first page is poison that is checked after each launch.
Memory is shared between processes, so that the forked workers of a launch write what the caller reads.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading
import weakref
from typing import Any

import numpy as np
import torch

PAGE = mmap.PAGESIZE
ALIGNMENT = 16
POISON = 0xFFFB_FFFB  # of device.cpp: a NaN as fp32 and fp64, and each half of it one as fp16 and bf16
_POISON_BYTES = np.frombuffer(np.uint32(POISON).tobytes(), dtype=np.uint8)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_NORESERVE = 0x4000


class _Region:
    """One mapping: a guard page, pages whose last `nbytes` (to 16) are the tensor's, a guard page."""

    def __init__(self, nbytes: int, name: str) -> None:
        self.nbytes, self.name = nbytes, name
        body = -(-nbytes // PAGE) * PAGE
        self.length = body + 2 * PAGE
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        start = _libc.mmap(None, self.length, 0, flags, -1, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"{name}: {nbytes} bytes of guarded memory")
        self.start = int(start)
        if _libc.mprotect(self.start + PAGE, body, mmap.PROT_READ | mmap.PROT_WRITE):
            raise MemoryError(f"{name}: mprotect failed")
        self.body, self.end = self.start + PAGE, self.start + PAGE + body
        self.data = self.end - (-(-nbytes // ALIGNMENT) * ALIGNMENT)

    def slack(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The bytes before and after the tensor that share its pages."""
        after = self.data + self.nbytes
        return _bytes_at(self.body, self.data - self.body), _bytes_at(after, self.end - after)

    def unmap(self) -> None:
        _libc.munmap(self.start, self.length)


def _bytes_at(address: int, count: int) -> np.ndarray[Any, Any]:
    if count == 0:
        return np.empty(0, dtype=np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def _fill_poison(target: np.ndarray[Any, Any], address: int) -> None:
    """Poison words aligned to `address` % 4, so that any aligned element of 2, 4 or 8 bytes reads as a NaN."""
    pattern = np.roll(_POISON_BYTES, -(address % 4))
    whole = len(target) // 4 * 4
    target[:whole].reshape(-1, 4)[:] = pattern
    target[whole:] = pattern[: len(target) - whole]


class GuardedMemory:
    """Owner of guarded tensors; knows which addresses are theirs. A region lives as long as its tensor's storage.

    Threads may share it: no region goes while the slack of all is read.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run anywhere, within a section that holds it, too
        self._reading = False
        self._late: list[_Region] = []  # forgotten by the thread that is reading
        self._regions: dict[int, _Region] = {}
        self._starts: list[int] = []
        self._made = 0

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype, name: str = "") -> torch.Tensor:
        """A poisoned contiguous tensor. Raises MemoryError when the system has no room."""
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        nbytes = count * dtype.itemsize
        self._made += 1
        region = _Region(nbytes, name or f"buffer {self._made}")
        body = _bytes_at(region.body, region.end - region.body)
        _fill_poison(body, region.body)
        holder = (ctypes.c_uint8 * nbytes).from_address(region.data)
        # Not at exit: a tensor may outlive the clean-up, and the process gives its memory back anyway.
        weakref.finalize(holder, _forget, weakref.ref(self), region).atexit = False
        with self._lock:
            self._regions[region.start] = region
            bisect.insort(self._starts, region.start)
        return torch.frombuffer(holder, dtype=dtype, count=count).view(shape)

    def like(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """A poisoned tensor of the same shape, dtype, strides and address modulo the alignment."""
        if tensor.numel() == 0:
            return torch.empty_like(tensor)
        size = tensor.element_size()
        shift = tensor.data_ptr() % ALIGNMENT // size if tensor.data_ptr() % size == 0 else 0
        # The end still meets the guard page when shift and span fill whole 16 bytes, as rows of vec4 do.
        return self.empty((shift + _span(tensor),), tensor.dtype, name).as_strided(tensor.shape, tensor.stride(), shift)

    def copy(self, tensor: torch.Tensor, name: str = "") -> torch.Tensor:
        """As `like`, with the same values."""
        guarded = self.like(tensor, name)
        transfer(tensor, guarded)
        return guarded

    def find(self, address: int) -> _Region | None:
        """The region (guard pages included) that `address` lies in."""
        with self._lock:
            at = bisect.bisect_right(self._starts, address) - 1
            if at < 0:
                return None
            region = self._regions[self._starts[at]]
        return region if address < region.start + region.length else None

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is guarded."""
        return self.find(tensor.untyped_storage().data_ptr()) is not None

    def describe(self, address: int) -> str:
        """Where an address lies, in words for a fault report."""
        region = self.find(address)
        if region is None:
            return "address 0" if address == 0 else f"address {address:#x}, outside every tensor"
        offset = address - region.data
        if offset < 0:
            return f"{-offset} bytes before the start of {region.name} ({region.nbytes} bytes)"
        if offset >= region.nbytes:
            return f"byte {offset} of {region.name}, which has {region.nbytes}"
        return f"byte {offset} of {region.name}"

    def overwritten(self) -> str | None:
        """A description of slack that is no longer poison (a write just outside a tensor), else None."""
        with self._lock:
            self._reading = True
            try:
                return self._first_overwritten()
            finally:
                self._reading = False
                while self._late:
                    self._late.pop().unmap()

    def _first_overwritten(self) -> str | None:
        for region in list(self._regions.values()):
            before, after = region.slack()
            for slack, address in ((before, region.body), (after, region.data + region.nbytes)):
                expected = np.empty_like(slack)
                _fill_poison(expected, address)
                changed = np.flatnonzero(slack != expected)
                if len(changed):
                    where = self.describe(address + int(changed[0]))
                    _fill_poison(slack, address)
                    return where
        return None


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last, gaps included."""
    return 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))


def transfer(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the values of `source` to `target`, a tensor of the same shape and strides, where elements may overlap.

    torch refuses to write a tensor several of whose elements are one place in memory, as those of expand() are.
    """
    source, target = source.detach(), target.detach()
    for dim in range(source.dim()):
        if source.stride(dim) == 0 and source.shape[dim] > 1:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    order = sorted(range(source.dim()), key=source.stride)
    reach = 0  # of the elements within the dimensions so far
    for dim in order:
        if source.shape[dim] > 1 and source.stride(dim) <= reach:  # windows, as unfold() makes them
            span = (
                1 + sum((length - 1) * stride for length, stride in zip(source.shape, source.stride(), strict=True)),
            )
            target.as_strided(span, (1,)).copy_(source.as_strided(span, (1,)))
            return
        reach += (source.shape[dim] - 1) * source.stride(dim)
    target.copy_(source)


def _forget(owner: weakref.ref[GuardedMemory], region: _Region) -> None:
    memory = owner()
    if memory is None:
        region.unmap()
        return
    with memory._lock:
        if memory._regions.pop(region.start, None) is not None:
            memory._starts.remove(region.start)
        if memory._reading:
            memory._late.append(region)
        else:
            region.unmap()


def poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Which elements are untouched poison, bit for bit (bool, same shape): outputs that no thread wrote."""
    bits = tensor.detach().contiguous().view(torch.uint8).view(tensor.numel(), tensor.element_size()).numpy()
    pattern = np.resize(_POISON_BYTES, tensor.element_size())
    return torch.from_numpy((bits == pattern).all(axis=1)).view(tensor.shape)
