"""`kbsub eval` over harmful files in a place of its own, and what there is to compare before and after.

The place lies outside /tmp, which a cell replaces by one of its own: what is attacked there must be in sight. It holds
a copy of this repository that the run is made with, a copy of the checkout where there is one, yesterday's results, a
neighbour's file, caches of others, a run folder. Each harmful file of tests/harms is written there with its targets in
its text: an attacker knows the place.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import resource
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

from kbsub.eval.process.mounts import HIDDEN, inside
from support.paths import ROOT, TESTS

HONEST = '''"""{name}: right."""

import torch.nn as nn


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
'''
YESTERDAY = "yesterday"  # the row that another run has left in the result file
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE, resource.RLIMIT_NPROC, resource.RLIMIT_DATA, resource.RLIMIT_AS)


@dataclass
class Place:
    """Where a run and its targets lie. `targets`: NAME -> what os.environ["CASE_NAME"] stands for in a harmful file."""

    folder: Path
    checkout: Path | None
    port: int
    yesterday: str = ""  # the result file as a run finds it
    mark: str = field(default_factory=lambda: f"kbsub-harm-{secrets.token_hex(8)}")

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def caches(self) -> Path:
        return self.folder / "home" / ".cache" / "kbsub"

    @property
    def task(self) -> Path:
        return self.folder / "task" / "reference.py"

    @property
    def targets(self) -> dict[str, str]:
        found = {
            "NEIGHBOUR": self.work / "z_honest.py",
            "REPOSITORY": self.folder / "repository",
            "CHECKOUT": self.folder / "checkout",
            "TASK": self.task,
            "RUN_FOLDER": self.folder / "batch",
            "PID_FILE": self.folder / "pid",
            "RESULTS": self.work,
            "CUBIN_CACHE": self.caches / "cubin",
            "HOST_CACHE": self.caches / "host",
            "CELLS": self.caches / "cells",
            "MARK": self.mark,
            "PORT": self.port,
        }
        return {name: str(value) for name, value in found.items()}

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a run here, without a GPU."""
        found = {"PYTHONPATH": self.folder / "repository" / "build" / "types", "HOME": self.folder / "home"}
        found["XDG_CACHE_HOME"] = self.folder / "home" / ".cache"
        return {**{name: str(path) for name, path in found.items()}, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def write(self, stem: str, text: str, folder: Path | None = None) -> Path:
        """A candidate's file, in the work folder or in `folder`, with its targets in its text."""
        for name, value in self.targets.items():
            text = text.replace(f'os.environ["CASE_{name}"]', repr(value))
        assert "CASE_" not in text, stem
        file = (folder or self.work) / f"{stem}.py"
        file.write_text(text)
        return file


@contextlib.contextmanager
def a_place() -> Iterator[Place]:
    base = platformdirs.user_cache_path("kbsub-tests") if inside(str(ROOT), HIDDEN) else ROOT / "build"
    folder = base / f"harms-{secrets.token_hex(6)}"
    folder.mkdir(parents=True)
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield _furnished(Place(folder, _checkout(folder), server.getsockname()[1]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _checkout(folder: Path) -> Path | None:
    """A copy of the verified checkout; where there is none, two files of its names and nothing to be used."""
    from kbsub.adapters.checkout import CheckoutError, find_checkout

    copy = folder / "checkout"
    try:
        shutil.copytree(find_checkout().path, copy, symlinks=True)
        return copy
    except CheckoutError:
        for name in ("KernelBench/level1/40_LayerNorm.py", "src/kernelbench/eval.py"):
            (copy / name).parent.mkdir(parents=True)
            (copy / name).write_text("return self.ln(x)\nif not torch.allclose(\n")
        return None


def _furnished(place: Place) -> Place:
    repository = place.folder / "repository"
    for name in ("adapters", "eval", "submissions"):
        shutil.copytree(ROOT / name, repository / name, symlinks=True)
    shutil.copy(ROOT / "KERNELBENCH_COMMIT", repository)
    links = repository / "build" / "types" / "kbsub"
    links.mkdir(parents=True)
    for name in ("adapters", "eval", "submissions"):
        (links / name).symlink_to(f"../../../{name}")
    # Compiled before the run, so that a .pyc that appears or changes is somebody's doing.
    compiled = [sys.executable, "-m", "compileall", "-q", "adapters", "eval", "submissions"]
    subprocess.run(compiled, cwd=repository, check=True, stdout=subprocess.DEVNULL)
    place.task.parent.mkdir()
    for file in (TESTS / "support" / "small_layer_norm_task").iterdir():
        if file.is_file():
            shutil.copy(file, place.task.parent / file.name)
    place.work.mkdir()
    place.yesterday = json.dumps(_of_yesterday(place))
    (place.work / "notes.txt").write_text("somebody's notes")
    others = {
        "cubin/first": b"digest and code of the first",
        "cubin/second": b"digest and code of the second",
        "host/kernels-0/kernels.so": b"a neighbour's kernels",
        "host/kernels-0/candidate.cu": b"__fsub_rn(x[i], m)",
        f"cells/{'0' * 64}/cache/host/kernels-1/kernels.so": b"kernels of a neighbour's cell",
    }
    for name, data in others.items():
        (place.caches / name).parent.mkdir(parents=True, exist_ok=True)
        (place.caches / name).write_bytes(data)
    (place.folder / "home" / ".cupy" / "kernel_cache").mkdir(parents=True)  # made by whoever imports CuPy
    rows = place.folder / "batch" / "kbsub_rows"
    rows.mkdir(parents=True)
    (rows / "level_1_problem_40_sample_0.json").write_text('{"status": "INCORRECT_NUMERICAL", "key": "0"}')
    return place


def _of_yesterday(place: Place) -> dict[str, Any]:
    """A result file of this task and machine, with a row and a baseline that no run of today makes."""
    from kbsub.adapters import environment
    from kbsub.adapters.task import resolve_task

    task = resolve_task(str(place.task), kernelbench=None)
    facts = environment.judge({"device": "cpu"}, lambda event: None)["environment"]
    official = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {}}
    row = {"sha256": "1" * 64, "contract": None, "precision": "fp32", "status": "OK", "official": official}
    return {
        "schema": 1,
        "environment": {**facts, "project_commit": None},
        "task": {name: getattr(task, name) for name in ("level", "problem_id", "sha256", "provenance")},
        "candidates": {YESTERDAY: row},
        "baselines": {"eager": {"timing": {}}},
    }


# ---- what is compared ----


def files_of(folder: Path, but: Sequence[str] = ()) -> dict[str, str]:
    """Every file, folder and link below: its mode, and the digest of its contents; without the subtrees `but`."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if any(name == each or name.startswith(each + "/") for each in but):
            continue
        facts = path.lstat()
        if stat.S_ISLNK(facts.st_mode):
            content = os.readlink(path)
        else:
            content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(facts.st_mode) else ""
        found[name] = f"{stat.filemode(facts.st_mode)} {content}"
    return found


def settings_of(pid: int) -> dict[str, Any]:
    """What a neighbour could change of a process: affinity, nice, limits; and whether it stands still."""
    found: dict[str, Any] = {"affinity": sorted(os.sched_getaffinity(pid))}
    found["nice"] = os.getpriority(os.PRIO_PROCESS, pid)
    found["limits"] = [resource.prlimit(pid, limit) for limit in LIMITS]
    found["stopped"] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return found


def living() -> dict[int, int]:
    """Every process that is no zombie: its parent."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry.name)] = int(parent)
    return found


def descendants(pid: int) -> set[int]:
    parents, found = living(), {pid}
    while more := {child for child, parent in parents.items() if parent in found and child not in found}:
        found |= more
    return found - {pid}


def orphans(known: set[int]) -> set[int]:
    """Our children that have ended and that nobody has waited for, but `known` ones."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid() and int(entry.name) not in known:
                found.add(int(entry.name))
    return found


def marked(mark: str) -> set[int]:
    """Processes with `mark` in their command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
    return found


@dataclass
class Seen:
    """One run: what came out, what was there before and after, and what was seen meanwhile."""

    code: int
    out: str
    err: str
    seconds: float
    rows: dict[str, Any]
    result: dict[str, Any]
    before: dict[str, Any]
    after: dict[str, Any]
    settings: list[dict[str, Any]]  # of the run's own process, every change of them
    left: dict[str, int]  # row -> marked processes that were there when its line was printed
    survivors: list[int]
    shared: list[str]  # entries of /dev/shm and /tmp with the mark

    @property
    def confined(self) -> list[dict[str, Any]]:
        """Every record of where a candidate ran, {"level", "lacks"}, in whatever stage or verdict it stands."""
        found, level = [], list(self.rows.values())
        while level:
            value = level.pop()
            if isinstance(value, dict):
                found += [value["confined"]] if isinstance(value.get("confined"), dict) else []
                level += value.values()
        return found

    def changed(self) -> list[str]:
        """Names of what is not as it was."""
        names = self.before["files"].keys() | self.after["files"].keys()
        files = [name for name in names if self.before["files"].get(name) != self.after["files"].get(name)]
        kept = [key for key in ("yesterday", "own settings") if self.before[key] != self.after[key]]
        settings = ["settings of the run"] if len(self.settings) != 1 else []
        survivors = ["processes left"] if self.survivors else []
        return sorted([*files, *kept, *settings, *survivors, *self.shared])


def run(
    place: Place,
    stems: Sequence[str],
    *options: str,
    refused: str = "",
    limit_s: float,
    **variables: str,
) -> Seen:
    """`kbsub eval STEMS` with the place's own copy of kbsub, task, checkout and caches.

    The result file holds a row of yesterday. refused: what the machine refuses ("namespaces", "landlock", by comma).
    limit_s: after so long the run is ended, and `code` is what it then says.
    """
    own = {hashlib.sha256((place.work / f"{stem}.py").read_bytes()).hexdigest() for stem in stems}
    not_compared = [
        "pid",
        "work/result.json",  # its rows are compared instead
        *(f"home/.cache/kbsub/cells/{digest}" for digest in own),
    ]
    out = place.work / "result.json"
    out.write_text(place.yesterday)
    command = [sys.executable, "-m", "kbsub.eval.cli", "eval", *(f"{stem}.py" for stem in stems)]
    command += ["--task", str(place.task), "--device", "cpu", "--out", out.name, *options]
    if place.checkout:
        command += ["--kernelbench", str(place.checkout)]
    if refused:
        command = [sys.executable, str(TESTS / "support" / "refuse_calls.py"), refused, *command]
    environment = {**os.environ, **place.variables, **variables}

    def snapshot() -> dict[str, Any]:
        found = json.loads(out.read_text()) if out.exists() else {"candidates": {}}
        yesterday = found["candidates"].get(YESTERDAY), found.get("baselines")
        files, own_settings = files_of(place.folder, not_compared), settings_of(os.getpid())
        return {"files": files, "yesterday": yesterday, "own settings": own_settings}

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: whoever outlives the run becomes ours
    children = descendants(os.getpid())
    before, started = snapshot(), time.monotonic()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=place.work, env=environment, **pipes) as child:
        (place.folder / "pid").write_text(str(child.pid))
        settings: list[dict[str, Any]] = []
        left: dict[str, int] = {}
        lines, errors = [], []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.05):
                with contextlib.suppress(OSError, IndexError):
                    if (found := settings_of(child.pid)) not in settings:
                        settings.append(found)
                if time.monotonic() - started > limit_s:
                    child.kill()

        def read(stream: Any) -> None:
            for line in stream:
                lines.append(line)
                if match := re.match(r"(\w+): \w+ [A-Z_]+[ ,]", line):
                    left[match[1]] = len(marked(place.mark))

        threads = [threading.Thread(target=watch), threading.Thread(target=read, args=(child.stdout,))]
        threads.append(threading.Thread(target=lambda: errors.extend(child.stderr or [])))
        for thread in threads:
            thread.start()
        code = child.wait()
        seconds = time.monotonic() - started
        ended.set()
        time.sleep(0.3)  # time for somebody who waits for the run's end
        survivors = descendants(os.getpid()) - children
        named = [str(path) for root in ("/dev/shm", "/tmp") for path in Path(root).glob(f"{place.mark}*")]
        for pid in survivors:
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        for pid in orphans(children):
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
        for thread in threads:
            thread.join()
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)
    after = snapshot()
    result = json.loads(out.read_text()) if out.exists() else {"candidates": {}}
    return Seen(
        code,
        "".join(lines),
        "".join(errors),
        seconds,
        result["candidates"],
        result,
        before,
        after,
        settings,
        left,
        sorted(survivors),
        named,
    )
