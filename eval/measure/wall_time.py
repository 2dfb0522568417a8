"""Wall time of one official verdict on a GPU: `kbsub eval --only official` and upstream's own run_and_check.py.

    kbsub measure wall_time --out results/h200/wall_time.json

The same file, GPU and checkout; whole processes, from their start to their end, one after the other and in turn. Before
that each runs once uncounted, so that files are read and kernels compiled (--warm: they are already). The upstream
script also times eager and torch.compile, which `kbsub baseline` does here; it has no switch against it. Client
packages that it imports and that are not installed are inert files, which cost it nothing. Exit code 1 when the median
of `kbsub eval` is the longer one, or a verdict is not "correct". Run it from the root of the repository, with the GPU
to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kbsub.adapters.checkout import find_checkout
from kbsub.adapters.evaluator import write_stand_ins
from kbsub.eval.process.isolated import run_isolated
from kbsub.eval.results.manifest import digest
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.machine_facts import display_path, measured_on
from kbsub.eval.run.project import SUBMISSIONS
from kbsub.eval.tasks.cell import cell_of

CANDIDATE = SUBMISSIONS / "level1_40" / "reference_order_pipelined.py"
LIMIT_S = 240.0

Run = Callable[[], dict[str, Any]]  # {"seconds", "exit", "correct", ...} of one whole process


def in_turn(
    programs: dict[str, Run], rounds: int, keep: Callable[[dict[str, Any]], None], *, warm: bool = False
) -> dict[str, Any]:
    """Each program once uncounted (unless warm), then `rounds` times in turn; `keep` gets the record every round."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in programs}
    uncounted = {name: run() for name, run in programs.items()} if not warm else {}
    record: dict[str, Any] = {}
    for _ in range(rounds):
        for name, run in programs.items():
            runs[name].append(run())
        record = {"warm_up": uncounted, "runs": runs, **summary(runs)}
        keep(record)
    return record


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Seconds of each program and their medians; `holds`: the first program's median is not above the second's.

    Of a run whose verdict was not "correct" nothing is compared: `holds` is False then.
    """
    seconds = {name: [run["seconds"] for run in found] for name, found in runs.items()}
    medians = {name: round(statistics.median(values), 3) for name, values in seconds.items()}
    correct = all(run["correct"] for found in runs.values() for run in found)
    ours, theirs = medians.values()
    return {"seconds": seconds, "median_s": medians, "all_correct": correct, "holds": correct and ours <= theirs}


def timed(command: Sequence[str], folder: Path, variables: dict[str, str], log: Path) -> tuple[dict[str, Any], str]:
    """Start the command in `folder` and wait for its end: ({seconds, exit}, what it printed). `log` keeps the words."""
    started = time.monotonic()
    try:
        ended = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
        )
        code, output = ended.returncode, ended.stdout
    except subprocess.TimeoutExpired as error:
        code, output = 124, error.stdout or b""
    seconds = round(time.monotonic() - started, 3)
    text = output.decode("utf-8", "replace")
    log.write_text(text)
    return {"seconds": seconds, "exit": code}, text


def kbsub(candidate: Path, checkout: Path, scratch: Path, logs: Path, device: str) -> Run:
    """`kbsub eval CANDIDATE --only official --out FRESH_FILE`, from its start to its end."""

    def run() -> dict[str, Any]:
        out = scratch / f"{time.monotonic_ns()}.json"
        command = [sys.executable, "-m", "kbsub.eval.cli", "eval", str(candidate), "--only", "official"]
        command += ["--out", str(out), "--kernelbench", str(checkout), "--device", device]
        found, _ = timed(command, Path.cwd(), {}, logs / "kbsub_eval.log")
        rows = json.loads(out.read_text())["candidates"] if out.exists() else {}
        row = rows.get(candidate.stem, {})
        official = row.get("official") or {}
        inside = row.get("stages", {}).get("official", {}).get("seconds")
        return {
            **found,
            "correct": official.get("correctness") is True,
            "ms": official.get("runtime"),
            "judge_s": inside,
        }

    return run


def upstream(candidate: Path, checkout: Path, scratch: Path, logs: Path, gpu_arch: str) -> Run:
    """Upstream's scripts/run_and_check.py, unmodified, on the same file."""
    stand_ins = write_stand_ins(scratch / "stand_ins")
    path = os.pathsep.join(filter(None, [str(checkout / "src"), os.environ.get("PYTHONPATH"), str(stand_ins)]))
    options = ["ref_origin=kernelbench", "dataset_src=local", "level=1", "problem_id=40", "backend=cupy"]
    options += [f"kernel_src_path={candidate}", "eval_mode=local", f"gpu_arch=['{gpu_arch}']"]

    def run() -> dict[str, Any]:
        command = [sys.executable, "scripts/run_and_check.py", *options]
        found, text = timed(command, checkout, {"PYTHONPATH": path}, logs / "run_and_check.log")
        said = text.partition("[Timing] Custom Kernel exec time: ")[2].split()
        return {
            **found,
            "correct": found["exit"] == 0 and "correctness=True" in text,
            "ms": float(said[0]) if said else None,
        }

    return run


def where_it_goes(candidate: Path, checkout: Path, device: str) -> dict[str, Any]:
    """Of one more official judge: the second at which each of its steps began, and the end of its process."""
    began: dict[str, float] = {}
    started = time.monotonic()

    def note(event: dict[str, Any]) -> None:
        began.setdefault(f"{event['stage']} {event.get('index', '')}".strip(), round(time.monotonic() - started, 3))

    payload = {
        "candidate": candidate.name,
        "candidate_source": candidate.read_text("utf-8"),
        "task": "level1_40",
        "kernelbench": str(checkout),
        "device": device,
    }
    cell = cell_of([digest(candidate)], "level1_40", checkout)
    target = "kbsub.eval.verdicts.official.judge:judge"
    outcome = run_isolated(target, payload, timeout_s=LIMIT_S, on_progress=note, cell=cell)
    return {"status": outcome.status.value, "began_s": began, "ended_s": round(outcome.seconds, 3)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 `kbsub eval` takes no longer and both verdicts are "correct", 1 otherwise, 2 usage."""
    parser = argparse.ArgumentParser(prog="kbsub measure wall_time", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--candidate", type=Path, default=CANDIDATE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="both have just run here: no uncounted run first")
    parser.add_argument("--gpu-arch", default="Hopper", help="what upstream's script calls this GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernelbench", type=Path, help="the checkout; default: as kbsub fetch left it")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes print")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds: at least one")
    candidate, checkout = options.candidate.resolve(), find_checkout(options.kernelbench).path
    with tempfile.TemporaryDirectory(prefix="kbsub-wall-") as made:
        scratch, logs = Path(made), (options.logs or Path(made)).resolve()
        logs.mkdir(parents=True, exist_ok=True)
        content: dict[str, Any] = {
            "schema": 1,
            "what": "seconds from start to end of whole processes, one official verdict each, in turn on one GPU",
            "candidate": {"file": display_path(candidate), "sha256": digest(candidate)},
        }
        programs = {
            "kbsub eval --only official": kbsub(candidate, checkout, scratch, logs, options.device),
            "run_and_check.py": upstream(candidate, checkout, scratch, logs, options.gpu_arch),
        }

        def keep(record: dict[str, Any]) -> None:
            content.update(record)
            write_json_atomic(options.out, content)
            print(json.dumps({key: record[key] for key in ("seconds", "median_s", "holds")}), flush=True)

        in_turn(programs, options.rounds, keep, warm=options.warm)
        content["environment"] = measured_on(options.device)
        write_json_atomic(options.out, content)
        content["one_judge"] = where_it_goes(candidate, checkout, options.device)
        write_json_atomic(options.out, content)
        print(json.dumps(content["one_judge"]))
    return 0 if content["holds"] else 1
