"""What the sanitizer runs: the kernels there are, shapes that reach them, and one candidate over its shapes.

Knows no sanitizer: the same code runs on the CPU through the host executor, where a test says that the shapes reach
every kernel.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from kbsub.adapters.task import PRECISIONS, dtype_of
from kbsub.eval.host_executor import kernel_names
from kbsub.eval.run.project import SUBMISSIONS
from kbsub.eval.tasks.declarations import read_declarations

FOLDERS = ("level1_40", "local_layernorm_tokens")
# Largest difference from float64 in units of the largest output.
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-3, "bf16": 1e-2, "half sums": 2e-2}
WIDEST_HALF_SUM = 50_000  # the sum of the squares ends at 65,504


class LaunchCase(NamedTuple):
    """x (rows, width), beginning `shift` elements into its allocation."""

    rows: int
    width: int
    shift: int = 0
    affine: bool = True


class InspectedFile(NamedTuple):
    """A file with CUDA kernels. `half_sums`: declared a control, and its sums are half where it takes halves."""

    name: str  # level1_40/reference_order
    source: str
    kernels: tuple[str, ...]
    precisions: tuple[str, ...]
    half_sums: bool


Part = tuple[str, str]  # of a process: a candidate's name, a precision


def candidates() -> dict[str, InspectedFile]:
    """Every file that has CUDA kernels, with fp32 and one 16-bit precision where it takes them."""
    found = {}
    for folder in FOLDERS:
        declared = read_declarations(SUBMISSIONS / folder)
        for path in sorted((SUBMISSIONS / folder).glob("*.py")):
            source = path.read_text("utf-8")
            kernels = tuple(kernel_names(source))
            if len(kernels) != len(re.findall(r"^[^/\n]*__global__", source, re.MULTILINE)):
                raise ValueError(f'{path.name}: has a __global__ that is not of the form extern "C" __global__ void')
            if kernels:
                row = declared[path.stem]
                kept = [precision for precision in PRECISIONS if precision in row.precision][:2]
                half = row.contract == "control" and "fp16" in row.precision
                name = f"{folder}/{path.stem}"
                found[name] = InspectedFile(name, source, kernels, tuple(kept), half)
    return found


def groups(files: dict[str, InspectedFile]) -> list[list[Part]]:
    """What shares a process: a file of many kernels has its own, the others one a folder."""
    shared: dict[str, list[Part]] = {}
    for name, file in files.items():
        key = name if len(file.kernels) > 2 else name.split("/")[0]
        shared.setdefault(key, []).extend((name, precision) for precision in file.precisions)
    return sorted(shared.values(), key=len, reverse=True)


def cases(folder: str, multiprocessors: int) -> tuple[list[LaunchCase], list[LaunchCase]]:
    """The shapes of a task, and larger ones for kernels that those do not reach.

    Each next width reaches another kernel of some file: registers, shared memory, rings, chunks; with a tail, an odd
    width, a storage that is not aligned. More rows than a quarter of the multiprocessors: no row has one to itself.
    """
    if folder == "local_layernorm_tokens":
        shapes = [
            (3, 1), (5, 3), (2, 17), (9, 33), (5, 128), (5, 256), (3, 512), (2, 1000), (2, 1023), (5, 1024), (2, 2048),
            (3, 4096), (2, 8191), (2, 8192), (1, 16_384), (2, 40_000), (1, 65_504), (1, 100_003), (1, 200_000),
        ]  # fmt: skip
        unaligned = [LaunchCase(3, 512, 1), LaunchCase(3, 1003, 1), LaunchCase(2, 8192, 1), LaunchCase(1, 40_000, 3)]
        return [LaunchCase(*shape) for shape in shapes] + unaligned, [LaunchCase(1, 400_000), LaunchCase(1, 1_000_003)]
    crowd = multiprocessors // 4 + 1
    shapes = [
        (3, 4), (3, 7), (5, 100), (3, 200), (2, 516), (2, 1001), (2, 1028), (3, 2052), (2, 4100), (19, 4100), (2, 8192),
        (2, 12_288), (3, 20_672), (5, 33_000), (19, 65_540), (2, 131_076), (2, 150_001), (crowd, 139_268), (1, 327_684),
        (5, 1_048_580),
    ]  # fmt: skip
    special = [
        LaunchCase(3, 516, 1),
        LaunchCase(2, 65_540, 1),
        LaunchCase(3, 516, 0, False),
        LaunchCase(2, 65_540, 0, False),
    ]
    reserve = [LaunchCase(16, 1_048_576), LaunchCase(1, 4_194_304), LaunchCase(3, 4_194_308), LaunchCase(16, 4_194_304)]
    return [LaunchCase(*shape) for shape in shapes] + special, reserve


def suits(file: InspectedFile, precision: str, case: LaunchCase) -> bool:
    """Whether float64 has something to say about this file there."""
    return not (file.half_sums and precision == "fp16" and case.width > WIDEST_HALF_SUM)


def may_refuse(file: InspectedFile, case: LaunchCase) -> bool:
    """Whether a file may raise ValueError: those of the reference order take what PyTorch's vectorised path takes."""
    return file.name.startswith("level1_40/") and (case.width % 4 != 0 or case.shift != 0)


# ---- running it ----
class Recorded:
    """A candidate's module on the device (or the host executor's): notes each launch that was accepted."""

    def __init__(self, module: Any, options: tuple[str, ...], launched: set[tuple[str, tuple[str, ...]]]) -> None:
        self._module, self._options, self._launched = module, options, launched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def launch(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        result = self._module.launch(name, *arguments, **keywords)
        self._launched.add((name, self._options))
        return result


def record(space: dict[str, Any]) -> set[tuple[str, tuple[str, ...]]]:
    """From now on, (kernel, NVRTC options) of every launch of the namespace's candidate."""
    launched: set[tuple[str, tuple[str, ...]]] = set()
    load = space["cuda_module"]

    def cuda_module(source: str, options: tuple[str, ...], index: int) -> Recorded:
        return Recorded(load(source, options, index), tuple(options), launched)

    space["cuda_module"] = cuda_module
    return launched


def error_of(space: dict[str, Any], case: LaunchCase, dtype: torch.dtype, device: str) -> float | None:
    """Largest difference from float64 in units of the largest output; None where the file has no such setting.

    Everything is computed on the CPU but the forward. Raises what the candidate raises.
    """
    if not case.affine and "elementwise_affine" not in inspect.signature(space["ModelNew"].__init__).parameters:
        return None
    torch.manual_seed(case.width + case.rows)
    model = space["ModelNew"]((case.width,), **({} if case.affine else {"elementwise_affine": False}))
    weight = bias = None
    if case.affine:
        weight, bias = (torch.randn(case.width).to(dtype) for _ in range(2))
        model.ln.weight, model.ln.bias = (torch.nn.Parameter(p.to(device)) for p in (weight, bias))
    room = (torch.randn(case.rows * case.width + case.shift) + 0.5).to(dtype)
    with torch.no_grad():
        y = model(room.to(device)[case.shift :].view(case.rows, case.width))
        if device != "cpu":
            torch.cuda.synchronize()
        x, y = room[case.shift :].view(case.rows, case.width), y.cpu()
        weight, bias = (None if p is None else p.double() for p in (weight, bias))
        exact = torch.nn.functional.layer_norm(x.double(), (case.width,), weight, bias, model.ln.eps)
    error = float((y.double() - exact).abs().max() / exact.abs().max())
    return error if error == error else float("inf")


def built(file: InspectedFile, space: dict[str, Any], launched: Collection[tuple[str, tuple[str, ...]]]) -> set[str]:
    """The kernels there are under the options that were asked for; before the first launch, all of the file."""
    source, there = space["CUDA_SOURCE"], set(file.kernels)
    there_now = {name for _, options in launched for name in kernel_names(source, options)}
    return there - (set(kernel_names(source)) - there_now) if launched else there


def exercise(
    file: InspectedFile,
    precision: str,
    space: dict[str, Any],
    device: str,
    table: tuple[list[LaunchCase], list[LaunchCase]],
) -> dict[str, Any]:
    """One candidate in one precision over its cases: what was launched, and whether it was right."""
    launched, started, (base, reserve) = record(space), time.monotonic(), table
    row: dict[str, Any] = {"kernels": [], "builds": 0, "cases": [], "refused": [], "worst_error": 0.0, "failed": None}
    for case in (*base, *reserve):
        missing = built(file, space, launched) - {kernel for kernel, _ in launched}
        if (case in reserve and not missing) or not suits(file, precision, case):
            continue
        words = f"{case.rows}x{case.width}" + f"+{case.shift}" * bool(case.shift) + " no affine" * (not case.affine)
        try:
            error = error_of(space, case, dtype_of(precision), device)
        except ValueError as refusal:
            if not may_refuse(file, case):
                row["failed"] = f"{words}: {refusal}"
                break
            row["refused"].append(words)
            continue
        except Exception as fault:
            row["failed"] = f"{words}: {type(fault).__name__}: {str(fault)[:300]}"
            break
        if error is None:
            continue
        row["cases"].append(words)
        row["worst_error"] = max(row["worst_error"], error)
        allowed = TOLERANCE["half sums" if file.half_sums else precision]
        if error > allowed:
            row["failed"] = f"{words}: off by {error:.3g} of the largest output, allowed {allowed}"
            break
    row["kernels"] = sorted({kernel for kernel, _ in launched})
    row["builds"] = len({options for _, options in launched})
    unseen = sorted(built(file, space, launched) ^ set(row["kernels"]))
    if unseen and row["failed"] is None:
        row["failed"] = f"kernels that no case launched: {', '.join(unseen)}"
    row["seconds"] = round(time.monotonic() - started, 1)
    return row
