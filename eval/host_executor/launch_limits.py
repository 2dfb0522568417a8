"""Would the driver take this launch? Every rule that cuLaunchKernel checks, applied without a device.

    refusals(launch, facts["rows_held_8"], H200_LIMITS)      # [] when the driver would take it, else a line a rule

The facts of the kernel come from its compiled cubin (cubin_facts.py), those of the device from limits.py; the numbers
below are the same on every device of compute capability 8.0 to 12.x (CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability"). How registers and shared memory are counted was compared with an H200's driver:
residency in 3,910 cases, and the largest block of kernels of 13 register counts.
Must not know candidates, nor how a kernel is executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from kbsub.eval.host_executor.cubin_facts import SYSTEM_SHARED_BYTES, KernelFacts

WARP = 32
MOST_THREADS = 1024  # of a block
MOST_BLOCK = (1024, 1024, 64)
MOST_GRID = (2**31 - 1, 65_535, 65_535)
REGISTERS = 65_536  # of a block at most, and of a multiprocessor
REGISTER_UNIT = 256  # registers that a warp is given at a time: eight a thread
QUARTERS = 4  # of a multiprocessor, each with its own registers
SHARED_UNIT = 128  # bytes
SHARED_WITHOUT_ASKING = 49_152  # bytes, static and dynamic together, before MAX_DYNAMIC_SHARED_SIZE_BYTES is set
MOST_CLUSTER = 8  # blocks of a cluster that every device takes
MOST_BLOCKS = {86: 16, 87: 16, 89: 24, 120: 24, 121: 24}  # of a multiprocessor, by compute capability; else 32

Dim = tuple[int, int, int]


class DeviceLimits(Protocol):
    """What is asked of a device: `limits.Limits`, or a candidate's own DeviceLimits."""

    @property
    def compute_capability(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def shared_bytes_per_block(self) -> int: ...
    @property
    def shared_bytes_per_multiprocessor(self) -> int: ...
    @property
    def threads_per_multiprocessor(self) -> int: ...


class LaunchRefused(RuntimeError):
    """A launch that the driver would refuse. Not a ValueError: that is how a candidate refuses an input itself."""


@dataclass(frozen=True)
class Argument:
    """One argument as CuPy hands it over: `size` in bytes, 0 for what it cannot pass; `real` for a float."""

    size: int
    real: bool
    type: str


@dataclass(frozen=True)
class Launch:
    """One call of CudaModule.launch. `allowed_shared_bytes`: MAX_DYNAMIC_SHARED_SIZE_BYTES as set by then, or 0."""

    kernel: str
    grid: Dim
    block: Dim
    arguments: tuple[Argument, ...]
    shared_bytes: int = 0
    cooperative: bool = False
    allowed_shared_bytes: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return math.prod(self.block)


def dim(values: tuple[int, ...]) -> Dim:
    """A grid or a block, filled up with ones."""
    x, y, z = (*(int(v) for v in values), 1, 1)[:3]
    return x, y, z


def argument(value: Any) -> Argument:
    """An int is an address of 8 bytes; a NumPy scalar is passed as it is; anything else is not passed."""
    if isinstance(value, np.generic):
        return Argument(value.dtype.itemsize, value.dtype.kind == "f", f"numpy {value.dtype}")
    plain = isinstance(value, int) and not isinstance(value, bool)
    return Argument(8 if plain else 0, False, type(value).__name__)


def refusals(launch: Launch, kernel: KernelFacts | None, limits: DeviceLimits) -> list[str]:
    """Why the driver would refuse the launch, a line a rule: the kernel, the rule, the number given and the limit.

    `kernel` None: its facts are not known, and only the rules that need none are applied.
    """
    rules = [*_of_dimensions(launch), *_of_shared_memory(launch, kernel, limits)]
    if kernel is not None:
        rules += [*_of_threads(launch, kernel), *_of_arguments(launch, kernel)]
    if not rules and launch.cooperative:
        rules += _of_residency(launch, kernel, limits)
    return [f"{launch.kernel}: {text}" for text in rules]


def _of_dimensions(launch: Launch) -> Iterator[str]:
    for what, sizes, most in (("block", launch.block, MOST_BLOCK), ("grid", launch.grid, MOST_GRID)):
        for axis, size, limit in zip("xyz", sizes, most, strict=True):
            if not 1 <= size <= limit:
                yield f"{what} dimension {axis} is {size}, must be 1 to {limit}"
    if launch.threads > MOST_THREADS:
        yield f"block {launch.block} has {launch.threads} threads, must be 1 to {MOST_THREADS}"


def _of_shared_memory(launch: Launch, kernel: KernelFacts | None, limits: DeviceLimits) -> Iterator[str]:
    static = kernel.static_shared if kernel else 0
    given = f"{static} bytes of static and {launch.shared_bytes} of dynamic shared memory"
    if launch.shared_bytes < 0:
        yield f"dynamic shared memory is {launch.shared_bytes} bytes, must be at least 0"
    if static + launch.shared_bytes > limits.shared_bytes_per_block:
        yield f"{given}, the device allows {limits.shared_bytes_per_block} together"
    elif launch.shared_bytes > (launch.allowed_shared_bytes or SHARED_WITHOUT_ASKING - static):
        yield (
            f"{given}, only {SHARED_WITHOUT_ASKING} together unless MAX_DYNAMIC_SHARED_SIZE_BYTES is set, "
            f"which is {launch.allowed_shared_bytes}"
        )


def threads_by_registers(kernel: KernelFacts) -> int:
    """Threads that the registers of one multiprocessor suffice for: whole warps, in each quarter apart."""
    of_warp = -(-kernel.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    return REGISTERS // QUARTERS // of_warp * QUARTERS * WARP


def _of_threads(launch: Launch, kernel: KernelFacts) -> Iterator[str]:
    if kernel.max_threads is not None and launch.threads > kernel.max_threads:
        yield f"{launch.threads} threads a block, compiled for at most {kernel.max_threads} (__launch_bounds__)"
    if kernel.block is not None and launch.block != kernel.block:
        yield f"block {launch.block}, compiled for exactly {kernel.block} (__block_size__)"
    most = threads_by_registers(kernel)
    if launch.threads > most:
        yield (
            f"{launch.threads} threads a block of {kernel.registers} registers each, the {REGISTERS} registers of a "
            f"block suffice for {most} (with __launch_bounds__ the compiler keeps to it)"
        )
    if kernel.cluster is not None:
        if any(size % each for size, each in zip(launch.grid, kernel.cluster, strict=True)):
            yield f"grid {launch.grid} is no multiple of the cluster {kernel.cluster} (__cluster_dims__)"
        if math.prod(kernel.cluster) > MOST_CLUSTER:
            yield f"cluster {kernel.cluster} of {math.prod(kernel.cluster)} blocks, must be at most {MOST_CLUSTER}"


def _of_arguments(launch: Launch, kernel: KernelFacts) -> Iterator[str]:
    given, taken = launch.arguments, kernel.parameters
    if len(given) != len(taken):
        yield f"{len(given)} arguments, the kernel takes {len(taken)}"
        return
    for position, (have, want) in enumerate(zip(given, taken, strict=True)):
        if have.size != want.size:
            passed = f"{have.size} bytes" if have.size else "neither an int (an address) nor a NumPy scalar"
            yield f"argument {position} ({have.type}) is {passed}, the kernel's parameter {want.size} bytes"
        elif have.real != want.real and want.size in (4, 8):
            kind = "a floating-point number" if want.real else "an address or an integer"
            yield f"argument {position} ({have.type}), the kernel's parameter is {kind} of {want.size} bytes"


def resident_blocks(kernel: KernelFacts | None, threads: int, shared_bytes: int, limits: DeviceLimits) -> int:
    """Blocks of `threads` threads and `shared_bytes` of dynamic shared memory that the whole device holds at once.

    As cuOccupancyMaxActiveBlocksPerMultiprocessor times the multiprocessors; like that, it does not ask launch bounds.
    `kernel` None: registers and static shared memory are not known and not counted.
    """
    warps = -(-threads // WARP)
    most = MOST_BLOCKS.get(limits.compute_capability, 32)
    each = min(most, limits.threads_per_multiprocessor // WARP // warps)
    shared = shared_bytes + SYSTEM_SHARED_BYTES + (kernel.static_shared if kernel else 0)
    each = min(each, limits.shared_bytes_per_multiprocessor // (-(-shared // SHARED_UNIT) * SHARED_UNIT))
    if kernel is not None:
        each = min(each, threads_by_registers(kernel) // WARP // warps)
    return each * limits.multiprocessors


def _of_residency(launch: Launch, kernel: KernelFacts | None, limits: DeviceLimits) -> Iterator[str]:
    blocks = math.prod(launch.grid)
    room = resident_blocks(kernel, launch.threads, launch.shared_bytes, limits)
    if blocks > room:
        yield (
            f"a cooperative launch of {blocks} blocks, of which only {room} are resident at once: "
            "a grid barrier could not be passed. Size the grid by resident_blocks()"
        )
