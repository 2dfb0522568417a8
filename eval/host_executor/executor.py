"""Run a candidate's `forward` unmodified on CPU tensors: its launches go to the compiled host library.

    namespace = host_namespace(candidate_source)          # limits=H200_LIMITS, seed=0
    model = namespace["ModelNew"]((64, 256, 256))
    y = model(x)                                          # x a CPU tensor; a fault raises HostFault

What this can show: the bits of every operation, missing barriers and waits, overruns, deadlocks, unwritten outputs.
What it cannot: time, a proof under the memory model (fences are all strong here, races that need two threads at the
very same instant are not found), registers and occupancy limits they set, and the device's `rsqrtf` (correctly rounded
here, up to two ulps off there). x86-64 Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from kbsub.eval.host_executor.build import HostKernel, HostUnavailable, build, require_host, runtime
from kbsub.eval.host_executor.memory import GuardedMemory, transfer

KINDS = ("none", "memory", "misaligned", "deadlock", "divergence", "grid", "barrier", "shared", "stack", "trap",
         "timeout", "crash")  # fmt: skip  # enum Kind of runtime.h
MAX_WORKERS = 64
_ONE_LAUNCH = threading.Lock()  # the runtime keeps the launch it works on in global variables
MAX_BLOCKS_PER_MULTIPROCESSOR = 32
LOADER_NAMES = ("DeviceLimits", "device_limits", "cuda_module", "DEVICE_TYPE")  # what `adopt` replaces, or makes
RESERVED_SHARED_BYTES = 1024  # the driver's own, for each resident block


@dataclass(frozen=True)
class Limits:
    """The fields of a candidate's own DeviceLimits: bytes, threads, counts."""

    index: int
    compute_capability: int
    multiprocessors: int
    shared_bytes_per_block: int
    shared_bytes_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    fp32_to_fp64_ratio: int


H200_LIMITS = Limits(0, 90, 132, 232_448, 233_472, 2048, 60 << 20, 2)
A100_LIMITS = Limits(0, 80, 108, 166_912, 167_936, 2048, 40 << 20, 2)
RTX3090_LIMITS = Limits(0, 86, 82, 101_376, 102_400, 1536, 6 << 20, 64)
RTX4090_LIMITS = Limits(0, 89, 128, 101_376, 102_400, 1536, 72 << 20, 64)
B200_LIMITS = Limits(0, 100, 148, 232_448, 233_472, 2048, 126 << 20, 2)
RTX5090_LIMITS = Limits(0, 120, 170, 101_376, 102_400, 1536, 96 << 20, 64)
# A device with few multiprocessors: a persistent kernel then has few blocks, and small cases run fast.
SMALL_LIMITS = replace(H200_LIMITS, multiprocessors=4)


class HostFault(RuntimeError):
    """A fault of a kernel: `kind` (of KINDS), `kernel`, `block` and `thread` (x, y, z), `line` of CUDA_SOURCE or 0."""

    def __init__(self, kind: str, kernel: str, block: tuple[int, ...], thread: tuple[int, ...], line: int, text: str):
        where = f", line {line} of CUDA_SOURCE" if line else ""
        super().__init__(f"{kind} fault in kernel {kernel}, block {block}, thread {thread}{where}: {text}")
        self.kind, self.kernel, self.block, self.thread, self.line = kind, kernel, block, thread, line


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class _Launch(ctypes.Structure):  # struct Launch of runtime.h
    _fields_ = [
        ("call", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("kernel", ctypes.c_char_p),
        ("grid", _Dim),
        ("block", _Dim),
        ("shared_bytes", ctypes.c_uint),
        ("static_bytes", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("cooperative", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("timeout_s", ctypes.c_double),
    ]


class _Report(ctypes.Structure):  # the head of struct Report of runtime.h
    _fields_ = [
        ("failed", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("write", ctypes.c_int),
        ("line", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("block", _Dim),
        ("thread", _Dim),
        ("text", ctypes.c_char * 3000),
    ]


def _dim(values: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*(int(v) for v in values), 1, 1)[:3]
    return x, y, z


class HostModule:
    """Takes the place of a candidate's CudaModule: the same methods, on the host library of its source."""

    def __init__(self, executor: HostExecutor, source: str, options: tuple[str, ...], limits: Any) -> None:
        self.executor, self.limits, self.index = executor, limits, 0
        self.library = build(source, tuple(options))

    def resident_blocks(self, name: str, threads: int, shared_bytes: int) -> int:
        """Blocks the whole device holds at once, by threads and dynamic shared memory (registers are unknown here)."""
        self._kernel(name)
        limits = self.limits
        each = min(limits.threads_per_multiprocessor // (-(-threads // 32) * 32), MAX_BLOCKS_PER_MULTIPROCESSOR)
        each = min(each, limits.shared_bytes_per_multiprocessor // (shared_bytes + RESERVED_SHARED_BYTES))
        return int(each * limits.multiprocessors)

    def _kernel(self, name: str) -> HostKernel:
        if name not in self.library.kernels:
            raise ValueError(f"kernel {name} is not in CUDA_SOURCE, which has {sorted(self.library.kernels)}")
        return self.library.kernels[name]

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """As CudaModule.launch. ValueError for a launch that a device would refuse; HostFault for a fault."""
        kernel = self._kernel(name)
        self._check(kernel, _dim(grid), _dim(block), shared_bytes, cooperative)
        self.executor.launches[name] = self.executor.launches.get(name, 0) + 1
        static_bytes = self.library.static_bytes
        self.executor.execute(kernel, static_bytes, _dim(grid), _dim(block), arguments, shared_bytes, cooperative)

    def _check(
        self,
        kernel: HostKernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cooperative: bool,
    ) -> None:
        threads = block[0] * block[1] * block[2]
        if not (1 <= threads <= 1024 and block[2] <= 64):
            raise ValueError(f"{kernel.name}: block {block} has {threads} threads, must be 1 to 1024")
        if min(grid) < 1 or grid[0] > 2**31 - 1 or max(grid[1:]) > 65_535:
            raise ValueError(f"{kernel.name}: grid {grid}, must be at least 1, y and z at most 65535")
        if shared_bytes > self.limits.shared_bytes_per_block:
            raise ValueError(
                f"{kernel.name}: {shared_bytes} bytes of shared memory, "
                f"the device allows {self.limits.shared_bytes_per_block}"
            )
        room = self.resident_blocks(kernel.name, threads, shared_bytes)
        blocks = grid[0] * grid[1] * grid[2]
        if cooperative and blocks > room:
            text = (
                f"a cooperative launch of {blocks} blocks, of which only {room} are resident at once: "
                "a grid barrier could not be passed. Size the grid by resident_blocks()"
            )
            raise HostFault("grid", kernel.name, (0, 0, 0), (0, 0, 0), 0, text)


class HostExecutor:
    """Guarded memory and the settings of launches: `seed` orders threads and blocks (0 in order, 1 reversed, else
    random), `workers` processes (default: the cores), `timeout_s` seconds for a launch. `launches` counts by kernel."""

    def __init__(self, *, seed: int = 0, workers: int | None = None, timeout_s: float = 120.0) -> None:
        self.seed, self.timeout_s = seed, timeout_s
        self.workers = min(workers or len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.memory = GuardedMemory()
        self.launches: dict[str, int] = {}
        self._depth = 0

    def execute(
        self,
        kernel: HostKernel,
        static_bytes: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: tuple[Any, ...],
        shared_bytes: int,
        cooperative: bool,
    ) -> None:
        """One launch, finished on return. HostFault for a fault."""
        held = [_argument(self.memory, kernel, i, value) for i, value in enumerate(arguments)]
        if len(held) != len(kernel.parameters):
            raise ValueError(f"{kernel.name}: {len(held)} arguments, the kernel takes {len(kernel.parameters)}")
        addresses = (ctypes.c_void_p * max(len(held), 1))(*(ctypes.addressof(value) for value in held))
        order = _Launch(
            ctypes.cast(kernel.call, ctypes.c_void_p),
            addresses,
            kernel.name.encode(),
            _Dim(*grid),
            _Dim(*block),
            shared_bytes,
            static_bytes,
            min(self.workers, grid[0] * grid[1] * grid[2]),
            int(cooperative),
            self.seed,
            self.timeout_s,
        )
        core = runtime()
        page = self.memory.empty((core.kbsub_report_bytes(),), torch.uint8, "the launch report").zero_()
        report = _Report.from_address(page.data_ptr())
        with _ONE_LAUNCH:
            code = core.kbsub_launch(ctypes.byref(order), ctypes.byref(report))
        if code == -1:
            raise KeyboardInterrupt
        kind, text = KINDS[report.kind], report.text.decode(errors="replace")
        block_at, thread_at = ((d.x, d.y, d.z) for d in (report.block, report.thread))
        if code and kind == "memory":
            text += " " + self.memory.describe(report.address)
        if code:
            text = text or "the worker processes could not be started"
            raise HostFault(kind, kernel.name, block_at, thread_at, report.line, text)
        outside = self.memory.overwritten()
        if outside:
            text, unknown = f"some thread wrote {outside} (seen after the launch: which one is not known)", (-1, -1, -1)
            raise HostFault("memory", kernel.name, unknown, unknown, 0, text)

    def guard_model(self, model: torch.nn.Module) -> None:
        """Move parameters and buffers into guarded memory, once."""
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.numel() and not self.memory.owns(tensor):
                tensor.data = self.memory.copy(tensor.data, name)

    def call(self, model: torch.nn.Module, method: Any, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """`method(*inputs)` with its CPU inputs copied to, and everything it allocates put in, guarded memory.

        An input that the candidate wrote is copied back, so that the caller sees it changed.
        """
        if self._depth:
            return method(*inputs, **keywords)

        def guard(value: Any, name: str = "input") -> Any:
            plain = isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.layout == torch.strided
            return self.memory.copy(value, name) if plain and value.numel() and not self.memory.owns(value) else value

        self.guard_model(model)
        guarded = tuple(guard(value, f"input {i}") for i, value in enumerate(inputs))
        with self._active():
            result = method(*guarded, **{key: guard(value, key) for key, value in keywords.items()})
        for given, used in zip(inputs, guarded, strict=True):
            if given is not used and not _same_bits(given, used):
                transfer(used, given)
        return result

    @contextlib.contextmanager
    def _active(self) -> Iterator[None]:
        self._depth += 1
        try:
            with _GuardedAllocations(self.memory):
                yield
        finally:
            self._depth -= 1


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(a.element_size())
    if integer is None:
        return False
    return torch.equal(a.detach().contiguous().view(integer), b.contiguous().view(integer))


def _argument(memory: GuardedMemory, kernel: HostKernel, position: int, value: Any) -> Any:
    """A ctypes object that holds one kernel argument, checked against the kernel's parameter."""
    code = kernel.parameters[position] if position < len(kernel.parameters) else "?"
    where = f"{kernel.name}: argument {position}"
    if isinstance(value, np.generic):
        given = f"{value.dtype.kind}{value.dtype.itemsize}"
        if given != code:
            raise ValueError(f"{where} is a numpy {value.dtype}, the kernel's parameter is {code}")
        return (ctypes.c_uint8 * value.dtype.itemsize).from_buffer_copy(value.tobytes())
    if not isinstance(value, int) or code != "p":
        raise ValueError(
            f"{where} is {type(value).__name__}, the kernel's parameter is {code}: "
            "addresses are int (tensor.data_ptr()), scalars numpy scalars of the parameter's own type"
        )
    if value and memory.find(value) is None:
        raise ValueError(f"{where} is the address of no tensor that this forward was given or made")
    return ctypes.c_uint64(value)


class _GuardedAllocations(TorchFunctionMode):
    """Every CPU tensor that torch makes inside a forward lands in guarded memory; `empty` ones stay poisoned."""

    UNWRITTEN = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}

    def __init__(self, memory: GuardedMemory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")

        def guard(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
                return value
            if value.numel() == 0 or self.memory.owns(value):
                return value
            if name in self.UNWRITTEN:
                return self.memory.like(value, f"output of torch.{name}{tuple(value.shape)}")
            return self.memory.copy(value, f"result of torch.{name}{tuple(value.shape)}")

        return tree_map(guard, result)


def host_namespace(
    candidate_source: str,
    limits: Limits = H200_LIMITS,
    *,
    seed: int = 0,
    workers: int | None = None,
    timeout_s: float = 120.0,
    namespace: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Execute a candidate file and turn its launches to the host; returns its namespace.

    `namespace`: the dict to execute in (KernelBench uses the reference's own). `ModelNew` in it is a subclass whose
    `forward` (and `forward_with_stats`) calls the candidate's, unmodified, on guarded copies of its CPU inputs; the
    executor is under "host_executor". A candidate without CUDA_SOURCE (plain torch) is left alone and just runs.
    """
    space: dict[str, Any] = namespace if namespace is not None else {"__name__": "candidate"}
    exec(compile(candidate_source, "<candidate>", "exec"), space)
    adopt(space, limits, HostExecutor(seed=seed, workers=workers, timeout_s=timeout_s))
    return space


def adopt(space: dict[str, Any], limits: Limits, executor: HostExecutor) -> None:
    """Patch an already executed candidate namespace: cuda_module, device_limits, DEVICE_TYPE and ModelNew.

    HostUnavailable where this machine has no C++ compiler or another processor, and for a file that launches by other
    means than the shared loader lines.
    """
    space["host_executor"] = executor
    if "CUDA_SOURCE" not in space:
        return
    require_host()
    if missing := [name for name in LOADER_NAMES if name not in space]:
        raise HostUnavailable(
            f"has CUDA_SOURCE but not {', '.join(missing)}: only kernels launched through the shared loader lines "
            "(submissions/level1_40/split_flat.py has them) run on the host"
        )
    own_limits = space["DeviceLimits"](**asdict(limits))
    modules: dict[tuple[str, tuple[str, ...]], HostModule] = {}

    def cuda_module(source: str, options: tuple[str, ...], index: int) -> HostModule:
        key = (source, tuple(options))
        if key not in modules:
            modules[key] = HostModule(executor, source, tuple(options), own_limits)
        return modules[key]

    space["DEVICE_TYPE"] = "cpu"
    space["device_limits"] = lambda index: own_limits
    space["cuda_module"] = cuda_module
    original = space["ModelNew"]

    def through(name: str) -> Any:
        def method(self: Any, *inputs: Any, **keywords: Any) -> Any:
            return executor.call(self, getattr(super(hosted, self), name), inputs, keywords)

        method.__name__ = name
        return method

    names = [name for name in ("forward", "forward_with_stats") if hasattr(original, name)]
    hosted: Any = type("ModelNew", (original,), {name: through(name) for name in names})
    space["ModelNew"] = hosted
