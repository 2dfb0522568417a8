"""Runs every CUDA kernel of every candidate under compute-sanitizer, on small shapes with tails and odd widths.

    python tests/measure_sanitizer.py --out results/h200/sanitizer.json

First each tool must find a fault planted for it, else it certifies nothing here. Then one process per tool and group
of files: each allocation is one cudaMalloc (torch's cache is off), every launch is recorded, and the kernels launched
must be all that the sources have. Outputs are compared with float64 on the CPU, so that a launch that did nothing is
not called clean. A group that is not clean runs again file by file. The cubins are those of the candidates' own loader.
Exit code: 0 clean, 1 errors found, 3 not certified. The file is written after every process.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kbsub.adapters.environment import project_commit
from kbsub.adapters.isolation import run_isolated
from kbsub.eval.host_executor import kernel_names
from kbsub.eval.result import write_json_atomic

SUBMISSIONS = Path(__file__).resolve().parents[1] / "submissions"
FOLDERS = ("level1_40", "local_layernorm_tokens")
REQUIRED, MORE = ("memcheck", "racecheck"), ("synccheck", "initcheck")
PLAIN = "none"  # the same processes without a tool: whether shapes and results are right anyway
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Largest difference from float64 in units of the largest output.
TOLERANCE = {"fp32": 1e-3, "fp16": 2e-3, "bf16": 1e-2, "half sums": 2e-2}
WIDEST_HALF_SUM = 50_000  # the sum of the squares ends at 65,504
PRINTED = 100  # reports of a process
OPTIONS = {"memcheck": ("--report-api-errors", "no", "--padding", "4096")}  # a failed call raises in the candidate
SHOWN_MESSAGES = 6


# ---- what runs ----
class Case(NamedTuple):
    """x (rows, width), beginning `shift` elements into its allocation."""

    rows: int
    width: int
    shift: int = 0
    affine: bool = True


class Candidate(NamedTuple):
    """A file with CUDA kernels. `half_sums`: declared a control, and its sums are half where it takes halves."""

    name: str  # level1_40/reference_order
    source: str
    kernels: tuple[str, ...]
    precisions: tuple[str, ...]
    half_sums: bool


Part = tuple[str, str]  # of a process: a candidate's name, a precision


def candidates(root: Path = SUBMISSIONS) -> dict[str, Candidate]:
    """Every file that has CUDA kernels, with fp32 and one 16-bit precision where it takes them."""
    found = {}
    for folder in FOLDERS:
        table = tomllib.loads((root / folder / "candidates.toml").read_text("utf-8"))
        for path in sorted((root / folder).glob("*.py")):
            source = path.read_text("utf-8")
            kernels = tuple(kernel_names(source))
            if len(kernels) != len(re.findall(r"^[^/\n]*__global__", source, re.MULTILINE)):
                raise ValueError(f'{path.name}: has a __global__ that is not of the form extern "C" __global__ void')
            if kernels:
                row = table.get(path.stem, {})
                declared = row.get("precision", ["fp32"])
                kept = [p for p in ("fp32", "fp16", "bf16") if p in declared][:2]
                half = row.get("contract") == "control" and "fp16" in declared
                name = f"{folder}/{path.stem}"
                found[name] = Candidate(name, source, kernels, tuple(kept), half)
    return found


def groups(files: dict[str, Candidate]) -> list[list[Part]]:
    """What shares a process: a file of many kernels has its own, the others one a folder."""
    shared: dict[str, list[Part]] = {}
    for name, file in files.items():
        key = name if len(file.kernels) > 2 else name.split("/")[0]
        shared.setdefault(key, []).extend((name, precision) for precision in file.precisions)
    return sorted(shared.values(), key=len, reverse=True)


def cases(folder: str, multiprocessors: int) -> tuple[list[Case], list[Case]]:
    """The shapes of a task, and larger ones for kernels that those do not reach.

    Each next width reaches another kernel of some file: registers, shared memory, rings, chunks; with a tail, an odd
    width, a storage that is not aligned. More rows than a quarter of the multiprocessors: no row has one to itself.
    """
    if folder == "local_layernorm_tokens":
        shapes = [
            (3, 1), (5, 3), (2, 17), (9, 33), (5, 128), (5, 256), (3, 512), (2, 1000), (2, 1023), (5, 1024), (2, 2048),
            (3, 4096), (2, 8191), (2, 8192), (1, 16_384), (2, 40_000), (1, 65_504), (1, 100_003), (1, 200_000),
        ]  # fmt: skip
        unaligned = [Case(3, 512, 1), Case(3, 1003, 1), Case(2, 8192, 1), Case(1, 40_000, 3)]
        return [Case(*shape) for shape in shapes] + unaligned, [Case(1, 400_000), Case(1, 1_000_003)]
    crowd = multiprocessors // 4 + 1
    shapes = [
        (3, 4), (3, 7), (5, 100), (3, 200), (2, 516), (2, 1001), (2, 1028), (3, 2052), (2, 4100), (19, 4100), (2, 8192),
        (3, 20_672), (5, 33_000), (19, 65_540), (2, 131_076), (2, 150_001), (crowd, 139_268), (1, 327_684),
        (5, 1_048_580),
    ]  # fmt: skip
    special = [Case(3, 516, 1), Case(2, 65_540, 1), Case(3, 516, 0, False), Case(2, 65_540, 0, False)]
    reserve = [Case(16, 1_048_576), Case(1, 4_194_304), Case(3, 4_194_308), Case(16, 4_194_304)]
    return [Case(*shape) for shape in shapes] + special, reserve


def suits(file: Candidate, precision: str, case: Case) -> bool:
    """Whether float64 has something to say about this file there."""
    return not (file.half_sums and precision == "fp16" and case.width > WIDEST_HALF_SUM)


def may_refuse(file: Candidate, case: Case) -> bool:
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


def error_of(space: dict[str, Any], case: Case, dtype: torch.dtype, device: str) -> float | None:
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


def built(file: Candidate, space: dict[str, Any], launched: Collection[tuple[str, tuple[str, ...]]]) -> set[str]:
    """The kernels there are under the options that were asked for; before the first launch, all of the file."""
    source, there = space["CUDA_SOURCE"], set(file.kernels)
    there_now = {name for _, options in launched for name in kernel_names(source, options)}
    return there - (set(kernel_names(source)) - there_now) if launched else there


def exercise(
    file: Candidate, precision: str, space: dict[str, Any], device: str, table: tuple[list[Case], list[Case]]
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
            error = error_of(space, case, DTYPES[precision], device)
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
    missing = sorted(built(file, space, launched) ^ set(row["kernels"]))
    if missing and row["failed"] is None:
        row["failed"] = f"kernels that no case launched: {', '.join(missing)}"
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def child(parts: list[Part], out: Path) -> None:
    """Runs in the process that the sanitizer watches: each part, the file written after each."""
    files, rows = candidates(), {}
    for name, precision in parts:
        space: dict[str, Any] = {"__name__": "candidate"}
        exec(compile(files[name].source, f"{name}.py", "exec"), space)
        table = cases(name.split("/")[0], space["device_limits"](0).multiprocessors)
        row = exercise(files[name], precision, space, "cuda", table)
        if torch.cuda.memory_reserved():
            row["failed"] = row["failed"] or "torch cached its memory: a small overrun would have stayed unseen"
        rows[f"{name}:{precision}"] = row
        write_json_atomic(out, rows)
        if row["failed"]:
            break  # the context may be gone: whatever comes next is run in a process of its own


PLANTED = {
    "memcheck": ("write_outside", "p[threadIdx.x + 32] = 1.f;"),
    "racecheck": (
        "neighbours_race",
        "__shared__ float s[128]; s[threadIdx.x] = p[threadIdx.x]; p[threadIdx.x] = s[(threadIdx.x + 37) % 128];",
    ),
    "synccheck": (
        "half_a_barrier",
        "if (threadIdx.x < 40) { __syncthreads(); p[threadIdx.x] += 1.f; } else p[threadIdx.x] += 2.f;",
    ),
    "initcheck": ("reads_unwritten", "p[threadIdx.x] = p[threadIdx.x] * 2.f + 1.f;"),
}


def plant(tool: str) -> None:
    """Runs under the sanitizer: a kernel with the fault that `tool` looks for."""
    import cupy
    import numpy

    cupy.cuda.set_allocator(None)
    name, body = PLANTED[tool]
    kernel = cupy.RawKernel(f'extern "C" __global__ void {name}(float* p) {{ {body} }}', name)
    memory = cupy.empty(128, dtype=cupy.float32)
    if tool != "initcheck":
        memory.set(numpy.zeros(128, dtype=numpy.float32))
    kernel((1,), (128,), (memory,))
    cupy.cuda.runtime.deviceSynchronize()


# ---- what the sanitizer says ----
class Said(NamedTuple):
    """Of a process: the totals of its summary (None: it printed none) and its reports, each as one text."""

    errors: int | None
    warnings: int
    messages: list[str]


def read_summary(text: str) -> Said:
    """The totals and the reports in compute-sanitizer's own output."""
    races = re.findall(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", text)
    totals = re.findall(r"(?<!RACECHECK )ERROR SUMMARY: (\d+) errors?[ \t]*$", text, re.MULTILINE)
    counted = [int(errors) for errors, _ in races] + [int(errors) for errors in totals]
    messages: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith("========="):
            continue
        said = line.removeprefix("=========")
        if re.match(r"\s*$| COMPUTE-SANITIZER|.*SUMMARY:", said):
            continue
        if said.startswith("  ") and messages:
            messages[-1].append(said.strip())
        else:
            messages.append([said.strip()])
    warnings = sum(int(warnings) for _, warnings in races)
    return Said(sum(counted) if counted else None, warnings, ["; ".join(lines[:5]) for lines in messages])


def elsewhere(messages: Collection[str], kernels: Collection[str]) -> int:
    """How many reports are about a kernel that is none of these: torch's own, which some candidates call."""
    places = [re.findall(r"\bat (?:0x[0-9a-f]+ in )?([^;]+?)\+0x", message) for message in messages]
    ours = [any(re.search(rf"\b{re.escape(kernel)}\b", place) for kernel in kernels for place in at) for at in places]
    return sum(bool(at) and not own for at, own in zip(places, ours, strict=True))


def state_of(row: dict[str, Any] | None, said: Said | None, kernels: Collection[str]) -> tuple[str, int]:
    """A part's state in words, and how many reports were about torch's own kernels. `said` None: no tool ran."""
    if said is not None and said.errors is None:
        return f"not certified: no summary. {' | '.join(said.messages[:3])}".strip(), 0
    foreign = elsewhere(said.messages, kernels) if said else 0
    total = (said.errors or 0) + said.warnings if said else 0
    if total and (total > foreign or total >= PRINTED):
        return "errors", foreign
    if row is None:
        return "not certified: its process ended before it", foreign
    return (f"failed: {row['failed']}" if row["failed"] else "clean"), foreign


def verdict_of(runs: dict[str, Any], planted: dict[str, Any], required: Collection[str]) -> tuple[str, int]:
    """The words and the exit code for everything so far."""
    for tool in required:
        if not planted.get(tool, {}).get("found"):
            message = planted.get(tool, {}).get("message", "its planted fault was not tried")
            return f"not certified: {tool} did not find the planted fault: {message}", 3
    rows = {
        f"{tool} {name} {precision}": row["state"]
        for tool, files in runs.items()
        for name, precisions in files.items()
        for precision, row in precisions.items()
    }
    wrong = [name for name, state in rows.items() if state == "errors" or state.startswith("failed")]
    if wrong:
        return f"errors found: {'; '.join(wrong)}", 1
    unsure = [f"{name} ({state})" for name, state in rows.items() if state != "clean"]
    if unsure or not rows:
        return f"not certified: {'; '.join(unsure) or 'nothing ran'}"[:2000], 3
    return "clean", 0


def without_paths(value: Any) -> Any:
    """The same JSON, of every absolute path in its texts the last name only: no folder of a machine is recorded."""
    if isinstance(value, dict):
        return {key: without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_paths(inner) for inner in value]
    return re.sub(r"(?<![\w.])/(?:[\w.+~-]+/)+", "", value) if isinstance(value, str) else value


# ---- the processes ----
class Machine:
    """Starts processes under the sanitizer, each with the time that is left; knows the result file."""

    def __init__(self, sanitizer: str, seconds: float, timeout_s: float, folder: Path) -> None:
        self.sanitizer, self.timeout_s, self.folder = sanitizer, timeout_s, folder
        self.ends = time.monotonic() + seconds
        self.numbers = iter(range(10_000))
        self.lock = threading.Lock()

    def start(self, tool: str, *arguments: str) -> tuple[Said | None, str, Path, float]:
        """What the tool said, how the process ended ("" when well), where its own result is, seconds."""
        with self.lock:
            number = next(self.numbers)
        out, log, printed = (self.folder / f"{number}.{end}" for end in ("json", "log", "txt"))
        watched = [sys.executable, str(Path(__file__).resolve()), "--out", str(out), *arguments]
        tools = [self.sanitizer, "--tool", tool, "--print-limit", str(PRINTED), "--show-backtrace", "no"]
        tools += [*OPTIONS.get(tool, ()), "--log-file", str(log)]
        command = watched if tool == PLAIN else [*tools, *watched]
        started, ended = time.monotonic(), ""
        left = min(self.timeout_s, self.ends - started)
        if left < 3:
            return (None if tool == PLAIN else Said(None, 0, [])), "not run: no time left", out, 0.0
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "2"}
        with printed.open("w") as stream:
            process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            try:
                process.wait(left)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                ended = f"stopped after {left:.0f} s"
        text = printed.read_text(errors="replace")
        if process.returncode and not ended:
            ended = f"exit code {process.returncode}: {' | '.join(text.strip().splitlines()[-2:])[-400:]}"
        whole = (log.read_text(errors="replace") if log.is_file() else "") + "\n" + text
        said = None if tool == PLAIN else read_summary(whole)
        return said, ended, out, round(time.monotonic() - started, 1)


def sanitizer_path(given: str | None) -> str | None:
    """The program: as given, on PATH, or where CUDA's own packages put it."""
    homes = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
    places = [f"{home}/{folder}/compute-sanitizer" for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return next(filter(None, map(shutil.which, [given] if given else ["compute-sanitizer", *places])), None)


def sanitizer_version(program: str) -> str | None:
    """Its version in its own words."""
    answer = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=60)
    return next((line for line in answer.stdout.splitlines() if re.search(r"[Vv]ersion \d", line)), None)


def prove(machine: Machine, tool: str) -> dict[str, Any]:
    """Whether `tool` finds here what is planted for it."""
    said, ended, _, seconds = machine.start(tool, "--plant", tool)
    found = bool(said and (said.errors or said.warnings)) and any(
        PLANTED[tool][0] in message for message in said.messages
    )
    message = " | ".join(said.messages[:3] if said else []) or ended or "it reported nothing"
    return {"found": found, "errors": said.errors if said else None, "message": message[:600], "seconds": seconds}


def run_group(
    machine: Machine, tool: str, parts: list[Part], files: dict[str, Candidate]
) -> dict[Part, dict[str, Any]]:
    """One process; the rows of its parts."""
    said, ended, out, seconds = machine.start(tool, "--parts", ",".join(map(":".join, parts)))
    rows = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    kernels = {kernel for name, _ in parts for kernel in files[name].kernels}
    result = {}
    for name, precision in parts:
        row = rows.get(f"{name}:{precision}")
        state, foreign = state_of(row, said, kernels)
        if ended and state == "clean":
            state = f"failed: {ended}"
        elif ended and state.startswith("not certified"):
            state = f"not certified: {ended}. {state.removeprefix('not certified: ')}"
        reports = {
            "errors": said.errors if said else None,
            "warnings": said.warnings if said else None,
            "elsewhere": foreign,
            "messages": [message[:400] for message in (said.messages if said else [])[:SHOWN_MESSAGES]],
        }
        body = row or {"kernels": [], "cases": [], "failed": None, "seconds": None}
        result[name, precision] = {"state": state, **(reports if said else {}), **body, "process_seconds": seconds}
    return result


def measure(options: argparse.Namespace, program: str) -> int:
    """Everything, on a machine with a GPU and a sanitizer."""
    files = candidates()
    chosen = [g for g in groups(files) if not options.only or any(name in options.only for name, _ in g)]
    tools = options.tools.split(",")
    required = [tool for tool in REQUIRED if tool in tools] or tools
    out, runs, planted, lock = options.out.resolve(), {}, {}, threading.RLock()
    content: dict[str, Any] = {
        "schema": 1,
        "what": "each kernel of each CUDA candidate under compute-sanitizer on small shapes; racecheck looks at shared "
        "memory only. Rows: tool, file, precision; 'none' is the same process without a tool",
        "verdict": None,
        "environment": None,
        "planted": planted,
        "files": {
            f"{name}.py": {"sha256": hashlib.sha256(file.source.encode()).hexdigest(), "kernels": list(file.kernels)}
            for name, file in files.items()
        },
        "runs": runs,
    }

    def write() -> int:
        with lock:
            content["verdict"], code = verdict_of(runs, planted, required)
            write_json_atomic(out, without_paths(content))
        return code

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        machine = Machine(program, options.seconds, options.timeout, Path(folder))
        waiting: set[Future[None]] = set()

        def environment() -> None:
            told = run_isolated("kbsub.adapters.environment:judge", {"device": "cuda"}, timeout_s=120).value or {}
            facts = {
                **(told.get("environment") or {}),
                "project_commit": project_commit(),
                "compute_sanitizer": sanitizer_version(program),
                "kernel_release": platform.release(),
            }
            with lock:
                content["environment"] = facts
            write()

        def one(tool: str, parts: list[Part]) -> None:
            rows = run_group(machine, tool, parts, files)
            again = []
            with lock:
                for (name, precision), row in rows.items():
                    runs.setdefault(tool, {}).setdefault(f"{name}.py", {})[precision] = row
                    print(f"{tool} {name} {precision}: {row['state'][:300]} ({row['process_seconds']} s)", flush=True)
                    if row["state"] != "clean" and len(parts) > 1 and "stopped after" not in row["state"]:
                        again.append([(name, precision)])
                if machine.ends - time.monotonic() > 15:
                    waiting.update(pool.submit(one, tool, alone) for alone in again)
            write()

        def proved(tool: str) -> None:
            with lock:
                planted[tool] = {"found": False, "message": "not run yet"}
            result = prove(machine, tool)
            with lock:
                planted[tool] = result
            print(
                f"planted for {tool}: {'found' if result['found'] else 'NOT FOUND'}: {result['message'][:200]}",
                flush=True,
            )
            write()

        proofs = {tool: pool.submit(proved, tool) for tool in tools}
        facts = pool.submit(environment)
        with lock:
            waiting |= {pool.submit(one, PLAIN, parts) for parts in chosen}
        for tool in tools:
            proofs[tool].result()
            if planted[tool]["found"]:
                with lock:
                    waiting |= {pool.submit(one, tool, parts) for parts in chosen}
        facts.result()
        while True:
            with lock:
                pending = {job for job in waiting if not job.done()}
            if not pending:
                break
            wait(pending, timeout=1)
        for job in waiting:
            job.result()
    code = write()
    count = sum(len(precisions) for table in runs.values() for precisions in table.values())
    print(f"{count} rows. {content['verdict']}. Written to {out}")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", default=",".join(REQUIRED + MORE), help="by comma, the most wanted first")
    parser.add_argument("--only", nargs="*", help="files whose groups run (level1_40/oracle_accurate); default: all")
    parser.add_argument("--workers", type=int, default=6, help="processes at once")
    parser.add_argument("--seconds", type=float, default=180.0, help="for everything")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one process")
    parser.add_argument("--sanitizer", help="the program; default: found")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.parts:
        child(
            [(name, precision) for name, precision in (part.split(":") for part in options.parts.split(","))],
            options.out,
        )
        return 0
    if options.plant:
        plant(options.plant)
        return 0
    if unknown := set(options.tools.split(",")) - set(PLANTED):
        parser.error(f"--tools {sorted(unknown)[0]}: known are {', '.join(PLANTED)}")
    program = sanitizer_path(options.sanitizer)
    if program is None:
        words = "not certified: compute-sanitizer was not found (CUDA toolkit; --sanitizer PROGRAM)"
        write_json_atomic(options.out.resolve(), {"schema": 1, "verdict": words, "runs": {}})
        print(words)
        return 3
    return measure(options, program)


if __name__ == "__main__":
    sys.exit(main())
