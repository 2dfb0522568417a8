"""Measures every bad twin on a GPU: upstream's own verdict, unmodified protocol, and beside it what catches the twin.

    kbsub measure twins --out results/h200/twins.json

A label in twins.toml names the guard that catches its twin, or in `caught_by` the verdicts each of which does. Several
twins share the GPU at once, so nothing here is a timing: the file keeps verdicts only. It is written after every twin.
Exit code 1 when a twin is not caught by what is named for it, or its label in twins.toml is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kbsub.adapters.checkout import find_checkout
from kbsub.eval.process.isolated import Outcome, Status, run_isolated
from kbsub.eval.results.manifest import digest
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.gate import answers
from kbsub.eval.run.machine_facts import measured_on
from kbsub.eval.run.project import project_path
from kbsub.eval.verdicts.kind import Answer
from kbsub.eval.verdicts.register import KINDS

FOLDER = "tests/twins"  # of a checkout
SAME_MACHINE = ("gpu", "driver", "torch", "cuda", "kernelbench_commit")  # what rows of one file have in common
OFFICIAL, GUARDS = "kbsub.eval.verdicts.official.judge:judge", "kbsub.eval.verdicts.guards:judge"


def measure(file: Path, label: dict[str, Any], shared: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """One twin through upstream's evaluator (on a GPU), the guards and the verdicts named, each in its own child."""
    source = file.read_text("utf-8")
    payload = {**shared, "candidate": file.name, "candidate_source": source, "stem": file.stem, "declaration": {}}
    on_gpu = shared["device"] != "cpu"
    nothing = Outcome(Status.NOT_RUN, None, "upstream's evaluator needs a GPU", "", 0.0)
    official = run_isolated(OFFICIAL, payload, timeout_s=timeout_s) if on_gpu else nothing
    guards = run_isolated(GUARDS, payload, timeout_s=timeout_s)
    said = (official.value or {}).get("official") or {}
    found = guards.value or {}
    passes = bool(said.get("correctness")) if on_gpu else None
    verdicts = {name: verdict(name, payload, said, timeout_s) for name in label.get("caught_by", ())}
    if "guard" in label:
        caught = label["guard"] in {finding["guard"] for finding in found.get("findings", [])}
    else:
        caught = all(each["answer"] == Answer.FAIL for each in verdicts.values())
    named = label.get("official")  # None until it has been measured
    return {
        "sha256": hashlib.sha256(source.encode()).hexdigest(),
        "guard": label.get("guard"),
        "label": named,
        "passes_upstream": passes,
        "label_holds": None if passes is None or named is None else passes == (named == "pass"),
        "caught": caught,
        **({"verdicts": verdicts} if verdicts else {}),
        "official": {
            "compiled": said.get("compiled"),
            "correctness": said.get("correctness"),
            "trials": said.get("trials"),
            "excessive_speedup": (said.get("metadata") or {}).get("excessive_speedup", False),
            "ended": ended(official, (official.value or {}).get("verdict")),
        },
        "guards": {
            "findings": found.get("findings", []),
            "not_checked": found.get("not_checked", []),
            "ended": ended(guards, None),
        },
    }


def verdict(name: str, payload: dict[str, Any], official: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """What a kind of verdict, asked alone, says of a twin: the gate's answer and its words; and how its child ended."""
    if name not in KINDS:
        return {"answer": Answer.UNCERTIFIED.value, "words": f"this version of kbsub has no {name} stage"}
    outcome = run_isolated(KINDS[name].judge, payload, timeout_s=timeout_s)
    how = ended(outcome, None)
    row = {"stages": {name: how}, "official": official, "precision": payload["precision"]}
    row[KINDS[name].key] = outcome.value
    (check,) = [each for each in answers(row, {}, [name]) if each.name == name]
    return {"answer": check.answer.value, "words": check.words, "ended": how}


def ended(outcome: Outcome, verdict: dict[str, Any] | None) -> dict[str, Any]:
    """How a child ended: its status and message (and the log's end when it did not end well), seconds of wall time."""
    status = verdict["status"] if verdict else outcome.status.value
    message = (verdict or {}).get("reason") or outcome.message
    log = {"log": outcome.log[-1500:]} if outcome.value is None else {}
    return {"status": status, "message": message, "seconds": round(outcome.seconds, 1), **log}


def kept(text: str, environment: dict[str, Any] | None, again: set[str], folder: Path) -> dict[str, Any]:
    """Rows of an earlier file from the same kind of machine, of twins in `folder` that are unchanged and not run again.

    ValueError when the file is no record of twins: nothing of it could be kept, and it may be somebody's.
    """
    try:
        before = json.loads(text)
        machine, rows = before["environment"] or {}, dict(before["twins"])
    except (ValueError, TypeError, KeyError) as fault:
        raise ValueError(f"--out: no record of twins ({fault}); move it away or name another file") from None
    if environment is None or any(machine.get(key) != environment.get(key) for key in SAME_MACHINE):
        return {}
    files = {name: folder / f"{name}.py" for name in rows if name not in again}
    return {name: rows[name] for name, file in files.items() if file.is_file() and digest(file) == rows[name]["sha256"]}


def in_words(row: dict[str, Any]) -> str:
    """One line for a person who watches."""
    official, guards = row["official"], row["guards"]
    upstream = f"{official['ended']['status']} correct={official['correctness']} {official['trials']}"
    label = " LABEL WRONG" if row["label_holds"] is False else ""
    caught = "caught" if row["caught"] else f"NOT CAUGHT {guards['ended']}"
    seconds = f"{official['ended']['seconds']} s + {guards['ended']['seconds']} s"
    by = row["guard"] or ", ".join(f"{name} says {each['answer']}" for name, each in row["verdicts"].items())
    return f"upstream {upstream}{label}; {by}: {caught} ({seconds})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. 0 every twin is caught and every label holds, 1 otherwise, 2 usage."""
    parser = argparse.ArgumentParser(
        prog="kbsub measure twins", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernelbench", type=Path, help="the checkout; default: as kbsub fetch left it")
    parser.add_argument("--task", default="level1_40")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, min(10, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for one child")
    parser.add_argument("--only", nargs="*", help="names of twins; default: all")
    parser.add_argument("--twins", type=Path, help=f"the folder with twins.toml; default: {FOLDER} of the checkout")
    options = parser.parse_args(arguments)
    try:
        folder = (options.twins or project_path(FOLDER, "--twins")).resolve()
        labels = tomllib.loads((folder / "twins.toml").read_text("utf-8"))
    except FileNotFoundError as error:
        parser.error(str(error))
    names = options.only or list(labels)
    out = options.out.resolve()
    checkout = None if options.device == "cpu" else str(find_checkout(options.kernelbench).path)
    task = str(Path(options.task).resolve()) if options.task.endswith(".py") else options.task
    shared = {
        "task": task,
        "precision": "fp32",
        "kernelbench": checkout,
        "device": options.device,
        "timeout_s": options.timeout,
    }
    os.environ["OMP_NUM_THREADS"] = "1"  # the children share the cores
    # Twins write where they stand: let them stand in a folder that is thrown away.
    with tempfile.TemporaryDirectory() as nowhere:
        os.chdir(nowhere)
        content: dict[str, Any] = {
            "schema": 1,
            "what": "bad twins under upstream's own check (5 trials, 100 timed) and the guards; they ran together",
            "environment": measured_on(options.device),
            "twins": {},
        }
        if options.only and out.is_file():  # the others' rows stay, where they still fit
            try:
                content["twins"] = kept(out.read_text("utf-8"), content["environment"], set(names), folder)
            except ValueError as fault:
                parser.error(str(fault))
        started = time.monotonic()
        with ThreadPoolExecutor(options.workers) as pool:
            jobs = {
                pool.submit(measure, folder / f"{name}.py", labels[name], shared, options.timeout): name
                for name in names
            }
            for job in as_completed(jobs):
                name, row = jobs[job], job.result()
                there = {**content["twins"], name: row}
                content["twins"] = {n: there[n] for n in labels if n in there}
                write_json_atomic(out, content)
                print(f"{name}: {in_words(row)}", flush=True)
        os.chdir("/")
    rows = content["twins"].values()
    caught, held = (sum(row[key] is not False for row in rows) for key in ("caught", "label_holds"))
    passing = sum(row["passes_upstream"] is True for row in rows)
    print(
        f"{len(rows)} twins in {time.monotonic() - started:.0f} s: {passing} pass upstream's check; "
        f"{caught} caught by what is named for them; {held} labels hold. Written to {out}"
    )
    return 0 if caught == held == len(rows) else 1
