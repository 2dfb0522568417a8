"""Workers that share no file system: who gets rows, who is refused, and what a worker has of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from kbsub.adapters.pin import PIN
from kbsub.eval.run.batch import job as jobs
from kbsub.eval.run.batch.cluster import Workers
from support.paths import child_path

HOLDS = {"nthreads": 1, "resources": {"GPU": 1}}


class Client:
    """A scheduler's client whose workers say what the test says."""

    def __init__(self, said):
        self.said, self.asked = said, []

    def scheduler_info(self, n_workers):
        return {
            "workers": {name: HOLDS if answer is not None else {"resources": {}} for name, answer in self.said.items()}
        }

    def run(self, function, device, *, workers, on_error):
        self.asked += workers
        return {name: self.said[name] for name in workers}


def answer(pin=PIN, gpu="NVIDIA H200", torch="2.9.0"):
    return {"pin": pin, "gpu": gpu, "torch": torch}


def test_a_worker_of_another_pin_or_without_this_package_gets_no_row():
    said = {
        "a": answer(),
        "old": answer(pin="0" * 40),
        "bare": ModuleNotFoundError("No module named 'kbsub'"),
        "cpu": None,
    }
    workers = Workers(Client(said), "cuda")
    assert workers.look() == ["a"]
    assert workers.machines() == {("NVIDIA H200", "2.9.0")}
    notes = "\n".join(workers.notes())
    assert "worker old gets no row: its kbsub is of KernelBench at 000000000000" in notes
    assert "worker bare gets no row: kbsub does not answer there: ModuleNotFoundError" in notes


def test_one_that_joins_later_is_asked_then_and_only_once():
    client = Client({"a": answer()})
    workers = Workers(client, "cuda")
    workers.look()
    client.said["b"] = answer(gpu="NVIDIA H100")
    assert workers.look() == ["a", "b"] == workers.look() and client.asked == ["a", "b"]
    assert workers.machines() == {("NVIDIA H200", "2.9.0"), ("NVIDIA H100", "2.9.0")}


def test_a_job_of_another_pin_is_not_judged():
    settings = replace(jobs.Settings(device="cpu"), pin="0" * 40)
    job = jobs.Job("level_1_problem_40_sample_0", "level1_40", 1, 40, 0, "x = 1", settings)
    row = jobs.judge(job, lambda *_, **__: pytest.fail("it was run"))
    assert row["status"] == "NOT_RUN" and "of KernelBench at 000000000000" in row["message"], row


def test_the_judge_says_which_machine_it_was(monkeypatch):
    monkeypatch.setattr(jobs, "this_machine", lambda device: ("NVIDIA H100", "2.8.0"))
    job = jobs.Job("level_1_problem_40_sample_0", "level1_40", 1, 40, 0, "", jobs.Settings(), problem="is no text")
    row = jobs.judge(job, lambda *_, **__: pytest.fail("it was run"))
    end = row["stages"]["official"]
    assert (row["status"], end["gpu"], end["torch"]) == ("COMPILE_ERROR", "NVIDIA H100", "2.8.0"), row


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_two_homes_judge_one_folder(tmp_path):
    """A scheduler and two workers, each with a home, a cache and a working folder of its own; the sources travel."""
    pytest.importorskip("distributed", reason="distributed: pip install 'kb-submissions[cluster]'")
    base = {**os.environ, "PYTHONPATH": child_path()["PYTHONPATH"]}
    running: list[subprocess.Popen] = []

    def start(name, *arguments):
        home = tmp_path / name
        home.mkdir()
        own = {**base, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        log = (home / "log").open("w")
        running.append(subprocess.Popen([sys.executable, "-m", *arguments], cwd=home, env=own, stderr=log, stdout=log))
        return home

    def address():
        text = (tmp_path / "scheduler" / "log").read_text()
        found = re.search(r"Scheduler at:\s+(tcp://\S+)", text)
        return found and found[1]

    try:
        start("scheduler", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        where = waited(address)
        options = ["--nthreads", "1", "--resources", "GPU=1", "--no-dashboard"]
        homes = [start(name, "distributed.cli.dask_worker", where, *options) for name in ("one", "two")]
        for home in homes:
            waited(lambda home=home: "Registered to" in (home / "log").read_text())
        runs = tmp_path / "runs"
        runs.mkdir()
        for number in range(4):
            text = f"# {number}\nimport torch\nclass ModelNew(torch.nn.LayerNorm): ...\n"
            (runs / f"level_1_problem_40_sample_{number}_kernel.py").write_text(text)
        command = [sys.executable, "-m", "kbsub.eval.cli", "eval", str(runs), "--scheduler", where, "--only", "source"]
        done = subprocess.run(command, env=base, capture_output=True, text=True, timeout=200)
        rows = [json.loads(path.read_text()) for path in (runs / "kbsub_rows").glob("*.json")]
        assert len(rows) == 4 and {row["stages"]["source"]["status"] for row in rows} == {"OK"}, (
            done.stdout + done.stderr
        )
        cells = [len(list((home / "cache" / "kbsub" / "cells").glob("*"))) for home in homes]
        assert sum(cells) == 4 and all(cells), f"each worker judged in cells of its own home: {cells}"
    finally:
        for process in running:
            process.kill()
            process.wait()


def waited(found, seconds=60.0):
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := found():
            return value
        time.sleep(0.1)
    raise AssertionError("not within a minute")
