"""Compile every CUDA candidate for every architecture, without a GPU, and say what the compiler made of it.

`kbsub measure resources` is its command. Uses the NVRTC binding, as the candidates' own loader does. Must not know
torch beyond CPU tensors, nor any GPU.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kbsub.adapters.task import dtype_of
from kbsub.eval.host_executor.cubin_facts import KernelFacts, NoNvrtc, compiled_facts, cubin_of, read_cubin
from kbsub.eval.host_executor.launch_limits import Launch, argument, dim, refusals, resident_blocks
from kbsub.eval.host_executor.limits import (
    A100_LIMITS,
    B200_LIMITS,
    H200_LIMITS,
    RTX3090_LIMITS,
    RTX4090_LIMITS,
    RTX5090_LIMITS,
    Limits,
)
from kbsub.eval.tasks.cases import CaseShape
from kbsub.eval.tasks.grid import folder_shapes
from kbsub.eval.tasks.task_file import read_task_file

# One device of each architecture that the sources promise to compile for: geometry and options may depend on it.
DEVICES: dict[str, Limits] = {
    "sm_80": A100_LIMITS,
    "sm_86": RTX3090_LIMITS,
    "sm_89": RTX4090_LIMITS,
    "sm_90": H200_LIMITS,
    "sm_100": B200_LIMITS,
    "sm_120": RTX5090_LIMITS,
}
# (rows, width) at which the [[grid]] of a task leads a forward through the sets of options it uses; its folder's cases
# and benchmarks are asked too. Nothing is computed.
SHAPES = ((1, 64), (2, 4096), (2, 10_000), (2, 20_672), (2, 131_072), (300, 131_072), (16, 4_194_304), (3, 1001))
BUDGET_FILE = "resources.toml"  # of a task folder
REGISTER_STEP = 8  # registers are given out in eights; a newer ptxas may use a few more within one

_FUNCTION = re.compile(r"Function properties for (\w+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")
_FUSED = re.compile(r"^\s*fma\.r[nzmp]\S*", re.MULTILINE)
# Without a rounding mode, ptxas may contract a product into a sum.
_LOOSE_PRODUCT = re.compile(r"^\s*mul\.f(?:32|64)\b", re.MULTILINE)
_LOOSE_SUM = re.compile(r"^\s*(?:add|sub)\.f(?:32|64)\b", re.MULTILINE)
# Functions of CUDA's own that a source may call: in them sums have no rounding mode, and exponentials and reciprocals
# of arguments that were scaled before flush what cannot be subnormal.
_LIBRARY = re.compile(r"\b(?:erff?|expf?|tanhf?)\(")
_FLUSHING = re.compile(r"\S+\.ftz\S*")
LIBRARY_FLUSHES = ("ex2.approx.ftz.f32", "rcp.approx.ftz.f32")


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers a thread; static shared memory, spill and stack in bytes."""

    registers: int
    shared: int
    spill: int
    stack: int


@dataclass(frozen=True)
class Compiled:
    """`log` is the compiler's own, `ptx` what it handed to ptxas, `resources` by kernel; `error` when it failed.

    `facts` by kernel, from the cubin; none where only PTX was asked for.
    """

    log: str
    ptx: str
    resources: dict[str, Resources]
    error: str | None = None
    facts: dict[str, KernelFacts] = field(default_factory=dict)


def compile_source(source: str, options: Sequence[str], arch: str) -> Compiled:
    """Compile with NVRTC to a cubin for `arch` ("sm_90"), or to PTX alone ("compute_90").

    Raises ImportError where the NVRTC binding (CuPy) is not installed.
    """
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source, "candidate.cu", (), ())
    verbose = ("--ptxas-options=-v",) if arch.startswith("sm_") else ()
    error = None
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={arch}", *verbose))
    except nvrtc.NVRTCError as caught:
        error = str(caught)
    log = nvrtc.getProgramLog(program).replace("\0", "")
    ptx = "" if error else nvrtc.getPTX(program).decode()
    facts = read_cubin(cubin_of(nvrtc, program), ptx) if verbose and not error else {}
    nvrtc.destroyProgram(program)
    return Compiled(log, ptx, resources_of(log), error, facts)


def resources_of(log: str) -> dict[str, Resources]:
    """Parse ptxas's -v lines: {kernel: Resources}."""
    found: dict[str, Resources] = {}
    kernel, stack, spill = "", 0, 0
    for line in log.splitlines():
        if match := _FUNCTION.search(line):
            kernel = match[1]
        elif match := _SPILLS.search(line):
            stack, spill = int(match[1]), int(match[2]) + int(match[3])
        elif (match := _USED.search(line)) and kernel:
            shared = _SHARED.search(match[2])
            found[kernel] = Resources(int(match[1]), int(shared[1]) if shared else 0, spill, stack)
    return found


class Recorder:
    """Stands where a CudaModule stands; notes each launch and launches nothing.

    `launches`: as the loader would hand them to the driver, each with the first shape that asked for it.
    """

    def __init__(self, source: str, options: tuple[str, ...], limits: Any) -> None:
        self.source, self.options, self.limits, self.index = source, options, limits, 0
        self.launches: dict[Launch, str] = {}
        self.shape = ""  # of the call under way
        self._allowed: dict[str, int] = {}

    @property
    def facts(self) -> dict[str, KernelFacts]:
        """NotCompiled where NVRTC is missing or refuses the source."""
        return compiled_facts(self.source, self.options, f"sm_{self.limits.compute_capability}")

    def resident_blocks(self, name: str, threads: int, shared_bytes: int) -> int:
        """As CudaModule's; by threads and dynamic shared memory alone where there is no NVRTC."""
        self._allow(name, shared_bytes)
        try:
            kernel = self.facts[name]
        except NoNvrtc:
            kernel = None
        return resident_blocks(kernel, threads, shared_bytes, self.limits)

    def _allow(self, name: str, shared_bytes: int) -> int:
        self._allowed[name] = max(self._allowed.get(name, 0), shared_bytes)
        return self._allowed[name]

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        shared_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Noted, not made."""
        allowed, given = self._allow(name, shared_bytes), tuple(map(argument, arguments))
        launch = Launch(name, dim(grid), dim(block), given, shared_bytes, cooperative, allowed)
        self.launches.setdefault(launch, self.shape)


class Rehearsal:
    """A candidate's forward on tensors without contents, on a device of `limits`: what would be launched.

    `modules`: a Recorder for each set of NVRTC options that was asked for. Tensors are torch's "meta" ones: any size
    costs nothing, and every address is 0, or `address` where a test wants one that is not aligned.
    """

    def __init__(self, candidate_source: str, limits: Limits) -> None:
        space: dict[str, Any] = {"__name__": "candidate"}
        exec(compile(candidate_source, "<candidate>", "exec"), space)
        own_limits = space["DeviceLimits"](**asdict(limits))
        self.modules: dict[tuple[str, ...], Recorder] = {}
        self._model: tuple[Any, Any] = (None, None)
        self._shape = ""
        self.launched = 0  # calls that launched something

        def cuda_module(source: str, options: tuple[str, ...], index: int) -> Recorder:
            module = self.modules.setdefault(tuple(options), Recorder(source, tuple(options), own_limits))
            module.shape = self._shape
            return module

        space |= {"DEVICE_TYPE": "meta", "device_limits": lambda index: own_limits, "cuda_module": cuda_module}
        self.space = space

    def forward(self, shape: CaseShape, precision: str, address: int = 0) -> None:
        """One call on inputs of this shape, `address` where they begin. ValueError where the file does not take it."""
        import torch

        dtype, kept = dtype_of(precision), torch.Tensor.data_ptr
        if self._model[0] != (shape.init, precision):
            with torch.device("meta"):
                self._model = (shape.init, precision), self.space["ModelNew"](*shape.init).to(dtype)
        inputs = [torch.empty(each, dtype=dtype, device="meta") for each in shape.inputs]
        own = set(map(id, inputs))
        self._shape = f"{'x'.join(map(str, shape.inputs[0]))} {precision}"
        for module in self.modules.values():  # a file may keep its module
            module.shape = self._shape
        torch.Tensor.data_ptr = lambda tensor: address if id(tensor) in own else 0  # type: ignore[assignment,method-assign]
        try:
            with torch.no_grad():
                self._model[1](*inputs)
            self.launched += 1
        finally:
            torch.Tensor.data_ptr = kept  # type: ignore[method-assign]

    def refused(self) -> list[str]:
        """Every launch so far that the driver would refuse, each rule once, in words. NotCompiled without NVRTC."""
        return [line for module in self.modules.values() for line in refused_launches(module, module.facts)]


def refused_launches(module: Recorder, facts: Mapping[str, KernelFacts]) -> list[str]:
    """Which noted launches the driver would refuse, each kernel and rule with the first shape that breaks it."""
    found: dict[str, str] = {}
    for launch, shape in module.launches.items():
        if launch.kernel not in facts:
            found.setdefault(f"{launch.kernel}: no kernel of that name, the source has {sorted(facts)}", shape)
        for text in refusals(launch, facts.get(launch.kernel), module.limits):
            found.setdefault(text, shape)
    return [
        f"{text}; at {shape}, compute capability {module.limits.compute_capability}" for text, shape in found.items()
    ]


def rehearse(
    candidate_source: str, precisions: Iterable[str], limits: Limits, shapes: Iterable[CaseShape]
) -> Rehearsal:
    """The launches of a candidate on such a device over shapes and precisions."""
    rehearsal, asked = Rehearsal(candidate_source, limits), list(shapes)
    for precision in precisions:
        for shape in asked:
            with contextlib.suppress(ValueError):  # a shape that the file does not take
                rehearsal.forward(shape, precision)
    return rehearsal


def shapes_of(folder: Path) -> list[CaseShape]:
    """What candidates of a task folder are rehearsed with: SHAPES as its task.toml reads them, cases, benchmarks."""
    return folder_shapes(folder, read_task_file(folder).grid, SHAPES)


def option_sets(
    candidate_source: str, precisions: Iterable[str], limits: Limits, shapes: Iterable[CaseShape]
) -> list[tuple[str, ...]]:
    """The NVRTC option tuples that a candidate's forward asks for on such a device, over shapes and precisions."""
    return list(rehearse(candidate_source, precisions, limits, shapes).modules)


def findings(
    stem: str,
    source: str,
    options: tuple[str, ...],
    arch: str,
    compiled: Compiled,
    budget: Mapping[str, Mapping[str, int]],
    module: Recorder | None = None,
) -> list[str]:
    """What is wrong with one build, each in a line; of `module`, the launches that the driver would refuse."""
    where = f"{stem} for {arch} with {' '.join(o for o in options if o.startswith('-D')) or 'its options'}"
    if compiled.error:
        return [f"{where}: {compiled.error}\n{compiled.log}"]
    found = [f"{where}: {line.strip()}" for line in compiled.log.splitlines() if re.search(r"\bwarning\s*[#:]", line)]
    calls_library = _LIBRARY.search(source) is not None
    flushing = [each for each in _FLUSHING.findall(compiled.ptx) if not (calls_library and each in LIBRARY_FLUSHES)]
    if flushing:
        found.append(f"{where}: PTX flushes subnormals ({len(flushing)} instructions with .ftz)")
    found += [f"{where}: {text}" for text in unasked_fusion(source, options, arch, compiled.ptx)]
    for kernel, used in compiled.resources.items():
        allowed = budget.get(kernel)
        if allowed is None:
            found.append(f"{where}: kernel {kernel} has no budget; remake it with --write")
            continue
        over = [f"{key} {value} > {allowed[key]}" for key, value in asdict(used).items() if value > allowed[key]]
        if over:
            found.append(f"{where}: kernel {kernel} over its budget: {', '.join(over)}")
    if module is not None:
        found += [f"{where}: {text}" for text in refused_launches(module, compiled.facts)]
    return found


def unasked_fusion(source: str, options: tuple[str, ...], arch: str, ptx: str) -> list[str]:
    """Fused multiply-adds of `ptx` that are not there with --fmad=false, and operations that ptxas could still fuse."""
    strict = tuple(o for o in options if not re.match(r"--?fmad", o)) + ("--fmad=false",)
    written = len(_FUSED.findall(compile_source(source, strict, arch.replace("sm_", "compute_")).ptx))
    made = len(_FUSED.findall(ptx))
    found = [f"PTX has {made} fused multiply-adds, the source asks for {written}"] if made != written else []
    if _LOOSE_PRODUCT.search(ptx) and _LOOSE_SUM.search(ptx) and not _LIBRARY.search(source):
        found.append("PTX has products and sums without rounding mode: ptxas may fuse them; write __fmul_rn, __fadd_rn")
    return found


def source_and_builds(path: Path, precisions: Iterable[str], arch: str) -> tuple[str, dict[tuple[str, ...], Recorder]]:
    """(CUDA_SOURCE, {options: the launches asked for with them}) of a candidate file on a device of `arch`."""
    rehearsal = rehearse(path.read_text(encoding="utf-8"), precisions, DEVICES[arch], shapes_of(path.parent))
    return str(rehearsal.space["CUDA_SOURCE"]), rehearsal.modules


def budget_of(built: Iterable[Mapping[str, Resources]]) -> dict[str, dict[str, int]]:
    """The least budget that covers all builds: registers up to the next eight, the rest as measured."""
    budget: dict[str, dict[str, int]] = {}
    for resources in built:
        for kernel, used in resources.items():
            least = asdict(used) | {"registers": -(-used.registers // REGISTER_STEP) * REGISTER_STEP}
            before = budget.setdefault(kernel, dict.fromkeys(least, 0))
            budget[kernel] = {key: max(before[key], least[key]) for key in least}
    return budget


def read_budget(path: Path) -> dict[str, dict[str, dict[str, int]]]:
    """{stem: {kernel: {registers, shared, spill, stack}}}; empty where there is no file."""
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return table


def write_budget(path: Path, budgets: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    """As read by `read_budget`, a line a kernel."""
    lines = [
        "# What each kernel of this folder may use on any of sm_80, 86, 89, 90, 100, 120: registers a thread; static",
        "# shared memory, spill and stack in bytes. Remade with:",
        "# kbsub measure resources --write CANDIDATE ...",
    ]
    for stem, kernels in sorted(budgets.items()):
        lines += ["", f"[{stem}]"]
        for kernel, allowed in sorted(kernels.items()):
            lines.append(f"{kernel} = {{ " + ", ".join(f"{key} = {value}" for key, value in allowed.items()) + " }")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
