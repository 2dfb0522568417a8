"""Everything that the token task shows on a GPU, in one run of under three minutes on an H200.

    kbsub measure tokens --out results/h200/local_layernorm_tokens.json

Stages, in this order: background (stress and oracle of every file, and everything the later stages compile, in
processes that share the GPU: nothing there is a timing), then alone on the GPU: official (upstream's verdict on every
file and peer, in one process), bench (`kbsub bench` over all shapes), x100 (first values of every fp16 kernel on inputs
times 100), tune (other geometries of token_best). Files are written after every step; a stage that fails is said, and
the next goes on. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kbsub.adapters.checkout import find_checkout
from kbsub.eval.bench.plan import read_candidate
from kbsub.eval.process.cell import Cell
from kbsub.eval.process.isolated import JudgeFailure, Outcome, Status
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.project import SUBMISSIONS
from kbsub.eval.tasks.bench_file import read_bench_file
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.tasks.declarations import read_declarations

FOLDER = SUBMISSIONS / "local_layernorm_tokens"
TASK = f"local:{os.path.relpath(FOLDER / 'reference.py')}"  # no absolute path of a machine gets into a result
PRECISIONS = ("fp32", "fp16", "bf16")
NEEDS = {"triton_fused": "triton", "liger": "liger_kernel", "quack": "quack"}  # peers: the package each one needs
STAGES = ("background", "official", "bench", "x100", "tune")
WORKERS = 6  # precompiling processes
SHOWN = 6  # values of a row in the x100 table
TUNE_ROUNDS = 9


def log(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:6.1f} s] {text}", flush=True)


STARTED = time.monotonic()


def files(precision: str) -> list[Path]:
    """The candidates and the peers that are declared for a precision and can run here."""
    found = []
    for folder in (FOLDER, FOLDER / "peers"):
        for stem, declared in read_declarations(folder).items():
            package = NEEDS.get(stem)
            if precision in declared.precision and (package is None or importlib.util.find_spec(package)):
                found.append(folder / f"{stem}.py")
    return found


# ---- background: verdicts that are no timings, and compiled code for the later stages ----


def background(out: Path, seconds: float) -> None:
    absent = [name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None]
    log(f"peers that are not installed here: {', '.join(absent) or 'none'}")
    me = [sys.executable, "-m", "kbsub.eval.cli", "measure", "tokens"]
    jobs = {f"precompile {i}": [*me, "--precompile", str(i)] for i in range(WORKERS)}
    for precision in PRECISIONS:
        names = [str(file) for file in files(precision) if file.parent == FOLDER]
        options = ["--task", TASK, "--only", "stress,oracle", "--precision", precision, "--out", str(out)]
        jobs[f"stress {precision}"] = [sys.executable, "-m", "kbsub.eval.cli", "eval", *names, *options]
    logs = Path(tempfile.mkdtemp(prefix="kbsub-tokens-"))
    running = {}
    caches = bench_cell().environment({})  # what is compiled here is for the bench, whose cell has a cache of its own
    for name, command in jobs.items():
        with (logs / f"{name.replace(' ', '_')}.txt").open("w") as stream:
            env = caches if name.startswith("precompile") else None
            running[name] = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=env)
    deadline = time.monotonic() + seconds
    for name, process in running.items():
        try:
            code = process.wait(max(deadline - time.monotonic(), 0.1))
            said = (logs / f"{name.replace(' ', '_')}.txt").read_text(errors="replace").splitlines()
            words = [line for line in said if "Error" in line or " failed" in line] or said[-1:]
            log(f"{name}: exit {code}: " + " | ".join(line.strip()[:300] for line in words[:8]))
        except subprocess.TimeoutExpired:
            process.kill()
            log(f"{name}: stopped after {seconds:.0f} s")


def scenes() -> list[tuple[int, int, str]]:
    """(tokens, hidden, precision) of every benchmark scene."""
    shapes = read_bench_file(FOLDER).shapes
    return [(*shape.inputs[0], precision) for shape in shapes for precision in PRECISIONS]  # type: ignore[misc]


def precompile(worker: int) -> None:
    """Run every program once in this worker's scenes, so that cubins, Triton and Inductor code are in their caches."""
    import torch

    from kbsub.adapters.candidate import load_candidate
    from kbsub.adapters.task import resolve_task

    for tokens, hidden, precision in scenes()[worker::WORKERS]:
        task = resolve_task(TASK, kernelbench=None, precision=precision)
        x = torch.rand(tokens, hidden, device="cuda").to(task.dtype)

        def library(task: Any = task, hidden: int = hidden) -> Any:
            plain = task.modules().Model(hidden).to("cuda", task.dtype)
            return torch.compile(plain, backend="inductor", mode="default")

        def model(file: Path, task: Any = task, hidden: int = hidden) -> Any:
            return load_candidate(file.read_text("utf-8"), task)(hidden).to("cuda", task.dtype)

        compiled: dict[str, Callable[[], Any]] = {"compile_default": library}
        compiled |= {file.stem: functools.partial(model, file) for file in files(precision)}
        for name, build in compiled.items():
            try:
                with torch.no_grad():
                    build()(x)
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{name} at {tokens}x{hidden}@{precision}: {type(error).__name__}: {error}", flush=True)
        torch._dynamo.reset()
        print(f"{tokens}x{hidden}@{precision}", flush=True)


# ---- official ----


def in_this_process(
    target: str,
    payload: dict[str, Any],
    *,
    timeout_s: float,
    on_progress: Any = None,
    env: Any = None,
    cell: Any = None,
) -> Outcome:
    """Stands for run_isolated: these files are this repository's own, and thirty imports of torch take minutes."""
    module, _, function = target.partition(":")
    started = time.monotonic()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # upstream prints every trial
            value = getattr(importlib.import_module(module), function)(payload, on_progress or (lambda event: None))
        return Outcome(Status.OK, value, "", "", time.monotonic() - started)
    except JudgeFailure as failure:
        return Outcome(failure.status, failure.value, failure.message, "", time.monotonic() - started)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Outcome(Status.RUNTIME_ERROR, None, text, traceback.format_exc(), time.monotonic() - started)


def official(out: Path, kernelbench: Path | None) -> None:
    from kbsub.adapters.task import resolve_task
    from kbsub.eval.run import runner
    from kbsub.eval.run.machine_facts import gpu_name

    runner.run_isolated = in_this_process  # type: ignore[attr-defined, assignment]
    for precision in PRECISIONS:
        task = resolve_task(TASK, kernelbench=None, precision=precision)
        plan = runner.Plan(
            task=task,
            task_text=TASK,
            candidates=tuple(files(precision)),
            stages=("official",),
            precision=precision,
            device="cuda",
            kernelbench=kernelbench,
            timeout_s=60.0,
            gpu=gpu_name(0),
        )
        rows, _ = runner.run(plan, out, lambda *_: None, lambda row: log(f"official {row.key}: {row.status.value}"))
        for row in rows:
            if row.status is not Status.OK:
                log(f"official {row.key}: {row.fields.get('reason')}")


# ---- bench ----


def bench_files() -> list[Path]:
    return list(dict.fromkeys(file for precision in PRECISIONS for file in files(precision)))


def bench_cell() -> Cell:
    """The cell of `kbsub bench` over all of them."""
    return cell_of([read_candidate(file).sha256 for file in bench_files()], TASK, None)


def bench(out: Path, rounds: int, seconds: float) -> None:
    names = [str(file) for file in bench_files()]
    options = ["--task", TASK, "--shapes", "all", "--precision", ",".join(PRECISIONS), "--methods", "cold_replay"]
    options += ["--baselines", "copy,eager,compile_default", "--rounds", str(rounds), "--budget", f"{seconds:.0f}"]
    command = [
        sys.executable,
        "-m",
        "kbsub.eval.cli",
        "bench",
        *names,
        *options,
        "--allow-unverified",
        "--out",
        str(out),
    ]
    target = out.with_name(f"{out.stem}_bench.txt")
    with target.open("w") as stream:
        code = subprocess.run(command, timeout=seconds + 60, stdout=stream, stderr=subprocess.STDOUT).returncode
    for line in target.read_text(errors="replace").splitlines():
        if "@" in line:  # a scene, or a program that was dropped from one
            log(line[:300])
    log(f"kbsub bench: exit {code}")
    if code not in (0, 1):  # 1: a program failed while it was timed, and its row says so
        last = " | ".join(target.read_text(errors="replace").splitlines()[-5:])
        raise RuntimeError(f"kbsub bench ended with {code}: {last}")


# ---- x100 ----


def x100(out: Path) -> None:
    """First values of each fp16 kernel at 4096 x 512 half normal inputs times 100, beside the float64 answer."""
    import torch

    torch.manual_seed(0)
    x = (torch.randn(4096, 512) * 100).half().cuda()
    exact = torch.nn.functional.layer_norm(x.double(), (512,))
    table: dict[str, Any] = {"input": "torch.manual_seed(0); (torch.randn(4096, 512) * 100).half()", "rows": {}}

    def add(name: str, y: torch.Tensor) -> None:
        error = (y.double() - exact).abs()
        table["rows"][name] = {
            "first": [float(v) for v in y[0, :SHOWN]],
            "max_abs_error": float(error.nan_to_num(nan=float("inf")).max()),
            "zeros": int((y == 0).sum()),
            "nans": int(y.isnan().sum()),
        }

    add("float64", exact)
    add("eager", torch.nn.functional.layer_norm(x, (512,)))
    for file in files("fp16"):
        try:
            space: dict[str, Any] = {}
            exec(compile(read_candidate(file).source, file.name, "exec"), space)
            with torch.no_grad():
                add(file.stem, space["ModelNew"](512).to("cuda", torch.float16)(x))
        except Exception as error:
            table["rows"][file.stem] = {"error": f"{type(error).__name__}: {error}"}
    target = out.with_name(f"{out.stem}_x100.json")
    write_json_atomic(target, table)
    for name, row in table["rows"].items():
        if "first" in row:
            values = " ".join(f"{value:9.4f}" for value in row["first"])
            log(f"x100 {name:16} {values}  max abs error {row['max_abs_error']:.3g}")
        else:
            log(f"x100 {name:16} {row['error']}")


# ---- tune ----


def choices(space: dict[str, Any], rows: int, n: int, size: int) -> list[Any]:
    """Geometries of token_best that hold a row of n elements in registers."""
    vectors = -(-n * size // 16)
    found = []
    for held in (2, 4, 8):
        if 32 * held >= vectors:
            found.append(space["Geometry"](f"rows_by_warps_{held}", (-(-rows // 4),), (128,), -1, 0))
    for held, most in ((4, 256), (8, 512)):
        for threads in (32, 64, 128, 256, 512):
            if threads <= most and threads * held >= vectors > threads * held // 4:
                found.append(space["Geometry"](f"row_by_block_{held}", (rows,), (threads,), -1, 0))
    return found


def tune(out: Path) -> None:
    """Median ms of each geometry, and of a copy, over a ring of buffers; the chosen one is marked."""
    import torch

    from kbsub.adapters.task import resolve_task
    from kbsub.eval.bench.machine import machine_for
    from kbsub.eval.bench.ring import Ring, RingProgram
    from kbsub.eval.bench.scene import BenchScene

    machine: Any = machine_for("cuda")
    source = read_candidate(FOLDER / "token_best.py").source
    table: dict[str, Any] = {}
    for tokens, hidden, precision in scenes():
        task = resolve_task(TASK, kernelbench=None, precision=precision)
        shape = {"inputs": [[tokens, hidden]], "init": [hidden], "seed": 827}
        ring = Ring(BenchScene(task, machine.device, shape, 1))
        space: dict[str, Any] = {}
        exec(compile(source, "token_best.py", "exec"), space)
        with torch.no_grad():
            model = space["ModelNew"](hidden).to("cuda", task.dtype)
            own = space["geometry"](tokens, hidden, task.dtype, space["device_limits"](0))
            programs = {"copy": RingProgram(machine.capture(ring.over(lambda x: x.clone()), [], 1), ring)}
            for each in choices(space, tokens, hidden, task.dtype.itemsize):
                space["geometry"] = lambda *_, each=each: each
                name = f"{each.kernel} x {each.block[0]}" + (" *" if each == own else "")
                try:
                    programs[name] = RingProgram(machine.capture(ring.over(model), [], 1), ring)
                except Exception as error:
                    log(f"tune {name}: {type(error).__name__}: {error}")
            samples: dict[str, list[float]] = {name: [] for name in programs}
            for _, (name, program) in itertools.product(range(TUNE_ROUNDS), programs.items()):
                machine.synchronize()
                samples[name].append(machine.elapsed_ms(program.replay, 1) / ring.size)
        medians = {name: sorted(values)[len(values) // 2] for name, values in samples.items()}
        table[f"{tokens}x{hidden}@{precision}"] = medians
        write_json_atomic(out.with_name(f"{out.stem}_tune.json"), table)
        best = min((name for name in medians if name != "copy"), key=medians.__getitem__)
        words = ", ".join(f"{name} {100 * medians['copy'] / ms:.0f}%" for name, ms in medians.items() if name != "copy")
        log(f"tune {tokens}x{hidden}@{precision}: copy {medians['copy'] * 1e3:.2f} us; {words}; best {best}")
        del programs, ring
        machine.release()


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 every stage went through, 1 one failed, 2 usage."""
    parser = argparse.ArgumentParser(prog="kbsub measure tokens", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/h200/local_layernorm_tokens.json"))
    parser.add_argument("--stages", default=",".join(STAGES), help=f"by comma: {', '.join(STAGES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--background-seconds", type=float, default=75.0)
    parser.add_argument("--bench-seconds", type=float, default=110.0)
    parser.add_argument("--kernelbench", type=Path, help="the checkout; default: as kbsub fetch left it")
    parser.add_argument("--precompile", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # many processes compile at once already
    if given.precompile is not None:
        precompile(given.precompile)
        return 0
    stages = given.stages.split(",")
    if unknown := set(stages) - set(STAGES):
        parser.error(f"--stages {sorted(unknown)[0]}: known are {', '.join(STAGES)}")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    checkout = find_checkout(given.kernelbench).path if "official" in stages else None
    actions: dict[str, Callable[[], None]] = {
        "background": lambda: background(given.out, given.background_seconds),
        "official": lambda: official(given.out, checkout),
        "bench": lambda: bench(given.out, given.rounds, given.bench_seconds),
        "x100": lambda: x100(given.out),
        "tune": lambda: tune(given.out),
    }
    failed = []
    for stage in STAGES:
        if stage in stages:
            log(f"---- {stage}")
            try:
                actions[stage]()
            except Exception as error:
                traceback.print_exc()
                log(f"{stage} failed: {type(error).__name__}: {error}")
                failed.append(stage)
    log(f"written beside {given.out}; failed stages: {', '.join(failed) or 'none'}")
    return 1 if failed else 0
