"""Runs every CUDA kernel of every candidate under compute-sanitizer, on small shapes with tails and odd widths.

    kbsub measure sanitizer --out results/h200/sanitizer.json

First each tool must find a fault planted for it, else it certifies nothing here. Then one process per tool and group
of files: each allocation is one cudaMalloc (torch's cache is off), every launch is recorded, and the kernels launched
must be all that the sources have. Outputs are compared with float64 on the CPU, so that a launch that did nothing is
not called clean. A group that is not clean runs again file by file. The cubins are those of the candidates' own loader.
Exit code: 0 clean, 1 errors found, 3 not certified. The file is written after every process.
"""

from __future__ import annotations

import argparse
import hashlib
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
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kbsub.eval.measure.children.sanitizer_cases import InspectedFile, Part, candidates, cases, exercise, groups
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.machine_facts import measured_on

REQUIRED, MORE = ("memcheck", "racecheck"), ("synccheck", "initcheck")
PLAIN = "none"  # the same processes without a tool: whether shapes and results are right anyway
PRINTED = 100  # reports of a process
OPTIONS = {"memcheck": ("--report-api-errors", "no", "--padding", "4096")}  # a failed call raises in the candidate
SHOWN_MESSAGES = 6


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
class Inspection:
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
        me = [sys.executable, "-m", "kbsub.eval.cli", "measure", "sanitizer"]
        watched = [*me, "--out", str(out), *arguments]
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


def prove(machine: Inspection, tool: str) -> dict[str, Any]:
    """Whether `tool` finds here what is planted for it."""
    said, ended, _, seconds = machine.start(tool, "--plant", tool)
    counted = said is not None and bool(said.errors or said.warnings)
    found = counted and any(PLANTED[tool][0] in message for message in (said.messages if said else []))
    message = " | ".join(said.messages[:3] if said else []) or ended or "it reported nothing"
    return {"found": found, "errors": said.errors if said else None, "message": message[:600], "seconds": seconds}


def run_group(
    machine: Inspection, tool: str, parts: list[Part], files: dict[str, InspectedFile]
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
    out, lock = options.out.resolve(), threading.RLock()
    runs: dict[str, Any] = {}
    planted: dict[str, Any] = {}
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

    def write(*, ended: bool = False) -> int:
        with lock:
            content["verdict"], code = verdict_of(runs, planted, required)
            if code == 0 and not ended:  # what stands there when the run is killed is no certificate
                content["verdict"], code = f"not certified: stopped before the end; {content['verdict']} so far", 3
            write_json_atomic(out, without_paths(content))
        return code

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        machine = Inspection(program, options.seconds, options.timeout, Path(folder))
        waiting: set[Future[None]] = set()

        def environment() -> None:
            facts = {
                **(measured_on("cuda") or {}),
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
    code = write(ended=True)
    count = sum(len(precisions) for table in runs.values() for precisions in table.values())
    print(f"{count} rows. {content['verdict']}. Written to {out}")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 clean, 1 errors found, 2 usage, 3 not certified."""
    parser = argparse.ArgumentParser(
        prog="kbsub measure sanitizer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tools", default=",".join(REQUIRED + MORE), help="by comma, the most wanted first")
    parser.add_argument("--only", nargs="*", help="files whose groups run (level1_40/oracle_accurate); default: all")
    parser.add_argument("--workers", type=int, default=6, help="processes at once")
    parser.add_argument("--seconds", type=float, default=180.0, help="for everything")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for one process")
    parser.add_argument("--sanitizer", help="the program; default: found")
    parser.add_argument("--parts", help=argparse.SUPPRESS)
    parser.add_argument("--plant", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
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
        if not options.out.exists():  # an earlier run's evidence stays
            write_json_atomic(options.out.resolve(), {"schema": 1, "verdict": words, "runs": {}})
        print(words)
        return 3
    return measure(options, program)
