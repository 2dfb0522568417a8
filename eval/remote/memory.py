"""Memory that two processes see: sealed files on a CPU, raw CUDA IPC handles on a GPU. Bytes only; no tensor crosses.

The owner makes a Block and exports it (a descriptor, or a handle of 64 bytes); the other side maps it. Whoever reads
what it does not trust goes through `copy_host` and `Mapped`, which check the size that the system itself reports.
Must not know what the bytes mean.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import stat

import torch

HANDLE_BYTES = 64
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL  # its size is fixed for everybody
GRAIN = 1 << 16
# A handle shares the whole 2 MiB that an allocation lies in, with whatever else the driver put there.
DEVICE_GRAIN = 2 << 20
_BUFFER_ID, _RANGE_START, _RANGE_SIZE = 7, 11, 12  # CUpointer_attribute


class SharedMemoryError(Exception):
    """Memory cannot be shared, or what came as shared memory is none; in words."""


class HostBlock:
    """A sealed memory file of at least `nbytes`, mapped: `bytes` (uint8) is all of it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(GRAIN, -(-nbytes // GRAIN) * GRAIN)
        self.descriptor = os.memfd_create("kbsub", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, self.nbytes)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        self.bytes = map_host(self.descriptor, self.nbytes)

    @property
    def address(self) -> int:
        return int(self.bytes.data_ptr())

    def close(self) -> None:
        os.close(self.descriptor)  # the mapping goes with the last tensor that looks into it


class HostView:
    """Somebody's memory file, mapped whole, for one whose word is trusted."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.bytes, self.address = whole, whole.data_ptr()


def map_host(descriptor: int, nbytes: int) -> torch.Tensor:
    """The whole file as a uint8 tensor, writes shared. For files whose seals hold."""
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


def check_host(descriptor: int) -> int:
    """The size in bytes of a sealed memory file from somebody else. SharedMemoryError when it is anything else."""
    try:
        status = os.fstat(descriptor)
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise SharedMemoryError(f"the descriptor is no memory file ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        raise SharedMemoryError("the descriptor is no memory file that is sealed against shrinking")
    return status.st_size


def copy_host(descriptor: int, offset: int, nbytes: int) -> torch.Tensor:
    """`nbytes` of somebody's file as a uint8 tensor of our own. Read, not mapped: no fault can come of it."""
    own = torch.empty(nbytes, dtype=torch.uint8)
    view, done = memoryview(own.numpy()), 0  # type: ignore[arg-type]
    while done < nbytes:
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count <= 0:
            raise SharedMemoryError(f"the file ends after {offset + done} bytes, of {offset + nbytes} that were told")
        done += count
    return own


# ---- CUDA ----


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


@functools.lru_cache(maxsize=None)
def driver() -> ctypes.CDLL:
    """The CUDA driver, whose current context is torch's own."""
    library = ctypes.CDLL("libcuda.so.1")
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    return library


def _checked(code: int, what: str) -> None:
    if code:
        name = ctypes.c_char_p()
        driver().cuGetErrorName(code, ctypes.byref(name))
        raise SharedMemoryError(f"{what}: {(name.value or b'error').decode()} ({code})")


def allocation_of(address: int) -> tuple[int, int]:
    """(start, bytes) of the allocation of the driver that a device address lies in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
    if code:  # of memory that was mapped from elsewhere, some drivers say it only so
        for attribute, value in ((_RANGE_START, base), (_RANGE_SIZE, size)):
            found = driver().cuPointerGetAttribute(ctypes.byref(value), attribute, ctypes.c_uint64(address))
            _checked(found, "cuMemGetAddressRange and cuPointerGetAttribute")
    return base.value, size.value


def number_of(address: int) -> int | None:
    """The driver's number of the allocation, never given again in this process; None where the driver says none."""
    number = ctypes.c_uint64()
    code = driver().cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
    return None if code else number.value


def handle_of(base: int) -> bytes:
    """The IPC handle of an allocation. SharedMemoryError where its allocator cannot share (pools, virtual memory)."""
    handle = _Handle()
    _checked(driver().cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(base)), "cuIpcGetMemHandle")
    return bytes(handle.reserved)


def device_bytes(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Device memory at an address as a uint8 tensor. It does not own it."""

    class Interface:
        __cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }

    return torch.as_tensor(Interface(), device=device)


class DeviceBlock:
    """Device memory of the driver's own, which can always be shared; `bytes` (uint8) is all of it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes, self.device = max(1, -(-nbytes // DEVICE_GRAIN)) * DEVICE_GRAIN, device
        address = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # and the context is there, and this thread's
            _checked(driver().cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(self.nbytes)), "cuMemAlloc")
        self.address = address.value
        self.bytes = device_bytes(self.address, self.nbytes, device)
        self.handle = handle_of(self.address)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a context that is broken has nothing left to free
            torch.cuda.synchronize(self.device)
        driver().cuMemFree_v2(ctypes.c_uint64(self.address))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two uint8 tensors of one size are equal; eight bytes at a time where both lie so."""
    whole = one.numel() - one.numel() % 8
    if whole and one.data_ptr() % 8 == other.data_ptr() % 8 == 0:
        words = torch.equal(one[:whole].view(torch.int64), other[:whole].view(torch.int64))
        return words and torch.equal(one[whole:], other[whole:])
    return torch.equal(one, other)


class Mapped:
    """Somebody's device memory, mapped by its handle; `bytes` is as much as the driver says there is, or `nbytes`
    where the one who says it is trusted."""

    def __init__(self, handle: bytes, device: torch.device, nbytes: int | None = None) -> None:
        if len(handle) != HANDLE_BYTES:
            raise SharedMemoryError(f"a handle of {len(handle)} bytes, it has {HANDLE_BYTES}")
        address, wanted = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
        self.device = device
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            _checked(driver().cuIpcOpenMemHandle_v2(ctypes.byref(address), wanted, 1), "cuIpcOpenMemHandle")
        self.address = address.value
        try:
            base, size = (self.address, nbytes) if nbytes is not None else allocation_of(self.address)
        except SharedMemoryError:
            self.close()
            raise
        self.nbytes = base + size - self.address
        self.bytes = device_bytes(self.address, self.nbytes, device)

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        _checked(driver().cuIpcCloseMemHandle(ctypes.c_uint64(self.address)), "cuIpcCloseMemHandle")
