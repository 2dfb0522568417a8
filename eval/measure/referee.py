"""Measures the referee on a GPU: every cheat of a folder, every twin and every honest file, in one resumable table.

    kbsub measure referee --out results/h200/referee.json --cheats FOLDER

Cheats: official, guards and referee side by side. Twins: the referee, beside what twins.json holds of official and
guards for the same file. Honest files of both ladders, eager and torch.compile: the referee's time against CUDA graph
replays of the same process, interleaved round by round. The file is written after every row, and a row whose file has
not changed is not measured again. Several files are started at a time on a GPU: official and guards run side by side
(of official the words count, not the time), and so does a first look of the referee at cheats and twins, which most of
them do not survive; what is timed has the GPU to itself. Exit code 1 when the referee fails an
honest file; 2 usage.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kbsub.adapters.checkout import find_checkout
from kbsub.adapters.source import read_limited as read_bytes
from kbsub.eval.process.isolated import Outcome, run_isolated
from kbsub.eval.results.model import write_json_atomic
from kbsub.eval.run.machine_facts import measured_on
from kbsub.eval.run.project import SUBMISSIONS, project_path
from kbsub.eval.tasks.cell import cell_of
from kbsub.eval.tasks.declarations import read_declarations
from kbsub.eval.verdicts.kind import Answer, Asked
from kbsub.eval.verdicts.referee.registration import Referee, answer, upstream_ms
from kbsub.eval.verdicts.register import KINDS

PARTS = ("official", "guards", "referee")
SECTIONS = ("honest", "cheats", "twins")
TWINS, RECORD = "tests/twins", "twins.json"
SINGLE = "level1_40"
LADDERS = (SINGLE, "local_layernorm_tokens")
ROUNDS = {"honest": 15, "cheats": 5, "twins": 5}
FROM_MS = 0.1  # honest files are held to graph replay from here up
WITHIN, AT_MOST = 0.03, 0.05
# Programs without a file of their own, in the form of one.
PROGRAMS = {
    "eager": "ModelNew = Model\n",
    "torch_compile": (
        "import torch\n\n\nclass ModelNew(Model):\n    def __init__(self, *arguments):\n"
        "        super().__init__(*arguments)\n        self.compile()\n"
    ),
}


@dataclass(frozen=True)
class RefereeRow:
    """One row: a program, its task and precision, and the parts that it needs."""

    section: str
    name: str
    source: str
    task: str
    precision: str
    parts: tuple[str, ...]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()


def read_limited(file: Path) -> str:
    return read_bytes(file).decode("utf-8")


def jobs_of(options: argparse.Namespace, folder: Path) -> list[RefereeRow]:
    """Every row there is to be, honest files first."""
    found = []
    if "honest" in options.sections:
        for ladder in LADDERS:
            home = SUBMISSIONS / ladder
            task = ladder if ladder == SINGLE else str(home / "reference.py")
            rows = [(f"{ladder}/{name}", text, "fp32") for name, text in PROGRAMS.items()]
            for stem, declared in read_declarations(home).items():
                text = read_limited(home / f"{stem}.py")
                rows += [(f"{ladder}/{stem}", text, each) for each in declared.precision]
            found += [RefereeRow("honest", f"{n}@{p}", text, task, p, ("referee",)) for n, text, p in rows]
    if "cheats" in options.sections and options.cheats:
        for file in sorted(options.cheats.rglob("*.py")):
            name = str(file.relative_to(options.cheats).with_suffix(""))
            found.append(RefereeRow("cheats", name, read_limited(file), SINGLE, "fp32", tuple(options.parts)))
    if "twins" in options.sections:
        for name in tomllib.loads((folder / "twins.toml").read_text("utf-8")):
            found.append(RefereeRow("twins", name, read_limited(folder / f"{name}.py"), SINGLE, "fp32", ("referee",)))
        for name in tomllib.loads((folder / "referee" / "referee.toml").read_text("utf-8")):
            text = read_limited(folder / "referee" / f"{name}.py")
            found.append(RefereeRow("twins", f"referee/{name}", text, SINGLE, "fp32", tuple(options.parts)))
    if options.only:
        found = [job for job in found if any(word in job.name for word in options.only)]
    return found


def untimed(row: dict[str, Any]) -> bool:
    """Whether the row's referee ran beside others and found its answers right: then its time is still to be taken."""
    return not row["referee"].get("alone", True) and row["verdict"]["answer"] != Answer.FAIL.value


def run_part(
    job: RefereeRow, part: str, gpu: str, checkout: str, options: argparse.Namespace, *, alone: bool = True
) -> dict[str, Any]:
    """One verdict of one program on one GPU, as a row holds it. alone: the referee waits for its turn."""
    payload = {
        "candidate": f"{job.name}.py",
        "candidate_source": job.source,
        "stem": Path(job.name).name,
        "declaration": {},
        "task": job.task,
        "precision": job.precision,
        "kernelbench": checkout,
        "device": "cuda",
        "timeout_s": options.timeout,
        "referee_replay": job.section == "honest",
        "referee_rounds": ROUNDS[job.section],
    }
    if alone:
        payload["referee_turn"] = str(Path(tempfile.gettempdir()) / f"kbsub-referee-{os.getuid()}-{gpu}")
    kind = KINDS[part]
    cell = None
    if kind.runs_candidate:
        cell = cell_of([job.sha256], job.task, Path(checkout))
    seen = {"CUDA_VISIBLE_DEVICES": gpu}
    timeout_s = options.timeout + (options.timeout * options.together if part == "referee" else 0)  # for its turn
    outcome = run_isolated(kind.judge, payload, timeout_s=timeout_s, cell=cell, env=seen)
    beside = {} if alone or part != "referee" else {"alone": False}
    return {"ended": ended(outcome), **said(part, outcome.value or {}), **beside}


def ended(outcome: Outcome) -> dict[str, Any]:
    log = {"log": outcome.log[-1500:]} if outcome.value is None else {}
    message = outcome.message[:500]
    return {"status": outcome.status.value, "message": message, "seconds": round(outcome.seconds, 1), **log}


def said(part: str, found: dict[str, Any]) -> dict[str, Any]:
    if part == "official":
        words = found.get("official") or {}
        return {key: words.get(key) for key in ("compiled", "correctness", "trials", "runtime", "ref_runtime")}
    if part == "guards":
        return {"findings": sorted({finding["guard"] for finding in found.get("findings", [])})}
    return found


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """What the gate would say of the row's referee, and of a graph replay beside it."""
    if "referee" not in row:
        return {"answer": "not measured", "words": ""}
    found = row["referee"]
    stage = found.get("ended", {})
    if stage.get("status") != "OK":
        return {"answer": Answer.FAIL.value, "words": f"{stage.get('status')}: {stage.get('message')}"}
    record = Referee.model_validate({key: value for key, value in found.items() if key not in ("ended", "alone")})
    given, words = answer(record, Asked({"official": row.get("official")}, stage, {}))
    ratio = record.ratio(upstream_ms({"official": row.get("official")}))
    return {"answer": given.value, "words": words, "official_over_referee": ratio, **beside_replay(record)}


def beside_replay(record: Referee) -> dict[str, Any]:
    """{"replay_ms", "ratio", "low", "high"}: the referee's time over that of graph replays of the same rounds."""
    replays = (record.samples_ms or {}).get("replay")
    if not replays or record.ms is None or record.low is None or record.high is None:
        return {}
    replay = float(np.median(replays))
    return {
        "replay_ms": replay,
        "ratio": record.ms / replay,
        "low": record.low / replay,
        "high": record.high / replay,
    }


def in_words(job: RefereeRow, row: dict[str, Any]) -> str:
    """One line for a person who watches."""
    parts = []
    if official := row.get("official"):
        parts.append(f"upstream {official.get('correctness')} {official.get('runtime')} ms")
    if guards := row.get("guards"):
        parts.append(f"guards {', '.join(guards['findings']) or guards['ended']['status']}")
    verdict = row["verdict"]
    if "referee" in row:
        found = row["referee"]
        took = f"{found.get('seconds')} s, {(found.get('device_bytes') or 0) / 1e9:.1f} GB"
        parts.append(f"referee {verdict['answer']}: {verdict['words'][:200]} [{took}]")
    if "ratio" in verdict:
        parts.append(f"replay {verdict['replay_ms']:.4f} ms, ratio {verdict['ratio']:.3f}")
    seconds = "+".join(str(row[part]["ended"]["seconds"]) for part in PARTS if part in row)
    return f"{job.section} {job.name}: {'; '.join(parts)} ({seconds} s)"


def earlier(record: Path) -> dict[str, Any]:
    """The rows of twins.json; {} where there is none."""
    try:
        return dict(json.loads(record.read_text("utf-8"))["twins"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


class RefereeTable:
    """The file, and what it still lacks. Rows of another machine, or of another text of a file, are not kept."""

    SAME = ("gpu", "driver", "torch", "cuda", "kernelbench_commit")

    def __init__(self, out: Path, environment: dict[str, Any] | None, twins: dict[str, Any]) -> None:
        self.out, self.lock, self.twins = out, threading.Lock(), twins
        self.content: dict[str, Any] = {"schema": 1, "what": __doc__.split("\n")[0], "environment": environment}
        self.content |= {section: {} for section in SECTIONS}
        if out.is_file():
            before = json.loads(out.read_text("utf-8"))
            machine = before.get("environment") or {}
            if environment and all(machine.get(key) == environment.get(key) for key in self.SAME):
                self.content |= {section: before.get(section, {}) for section in SECTIONS}

    def missing(self, job: RefereeRow) -> list[str]:
        row = self.content[job.section].get(job.name, {})
        if row.get("sha256") != job.sha256:
            return list(job.parts)
        return [
            part
            for part in job.parts
            if part not in row or row[part]["ended"]["status"] == "TIMEOUT" or (part == "referee" and untimed(row))
        ]

    def _earlier(self, job: RefereeRow) -> dict[str, Any]:
        """What was measured of a twin's official verdict and guards, of this very text."""
        row = self.twins.get(job.name, {}) if job.section == "twins" else {}
        if row.get("sha256") != job.sha256:
            return {}
        findings = sorted({finding["guard"] for finding in row["guards"]["findings"]})
        return {"official": row["official"], "guards": {"findings": findings, "ended": row["guards"]["ended"]}}

    def put(self, job: RefereeRow, parts: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            row = self.content[job.section].get(job.name, {})
            if row.get("sha256") != job.sha256:
                row = {"sha256": job.sha256}
            row = {**self._earlier(job), **row, **parts}
            row["verdict"] = judged(row)
            self.content[job.section] = dict(sorted({**self.content[job.section], job.name: row}.items()))
            self.content["summary"] = summary(self.content)
            write_json_atomic(self.out, self.content)
            return row


def summary(content: dict[str, Any]) -> dict[str, Any]:
    """Counts over the rows, and the honest files of each ladder and precision by referee and by replay."""
    honest = {name: row["verdict"] for name, row in content["honest"].items()}
    timed = {name: found for name, found in honest.items() if "ratio" in found}
    long = {name: found for name, found in timed.items() if found["replay_ms"] >= FROM_MS}
    order: dict[str, Any] = {}
    for group in sorted({(name.split("/")[0], name.split("@")[1]) for name in long}):
        names = [name for name in long if (name.split("/")[0], name.split("@")[1]) == group]
        times = {name: content["honest"][name]["referee"]["ms"] for name in names}
        order["@".join(group)] = {
            "by_referee": sorted(names, key=lambda name: times[name]),
            "by_replay": sorted(names, key=lambda name: long[name]["replay_ms"]),
        }
    return {
        "honest": len(honest),
        "honest_failed": sorted(name for name, found in honest.items() if found["answer"] == Answer.FAIL.value),
        "from_0.1_ms": len(long),
        "beyond_3_percent": sorted(name for name, found in long.items() if abs(found["ratio"] - 1) > WITHIN),
        "beyond_5_percent": sorted(name for name, found in long.items() if abs(found["ratio"] - 1) > AT_MOST),
        "order": order,
        **{
            f"{section}_accepted": {  # with its time, ms: to be held against that of what it really computes
                name: row["referee"]["ms"]
                for name, row in content[section].items()
                if row["verdict"]["answer"] == Answer.PASS.value
            }
            for section in ("cheats", "twins")
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="kbsub measure referee", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cheats", type=Path, help="a folder of candidates for level1_40 that should not be believed")
    parser.add_argument("--twins", type=Path, help=f"the folder with twins.toml; default: {TWINS} of the checkout")
    parser.add_argument(
        "--record", type=Path, help="twins.json with official and guards of the twins; default: beside --out"
    )
    parser.add_argument("--kernelbench", type=Path, help="the checkout; default: as kbsub fetch left it")
    parser.add_argument("--gpus", nargs="*", default=["0"], help="each as CUDA_VISIBLE_DEVICES names it")
    parser.add_argument("--together", type=int, default=3, help="files at a time on a GPU; only one of them is timed")
    parser.add_argument("--sections", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="of cheats and new twins")
    parser.add_argument("--only", nargs="*", help="rows whose name holds one of these words")
    parser.add_argument("--timeout", type=float, default=150.0, help="seconds for one verdict")
    parser.add_argument("--seconds", type=float, default=1e9, help="no row is begun later than this")
    options = parser.parse_args(arguments)
    started = time.monotonic()
    try:
        folder = (options.twins or project_path(TWINS, "--twins")).resolve()
    except FileNotFoundError as error:
        parser.error(str(error))
    if options.cheats and not options.cheats.is_dir():
        parser.error(f"--cheats {options.cheats}: no such folder")
    options.record = options.record or options.out.resolve().with_name(RECORD)
    checkout = str(find_checkout(options.kernelbench).path)
    table = RefereeTable(options.out.resolve(), measured_on("cuda"), earlier(options.record))
    wanted = [job for job in jobs_of(options, folder) if table.missing(job)]
    # First what runs side by side and is no timing: official, guards, and the referee's look at files that are not
    # honest, most of which ends with wrong answers. Then what is timed, by one judge of a GPU at a time.
    for parts, alone in ((PARTS[:-1], True), (PARTS[-1:], False), (PARTS[-1:], True)):
        todo: queue.SimpleQueue[RefereeRow] = queue.SimpleQueue()
        for job in wanted:
            if set(parts) & set(table.missing(job)) and (alone or job.section != "honest"):
                todo.put(job)

        def work(
            gpu: str,
            parts: Sequence[str] = parts,
            alone: bool = alone,
            todo: queue.SimpleQueue[RefereeRow] = todo,
        ) -> None:
            while time.monotonic() - started < options.seconds:
                try:
                    job = todo.get_nowait()
                except queue.Empty:
                    return
                missing = [part for part in table.missing(job) if part in parts]
                found = {part: run_part(job, part, gpu, checkout, options, alone=alone) for part in missing}
                print(f"[{time.monotonic() - started:5.0f} s] {in_words(job, table.put(job, found))}", flush=True)

        threads = [threading.Thread(target=work, args=(gpu,)) for gpu in options.gpus for _ in range(options.together)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = table.content.get("summary") or {}
    still = sum(bool(table.missing(job)) for job in wanted)
    print(f"{len(wanted)} rows were missing, {still} still are; {time.monotonic() - started:.0f} s")
    print(json.dumps(found, indent=1))
    return 0 if not found.get("honest_failed") else 1
