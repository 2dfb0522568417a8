"""What `kbsub eval` takes beside upstream's own work: whole processes, several trees of this project in turn.

    kbsub measure own_time --tree before=../before --tree after=. --out results/h200/own_time.json

Each round starts, one after the other and in another order each time, `kbsub eval FILE --only official` of each tree
(a checkout of this repository) and a bare process that does nothing but upstream's part: it imports torch and the
evaluator and calls it once, with the same texts and arguments. A tree's own time is its median less the bare
process's. Without a GPU (--device cpu) the bare process does the local check of the official predicate instead. Each
program runs once uncounted first. cpu_s are processor seconds of the process and its children: on a busy machine they
say more than the wall. The last tree's own phases stand beside it. Exit code 1 when a run failed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kbsub.adapters.checkout import find_checkout
from kbsub.adapters.evaluator import write_stand_ins
from kbsub.adapters.task import resolve_task
from kbsub.eval.measure.wall_time import LIMIT_S
from kbsub.eval.results.manifest import digest
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.machine_facts import display_path, measured_on

BARE = "upstream alone"
_ON_GPU = """
import sys, torch
from kernelbench.eval import eval_kernel_against_ref
task, candidate, build, device = sys.argv[1:]
said = eval_kernel_against_ref(original_model_src=open(task).read(), custom_model_src=open(candidate).read(),
    num_correct_trials=5, num_perf_trials=100, measure_performance=True, timing_method="cuda_event", verbose=True,
    build_dir=build, device=torch.device(device), backend="cupy", precision=torch.float32)
sys.exit(0 if said is not None and said.correctness else 1)
"""
_ON_CPU = """
import sys, pathlib
from kbsub.adapters.task import resolve_task
from kbsub.eval.verdicts.official import cpu_check
said = cpu_check.run(open(sys.argv[2]).read(), resolve_task(sys.argv[1], kernelbench=pathlib.Path(sys.argv[3])),
    lambda event: None)
sys.exit(0 if said["cpu_check"]["correctness"] else 1)
"""


def timed(command: Sequence[str], variables: dict[str, str]) -> dict[str, Any]:
    """Run to the end: {seconds, cpu_s, exit, words}; the last line that it printed is its words."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    try:
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, errors="replace", timeout=LIMIT_S
        )
        code, words = done.returncode, (done.stdout + done.stderr).strip()
    except subprocess.TimeoutExpired:
        code, words = 124, f"longer than {LIMIT_S:g} s"
    seconds, after = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 3), "cpu_s": round(cpu, 3), "exit": code, "words": words}


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The medians of each program, and the own time of each tree: its median less the bare process's."""
    keys = ("seconds", "cpu_s")
    medians = {
        name: {key: round(statistics.median(run[key] for run in each), 3) for key in keys}
        for name, each in runs.items()
    }
    own = {
        name: {key: round(medians[name][key] - medians[BARE][key], 3) for key in keys}
        for name in medians
        if name != BARE
    }
    return {"median": medians, "own": own}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 every run ended well; 1 one did not; 2 usage."""
    parser = argparse.ArgumentParser(prog="kbsub measure own_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tree", action="append", default=[], help="NAME=FOLDER, a checkout of this repository; again")
    parser.add_argument("--candidate", type=Path, required=True)
    parser.add_argument("--task", default="level1_40")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda:0", help="cuda:N, or cpu for the local check")
    parser.add_argument("--kernelbench", type=Path, help="the checkout; default: as kbsub fetch left it")
    options = parser.parse_args(arguments)
    trees = dict(each.partition("=")[::2] for each in options.tree)
    if not trees or any(not (Path(folder) / "eval" / "cli.py").is_file() for folder in trees.values()):
        parser.error("--tree NAME=FOLDER: at least one, each a checkout of this repository")
    if options.rounds < 1:
        parser.error("--rounds: at least one")
    checkout = find_checkout(options.kernelbench).path
    task = resolve_task(options.task, kernelbench=checkout)
    candidate = options.candidate.resolve()
    content: dict[str, Any] = {
        "schema": 1,
        "what": "seconds of whole processes, one official verdict each, in turn; own: less upstream's part alone",
        "candidate": {"file": display_path(candidate), "sha256": digest(candidate)},
        "task": task.slug,
        "environment": measured_on(options.device),
    }
    with tempfile.TemporaryDirectory(prefix="kbsub-own-") as made:
        scratch = Path(made)
        programs = _programs(scratch, trees, task.source, candidate, checkout, options)
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
        for number in range(options.rounds + 1):
            names = list(programs)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                ended = timed(*programs[name])
                words = ended.pop("words")
                if ended["exit"]:
                    print(f"{name}: exit code {ended['exit']}: {words[-500:]}", file=sys.stderr)
                    return 1
                if number:  # the first of each is not counted
                    runs[name].append(ended)
            if number:
                content |= {"runs": runs, **summary(runs)}
                write_json_atomic(options.out, content)
        result = json.loads((scratch / f"{list(trees)[-1]}.json").read_text("utf-8"))
        content["phases"] = result["candidates"][candidate.stem]["stages"]["official"].get("phases")
    write_json_atomic(options.out, content)
    print(json.dumps({key: content[key] for key in ("median", "own", "phases")}))
    return 0


def _programs(
    scratch: Path, trees: dict[str, str], source: str, candidate: Path, checkout: Path, options: argparse.Namespace
) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> (command, variables); the bare process first."""
    reference, build = scratch / "reference.py", scratch / "build"
    reference.write_text(source)
    build.mkdir()
    stand_ins = write_stand_ins(scratch / "stand_ins")
    inherited = os.environ.get("PYTHONPATH")
    if options.device == "cpu":
        bare = ([sys.executable, "-c", _ON_CPU, options.task, str(candidate), str(checkout)], dict[str, str]())
    else:
        path = os.pathsep.join(filter(None, [str(checkout / "src"), inherited, str(stand_ins)]))
        device = options.device if ":" in options.device else f"{options.device}:0"
        command = [sys.executable, "-c", _ON_GPU, str(reference), str(candidate), str(build), device]
        bare = (command, {"PYTHONPATH": path})
    programs = {BARE: bare}
    for name, folder in trees.items():
        links = scratch / f"links_{name}" / "kbsub"  # `kbsub` without an installation, as the Makefile's `links`
        links.mkdir(parents=True)
        for top in ("adapters", "eval", "submissions"):
            (links / top).symlink_to(Path(folder).resolve() / top)
        path = os.pathsep.join(filter(None, [str(links.parent), inherited]))
        command = [sys.executable, "-m", "kbsub.eval.cli", "eval", str(candidate), "--task", options.task]
        command += ["--only", "official", "--out", str(scratch / f"{name}.json"), "--kernelbench", str(checkout)]
        command += [] if options.device == "cpu" else ["--device", options.device]
        programs[name] = (command, {"PYTHONPATH": path})
    return programs
