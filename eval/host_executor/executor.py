"""Run a candidate's `forward` unmodified on CPU tensors: its launches go to the compiled host library.

    namespace = host_namespace(candidate_source)          # limits=H200_LIMITS, seed=0
    model = namespace["ModelNew"]((64, 256, 256))
    y = model(x)                                          # x a CPU tensor; a fault raises HostFault

What this can show: the bits of every operation, missing barriers and waits, overruns, deadlocks, unwritten outputs.
What it cannot: time, a proof under the memory model (fences are all strong here, races that need two threads at the
very same instant are not found), and the device's `rsqrtf` (correctly rounded here, up to two ulps off there).
Launches are held against the device's limits with the facts of the compiled kernel (launch_limits.py) where NVRTC is
installed; `executor.limits_checked` says whether. x86-64 Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from kbsub.eval.host_executor.build import HostKernel, HostUnavailable, build, require_host, runtime
from kbsub.eval.host_executor.cubin_facts import KernelFacts, NotCompiled, compiled_facts
from kbsub.eval.host_executor.launch_limits import Launch, LaunchRefused, argument, dim, refusals, resident_blocks
from kbsub.eval.host_executor.limits import H200_LIMITS, Limits
from kbsub.eval.host_executor.memory import GuardedMemory, transfer

KINDS = ("none", "memory", "misaligned", "deadlock", "divergence", "grid", "barrier", "shared", "stack", "trap",
         "timeout", "crash")  # fmt: skip  # enum Kind of runtime.h
MAX_WORKERS = 64
_ONE_LAUNCH = threading.Lock()  # the runtime keeps the launch it works on in global variables
LOADER_NAMES = ("DeviceLimits", "device_limits", "cuda_module", "DEVICE_TYPE")  # what `adopt` replaces, or makes


class HostFault(RuntimeError):
    """A fault of a kernel: `kind` (of KINDS), `kernel`, `block` and `thread` (x, y, z), `line` of CUDA_SOURCE or 0."""

    def __init__(self, kind: str, kernel: str, block: tuple[int, ...], thread: tuple[int, ...], line: int, text: str):
        where = f", line {line} of CUDA_SOURCE" if line else ""
        super().__init__(f"{kind} fault in kernel {kernel}, block {block}, thread {thread}{where}: {text}")
        self.kind, self.kernel, self.block, self.thread, self.line = kind, kernel, block, thread, line


class LimitsNotChecked(UserWarning):
    """Launches run, but nobody has asked whether a device would take them."""


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


class HostModule:
    """Takes the place of a candidate's CudaModule: the same methods, on the host library of its source.

    `facts`: of each kernel as NVRTC compiles it for the device of `limits`; None where `executor.unchecked` says why.
    """

    def __init__(self, executor: HostExecutor, source: str, options: tuple[str, ...], limits: Any) -> None:
        self.executor, self.limits, self.index = executor, limits, 0
        self.library = build(source, tuple(options))
        self.facts = executor.facts_of(source, tuple(options), f"sm_{limits.compute_capability}")
        self.allowed: dict[str, int] = {}  # MAX_DYNAMIC_SHARED_SIZE_BYTES by kernel, as the loader sets it

    def resident_blocks(self, name: str, threads: int, shared_bytes: int) -> int:
        """Blocks the whole device holds at once; without `facts`, by threads and dynamic shared memory alone."""
        self._kernel(name, shared_bytes)
        return resident_blocks(self._facts_of(name), threads, shared_bytes, self.limits)

    def _kernel(self, name: str, shared_bytes: int) -> HostKernel:
        """As CudaModule.kernel: more dynamic shared memory than ever before is asked for."""
        if name not in self.library.kernels:
            raise LaunchRefused(f"kernel {name} is not in CUDA_SOURCE, which has {sorted(self.library.kernels)}")
        self.allowed[name] = max(self.allowed.get(name, 0), shared_bytes)
        return self.library.kernels[name]

    def _facts_of(self, name: str) -> KernelFacts | None:
        return self.facts[name] if self.facts is not None else None

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """As CudaModule.launch. LaunchRefused for a launch that a device would refuse; HostFault for a fault."""
        kernel = self._kernel(name, shared_bytes)
        given, allowed = tuple(map(argument, arguments)), self.allowed[name]
        self._check(Launch(name, dim(grid), dim(block), given, shared_bytes, cooperative, allowed))
        self.executor.launches[name] = self.executor.launches.get(name, 0) + 1
        static_bytes = self.library.static_bytes
        self.executor.execute(kernel, static_bytes, dim(grid), dim(block), arguments, shared_bytes, cooperative)

    def _check(self, launch: Launch) -> None:
        facts = self._facts_of(launch.kernel)
        if refused := refusals(replace(launch, cooperative=False), facts, self.limits):
            raise LaunchRefused("; ".join(refused))
        if too_many := refusals(launch, facts, self.limits):
            raise HostFault("grid", launch.kernel, (0, 0, 0), (0, 0, 0), 0, too_many[0])


class HostExecutor:
    """Guarded memory and the settings of launches: `seed` orders threads and blocks (0 in order, 1 reversed, else
    random), `workers` processes (default: the cores), `timeout_s` seconds for a launch. `launches` counts by kernel.
    `unchecked` says why launches were not held against launch bounds, registers and parameters; empty: all were."""

    def __init__(self, *, seed: int = 0, workers: int | None = None, timeout_s: float = 120.0) -> None:
        self.seed, self.timeout_s = seed, timeout_s
        self.workers = min(workers or len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.memory = GuardedMemory()
        self.launches: dict[str, int] = {}
        self.unchecked: list[str] = []
        self._depth = 0

    @property
    def limits_checked(self) -> bool:
        """Whether every launch so far was checked with the facts of its compiled kernel."""
        return not self.unchecked

    def facts_of(self, source: str, options: tuple[str, ...], arch: str) -> dict[str, KernelFacts] | None:
        """Facts by kernel; None, a warning and a line in `unchecked` where NVRTC is missing or refuses the source."""
        try:
            return compiled_facts(source, options, arch)
        except NotCompiled as error:
            self.unchecked.append(str(error))
            first = str(error).splitlines()[0]
            text = f"launches are not checked against launch bounds, registers and parameters: {first}"
            warnings.warn(text, LimitsNotChecked, stacklevel=2)
            return None

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
            raise LaunchRefused(f"{kernel.name}: {len(held)} arguments, the kernel takes {len(kernel.parameters)}")
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
            raise LaunchRefused(f"{where} is a numpy {value.dtype}, the kernel's parameter is {code}")
        return (ctypes.c_uint8 * value.dtype.itemsize).from_buffer_copy(value.tobytes())
    if not isinstance(value, int) or code != "p":
        raise LaunchRefused(
            f"{where} is {type(value).__name__}, the kernel's parameter is {code}: "
            "addresses are int (tensor.data_ptr()), scalars numpy scalars of the parameter's own type"
        )
    if value and memory.find(value) is None:
        raise LaunchRefused(f"{where} is the address of no tensor that this forward was given or made")
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
