"""Batches on the CPU with a stand-in judge: keys, resuming, upstream's summary, interruptions, lost workers."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kbsub.eval.commands.eval_folder import run_folder
from kbsub.eval.process.cell import probe
from kbsub.eval.process.isolated import Outcome, Status
from kbsub.eval.report import batch_report
from kbsub.eval.run.batch import job as jobs
from kbsub.eval.run.batch import rows as batches
from kbsub.eval.run.batch import samples, work
from kbsub.eval.run.batch.build_ahead import run_here
from kbsub.eval.run.batch.job import Settings
from kbsub.eval.run.batch.rows import read_row, row_path
from kbsub.eval.run.batch.samples import BatchError, find_samples
from kbsub.eval.run.batch.work import prepare
from kbsub.eval.tasks.cell import cell_of
from support.paths import child_path

# The stand-in keeps a ledger and kills its worker: a cell that confines would not let it.
SETTINGS = Settings(device="cpu", target="support.batch_targets:judge", timeout_s=30.0, cell="unconfined")


def sample(folder: Path, number: int, words: str, *, level: int = 1, problem: int = 40) -> str:
    """A sample of the stand-in's words, which also say where its ledger lies."""
    return written(folder, number, f"{words} ledger={folder.parent / 'ledger'}", level=level, problem=problem)


def written(folder: Path, number: int, source: str, *, level: int = 1, problem: int = 40) -> str:
    stem = f"level_{level}_problem_{problem}_sample_{number}"
    (folder / f"{stem}_kernel.py").write_text(source)
    return stem


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", child_path()["PYTHONPATH"])
    runs = tmp_path / "runs"
    runs.mkdir()
    return runs


def ledger(folder: Path) -> list[str]:
    """The sample stems that were judged, in order, from every attempt."""
    path = folder.parent / "ledger"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def evaluate(batch, run=run_here):
    return work.evaluate(batch, run)


def fake(status: Status = Status.OK, official: dict | None = None):
    """A `run` that judges nothing: every job gets this outcome."""
    words = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {}, "runtime": 2.0}
    value = {"official": official or words} if status is Status.OK else None

    def run(batch):
        for job in map(batch.job, batch.jobs):
            yield job, jobs.row_of(job, {"official": Outcome(status, value, "" if value else "why", "", 0.1)})

    return run


def rows_of(folder: Path) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in (folder / samples.ROWS_FOLDER).glob("*.json")}


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if path.is_file()]


# ---- names, keys, summary ----


def test_samples_are_found_by_upstreams_names(folder):
    sample(folder, 10, "")
    sample(folder, 2, "")
    sample(folder, 0, "", level=2, problem=7)
    (folder / "notes.py").write_text("")
    (folder / "level_1_problem_40_sample_x_kernel.py").write_text("")
    (folder / "level_1_problem_40_sample_2.py").write_text("")
    (folder / "level_3_problem_1_sample_0.py").write_text("")
    found = [(s.level, s.problem_id, s.sample_id) for s in find_samples(folder).samples]
    assert found == [(1, 40, 2), (1, 40, 10), (2, 7, 0), (3, 1, 0)]
    assert find_samples(folder).ignored == {
        "not named level_L_problem_P_sample_S[_kernel].py": ["level_1_problem_40_sample_x_kernel.py", "notes.py"],
        "the same sample as level_1_problem_40_sample_2_kernel.py beside it": ["level_1_problem_40_sample_2.py"],
    }


def test_an_empty_folder_says_what_to_do(folder):
    with pytest.raises(BatchError, match="kbsub export"):
        find_samples(folder)


# what changes between two runs -> how many of the two rows are judged again
CHANGES = {
    "nothing": (lambda f: SETTINGS, 0),
    "one source": (lambda f: (sample(f, 0, "ms=2"), SETTINGS)[1], 1),
    "the precision": (lambda f: Settings(device="cpu", target=SETTINGS.target, precision="fp16"), 2),
    "the timeout": (lambda f: Settings(device="cpu", target=SETTINGS.target, timeout_s=99.0), 0),
    "a row file is cut short": (lambda f: (cut(f), SETTINGS)[1], 1),
}


def cut(folder: Path) -> None:
    path = row_path(folder, "level_1_problem_40_sample_1")
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_kept_by_source_and_protocol(folder, change):
    sample(folder, 0, "ms=1")
    sample(folder, 1, "ms=1")
    evaluate(prepare(folder, SETTINGS), fake())
    act, again = CHANGES[change]
    assert len(prepare(folder, act(folder)).jobs) == again


def test_a_row_that_was_not_run_is_tried_again(folder):
    sample(folder, 0, "")
    evaluate(prepare(folder, SETTINGS), fake(Status.NOT_RUN))
    assert len(prepare(folder, SETTINGS).jobs) == 1
    assert not (folder / batches.SUMMARY).exists(), "nothing official, no summary"


def test_the_summary_is_upstreams_format_with_every_sample(folder):
    for number in (0, 1, 10):
        sample(folder, number, "")
    sample(folder, 0, "", problem=36)
    metadata = {"correctness_trials": "(5 / 5)"}
    official = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": metadata, "runtime": 0.3}
    evaluate(prepare(folder, SETTINGS), fake(official={**official, "runtime_stats": {"mean": 0.3}}))
    summary = json.loads((folder / "eval_results.json").read_text())
    assert list(summary) == ["36", "40"]
    assert [entry["sample_id"] for entry in summary["40"]] == [0, 1, 10]
    keys = ["sample_id", "compiled", "correctness", "metadata", "runtime", "runtime_stats"]
    assert list(summary["40"][0]) == keys and summary["40"][0]["runtime"] == 0.3


FAILURES = [Status.TIMEOUT, Status.CRASHED, Status.COMPILE_ERROR]


@pytest.mark.parametrize("status", FAILURES)
def test_a_failure_on_a_cpu_is_no_word_of_upstreams(folder, status):
    sample(folder, 0, "")
    rows = evaluate(prepare(folder, SETTINGS), fake(status))
    assert [row["status"] for row in rows.values()] == [status.value]
    assert not (folder / batches.SUMMARY).exists()


@pytest.mark.parametrize("status", FAILURES)
def test_a_failed_row_reads_as_upstreams_script_writes_it(folder, status):
    sample(folder, 0, "")
    evaluate(prepare(folder, replace(SETTINGS, device="cuda")), fake(status))
    (entry,) = json.loads((folder / "eval_results.json").read_text())["40"]
    assert (entry["compiled"], entry["correctness"], entry["runtime"]) == (False, False, -1.0)
    assert entry["metadata"] == {"error": f"{status}: why"}


def test_the_record_says_which_gpu_judged_what(folder, monkeypatch):
    """Two GPUs of one machine share a name: a batch on both must show both."""
    for number in range(3):
        sample(folder, number, "")
    uuids = iter(["uuid-a", "uuid-b", "uuid-a"])
    monkeypatch.setattr(jobs, "gpu_uuid", lambda index: next(uuids))
    words = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {}}
    ended = Outcome(Status.OK, {"official": words}, "", "", 0.5)
    batch, seen = prepare(folder, replace(SETTINGS, device="cuda")), batch_report.Seen(3)

    def run(batch):
        for job in map(batch.job, batch.jobs):
            yield job, jobs.judge(job, lambda *_, **__: ended)

    work.evaluate(batch, run, seen.add)
    record = batch_report.record(batch, seen, {"gpus": 2}, 1.0)
    assert record["rows_by_gpu"] == {"uuid-a": 2, "uuid-b": 1}
    assert record["judge_seconds"] == 1.5


def test_two_levels_get_two_summaries(folder):
    sample(folder, 0, "")
    sample(folder, 0, "", level=2)
    evaluate(prepare(folder, SETTINGS), fake())
    names = sorted(path.name for path in folder.glob("*eval_results*.json"))
    assert names == ["eval_results_level_1.json", "eval_results_level_2.json"]


def test_a_summary_of_upstreams_own_script_is_never_overwritten(folder):
    sample(folder, 0, "")
    sample(folder, 1, "")
    (folder / "eval_results.json").write_text('{"40": "theirs"}')
    evaluate(prepare(folder, SETTINGS), fake())
    evaluate(prepare(folder, SETTINGS), fake())
    assert json.loads((folder / "eval_results.json").read_text()) == {"40": "theirs"}
    assert len(json.loads((folder / "kbsub_eval_results.json").read_text())["40"]) == 2


# ---- interruptions ----

DRIVER = f"""
import sys
from pathlib import Path
from rich.console import Console
from kbsub.eval.commands.eval_folder import run_folder
from kbsub.eval.run.batch.job import Settings
from kbsub.eval.run.batch.samples import BatchError
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
try:
    code = run_folder(Path(sys.argv[1]), {SETTINGS!r}, console=Console(width=400))
except BatchError as error:
    print("BatchError:", error)
    code = 5
sys.exit(code)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(folder), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_rows(folder: Path, count: int, process: subprocess.Popen) -> None:
    end = time.monotonic() + 60
    while len(list((folder / samples.ROWS_FOLDER).glob("*.json"))) < count:
        assert process.poll() is None, f"ended early: {process.communicate()[0]}"
        assert time.monotonic() < end, "no rows within a minute"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_at_any_point_no_finished_row_is_lost(folder, number):
    stems = [sample(folder, index, f"sleep=0.1 ms={index}") for index in range(5)]
    process = start(folder)
    wait_for_rows(folder, 2, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    if number is signal.SIGINT:
        assert process.returncode == 130 and "finished rows are kept" in output, output
    kept = rows_of(folder)  # json.loads of every row: none is half written
    assert len(kept) >= 2
    if (folder / batches.SUMMARY).exists():
        assert len(json.loads((folder / batches.SUMMARY).read_text())["40"]) >= len(kept) - 1
    again = start(folder)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0, output
    assert sorted(rows_of(folder)) == sorted(stems)
    record = json.loads((folder / "kbsub_batch.json").read_text())
    assert (record["rows"], record["judged_now"]) == (5, 5 - len(kept)), "the record is of this invocation"
    assert record["statuses"] == {"OK": 5 - len(kept)} and record["seconds"] > 0
    assert [e["runtime"] for e in json.loads((folder / batches.SUMMARY).read_text())["40"]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    judged = ledger(folder)
    assert all(judged.count(stem) == 1 for stem in kept), f"finished rows were judged again: {judged}"


def test_a_full_disk_loses_no_finished_row_and_says_what_to_do(folder):
    for index in range(4):
        sample(folder, index, f"ms={index}" + (" padding=200000" if index == 2 else ""))
    process = start(folder, "100000")  # no file may grow beyond this: the kernel refuses the write, as a full disk does
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 5 and "2 of 4 rows are finished and kept" in output, output
    assert sorted(rows_of(folder)) == ["level_1_problem_40_sample_0", "level_1_problem_40_sample_1"]
    assert len(json.loads((folder / batches.SUMMARY).read_text())["40"]) == 2
    assert not drafts(folder), "a half-written draft was left behind"
    again = start(folder)
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and len(rows_of(folder)) == 4, output


def test_a_candidate_that_exits_costs_its_own_row(folder):
    sample(folder, 0, "ms=1")
    bad = sample(folder, 1, "exit=7")
    sample(folder, 2, "ms=1")
    process = start(folder)
    output, _ = process.communicate(timeout=60)
    rows = rows_of(folder)
    assert process.returncode == 1 and rows[bad]["status"] == "CRASHED", output
    assert [row["status"] for stem, row in sorted(rows.items()) if stem != bad] == ["OK", "OK"]


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_each_row_is_judged_in_a_cell_of_its_own(folder, level, tmp_path, monkeypatch):
    """It cannot write another's source, another's row or another's cache, and the row says what kept it from that."""
    if probe(level).level != level:
        pytest.skip(f"cell: this machine has no {level} ({probe(level).why.get(level)})")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    honest = written(folder, 0, "ms=1")  # without a ledger, which it could not write
    places = {
        "source": folder / f"{honest}_kernel.py",
        "row": row_path(folder, honest),
        "cache": cell_of([sha256(honest, folder)], "level1_40", None).cache / "kept",
    }
    places["cache"].parent.mkdir(parents=True, exist_ok=True)
    places["cache"].write_text("honest")
    settings = replace(SETTINGS, cell=level)
    evaluate(prepare(folder, settings))
    before = {name: path.read_bytes() for name, path in places.items()}
    for number, path in enumerate(places.values(), start=1):
        written(folder, number, f"write={path}")
    rows = evaluate(prepare(folder, settings))
    assert {name: path.read_bytes() for name, path in places.items()} == before
    assert [row["status"] for row in rows.values()] == ["OK"] * 4, rows
    assert {row["confined"]["level"] for row in rows.values()} == {level}


# ---- every kind of verdict, kept apart in one row ----

RIGHT = "import torch\nclass ModelNew(torch.nn.LayerNorm): ...\n"
OVERRIDES = "batch_size = 3\n" + RIGHT


def test_a_stage_that_is_asked_for_later_is_added_to_the_row(folder):
    """On a CPU the source verdict reads the text; the official one of the first run is not given again."""
    stem = sample(folder, 0, "ms=3")
    first = evaluate(prepare(folder, SETTINGS))[stem]
    more = replace(SETTINGS, stages=("official", "source"))
    batch = prepare(folder, more)
    assert [(todo.stem, todo.stages) for todo in batch.jobs] == [(stem, ("source",))]
    row = evaluate(batch)[stem]
    assert ledger(folder) == [stem], "the official verdict was given again"
    assert (row["status"], row["official"]) == ("OK", first["official"])
    assert row["stages"]["official"] == first["stages"]["official"]
    assert row["stages"]["source"]["status"] == "OK" and row["source"]["overrides"] == {}
    assert prepare(folder, more).jobs == [] and prepare(folder, SETTINGS).jobs == []


def test_what_a_file_overrides_stands_in_its_row_and_line(folder):
    stem = written(folder, 0, OVERRIDES)
    row = evaluate(prepare(folder, replace(SETTINGS, stages=("source",))))[stem]
    assert row["source"]["overrides"] == {"batch_size": {"task": "16", "file": "3"}}, row
    assert row["stages"]["source"]["size"]["name"] == "official" and row["status"] == "NOT_RUN"
    assert "source: NOT_RUN redefines batch_size (16 -> 3)" in batch_report.row_words(row)


def test_what_a_file_overrides_is_told_of_the_task_as_it_is_written(folder):
    """At a smaller size the task's own numbers would be others, and its own number an override."""
    stem = written(folder, 0, "batch_size = 16\n" + RIGHT)
    row = evaluate(prepare(folder, replace(SETTINGS, stages=("source",), size="small")))[stem]
    assert row["source"]["overrides"] == {}, row


def test_after_a_compile_error_nothing_else_is_asked_or_tried_again(folder):
    stem = sample(folder, 0, "exit=7")
    both = replace(SETTINGS, stages=("official", "source"))
    row = evaluate(prepare(folder, both))[stem]
    assert row["stages"]["source"]["message"] == "the official stage ended with CRASHED"
    assert prepare(folder, both).jobs == []


OTHER_MACHINE = {"another GPU": ("NVIDIA H100", "2.9.0"), "another torch": ("NVIDIA H200", "2.8.0")}


@pytest.mark.parametrize("name", OTHER_MACHINE)
def test_a_verdict_of_another_machine_is_given_again(folder, monkeypatch, name):
    sample(folder, 0, "")
    here = ("NVIDIA H200", "2.9.0")
    monkeypatch.setattr(jobs, "this_machine", lambda device: here)
    evaluate(prepare(folder, SETTINGS), fake())
    assert prepare(folder, SETTINGS, machines=frozenset({here, OTHER_MACHINE[name]})).jobs == []
    assert len(prepare(folder, SETTINGS, machines=frozenset({OTHER_MACHINE[name]})).jobs) == 1


def test_what_ran_out_of_time_is_judged_again_when_there_is_more(folder):
    sample(folder, 0, "")
    evaluate(prepare(folder, SETTINGS), fake(Status.TIMEOUT))
    assert prepare(folder, replace(SETTINGS, timeout_s=29.0)).jobs == []
    assert len(prepare(folder, replace(SETTINGS, timeout_s=31.0)).jobs) == 1


def test_a_status_can_be_tried_again(folder):
    bad, _ = sample(folder, 0, "exit=7"), sample(folder, 1, "ms=1")
    evaluate(prepare(folder, SETTINGS))
    assert [todo.stem for todo in prepare(folder, SETTINGS, retry=work.retried("CRASHED,TIMEOUT")).jobs] == [bad]
    with pytest.raises(BatchError, match="--retry FINE: no such status; there are OK, COMPILE_ERROR"):
        work.retried("FINE")


def judged(folder: Path) -> tuple[int, str]:
    """(exit code, what was printed) of a batch in this process."""
    text = io.StringIO()
    code = run_folder(folder, SETTINGS, console=Console(file=text, width=400))
    return code, text.getvalue()


def test_a_second_batch_on_a_folder_is_refused(folder):
    sample(folder, 0, "ms=1")
    who = rf"another kbsub eval is at work on it \(process {os.getpid()} on \S+, since 20\d\d-.*\); .* end it .*again"
    with work.alone(folder):
        with pytest.raises(BatchError, match=who):
            judged(folder)
        (folder / work.HOLDER).write_text("no JSON\x1b[2J")  # whoever wrote it: the refusal stays one sentence
        with pytest.raises(BatchError, match=r"is at work on it; its rows"):
            judged(folder)
    assert ledger(folder) == []
    assert judged(folder)[0] == 0, "and not when the other is done"
    assert not (folder / work.HOLDER).exists()


def test_a_folder_whose_holder_was_killed_is_free(folder):
    sample(folder, 0, "sleep=30")
    process = start(folder)
    end = time.monotonic() + 60
    while not (folder / work.HOLDER).exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    process.communicate(timeout=30)
    assert json.loads((folder / work.HOLDER).read_text())["process"] == process.pid
    with work.alone(folder):
        assert json.loads((folder / work.HOLDER).read_text())["process"] == os.getpid()


def test_a_row_file_that_is_no_file_costs_itself(folder):
    bad, good = sample(folder, 0, "ms=1"), sample(folder, 1, "ms=1")
    row_path(folder, bad).mkdir(parents=True)
    code, output = judged(folder)
    assert code == 1 and "is no regular file, and is not replaced" in output, output
    files = [path.stem for path in (folder / samples.ROWS_FOLDER).glob("*.json") if path.is_file()]
    assert files == [good] and "1 could not be kept" in output


def test_each_failure_is_listed_once_and_lines_say_how_much_is_left(folder):
    sample(folder, 0, "exit=7")
    sample(folder, 1, "ms=1")
    _, output = judged(folder)
    assert output.count("CRASHED the process ended") == 1 and "[1 of 2, about" in output, output
    code, output = judged(folder)
    assert code == 1 and output.count("CRASHED the process ended") == 1, output


def test_a_tree_is_a_folder_of_runs_each_with_its_summary(folder):
    (folder / "model_a").mkdir()
    (folder / "model_b").mkdir()
    sample(folder / "model_a", 0, "ms=1")
    sample(folder / "model_b", 0, "ms=2")
    rows = evaluate(prepare(folder, SETTINGS), fake())
    assert list(rows) == ["model_a/level_1_problem_40_sample_0", "model_b/level_1_problem_40_sample_0"]
    for name in ("model_a", "model_b"):
        assert json.loads((folder / name / batches.SUMMARY).read_text())["40"][0]["sample_id"] == 0
    assert not (folder / batches.SUMMARY).exists() and prepare(folder, SETTINGS).jobs == []


def sha256(stem: str, folder: Path) -> str:
    return hashlib.sha256((folder / f"{stem}_kernel.py").read_bytes()).hexdigest()


def test_a_row_whose_cell_is_refused_is_not_run_and_says_so(folder, monkeypatch):
    monkeypatch.setenv("KBSUB_CELL_REFUSE", "unshare")
    stem = sample(folder, 0, "ms=1")
    row = evaluate(prepare(folder, replace(SETTINGS, cell="namespaces")))[stem]
    assert row["status"] == "NOT_RUN" and row["confined"] is None, row
    assert "the cell cannot be entered" in row["message"] and "unshare" in row["message"]
    assert ledger(folder) == [], "it ran all the same"


def test_eval_command_takes_a_run_folder(folder):
    from typer.testing import CliRunner

    from kbsub.eval.cli import app

    stem = written(folder, 0, 'CUDA_SOURCE = ""\nclass ModelNew: ...\n')
    outcome = CliRunner().invoke(app, ["eval", str(folder), "--only", "official"])
    assert outcome.exit_code == 0, outcome.output
    assert "NOT_RUN needs an NVIDIA GPU (CUDA_SOURCE)" in outcome.output
    assert "Nothing official was certified here" in outcome.output and not (folder / batches.SUMMARY).exists()
    assert rows_of(folder)[stem]["status"] == "NOT_RUN"


# ---- a cluster ----

distributed = pytest.importorskip("distributed", reason="distributed: pip install 'kb-submissions[cluster]'")


def test_a_worker_killed_half_way_loses_no_row(folder, monkeypatch):
    from kbsub.eval.run.batch import cluster

    monkeypatch.setattr(cluster, "gpu_count", lambda: 2)  # nothing here runs on a GPU

    stems = [
        sample(folder, index, f"sleep=0.05 ms={index}" + (" kill_worker=1" if index == 3 else "")) for index in range(8)
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-first,GPU-second")
    with cluster.local_client(cluster.gpu_environments(range(2))) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"].values()
        assert sorted((w["nthreads"], w["resources"]["GPU"]) for w in workers) == [(1, 1.0), (1, 1.0)]
        rows = evaluate(prepare(folder, SETTINGS), cluster.run_on(client))
    assert (folder.parent / "killed-level_1_problem_40_sample_3").exists(), (
        "no worker was killed: the test proves nothing"
    )
    assert sorted(rows) == stems and {row["status"] for row in rows.values()} == {"OK"}
    assert [e["runtime"] for e in json.loads((folder / batches.SUMMARY).read_text())["40"]] == [
        float(i) for i in range(8)
    ]
    assert ledger(folder).count(stems[3]) == 2, "the lost row must have been judged again"
    seen = {line.split()[1] for line in (folder.parent / "ledger").read_text().splitlines()}
    assert seen == {"GPU-first", "GPU-second"}, f"each worker sees its own GPU: {seen}"


def test_a_row_that_kills_every_worker_is_a_row_too(folder):
    from kbsub.eval.run.batch import cluster

    killer = sample(folder, 0, "kill_always=1")
    good = sample(folder, 1, "ms=1")
    with cluster.local_client([{}]) as client:
        rows = evaluate(prepare(folder, SETTINGS), cluster.run_on(client))
    assert rows[killer]["status"] == "CRASHED" and "lost with its workers" in rows[killer]["message"]
    assert rows[good]["status"] == "OK"


@pytest.mark.slow
def test_ctrl_c_is_quiet_under_dask_too(folder, tmp_path):
    """As a terminal sends it: to every process of the group, workers and nannies included."""
    for index in range(6):
        sample(folder, index, "sleep=3")
    script = tmp_path / "driver.py"  # a file: dask's workers import the main module again
    body = DRIVER.replace("import run_folder", "import Where, run_folder")
    body = body.replace("console=Console", "where=Where(workers=2), console=Console")
    head, main = body.split("try:", 1)
    script.write_text(head + "if __name__ == '__main__':\n" + textwrap.indent("try:" + main, "    "))
    command = [sys.executable, str(script), str(folder)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    process = subprocess.Popen(command, **pipes)
    wait_for_rows(folder, 1, process)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "Traceback" not in output and output.strip().splitlines()[-1].startswith("interrupted; "), output


@pytest.mark.slow
def test_a_row_of_a_cluster_is_confined_as_one_here(folder):
    from kbsub.eval.run.batch import cluster

    stem = written(folder, 0, "ms=1")
    with cluster.local_client([{}]) as client:
        rows = evaluate(prepare(folder, replace(SETTINGS, cell=None)), cluster.run_on(client))
    assert rows[stem]["status"] == "OK" and rows[stem]["confined"] == probe().record(), rows


WORKERS = [
    ({}, "none of its 0 workers holds"),
    ({"a": {"nthreads": 1, "resources": {}}}, "none of its 1 workers holds"),
    ({"a": {"nthreads": 8, "resources": {"GPU": 1}}}, "worker a has 8 threads"),
    ({"a": {"nthreads": 1, "resources": {"GPU": 2}}}, "2 GPU"),
    ({"a": {"nthreads": 1, "resources": {"GPU": 1}}, "cpu": {"nthreads": 8, "resources": {}}}, None),
]


@pytest.mark.parametrize(("workers", "words"), WORKERS)
def test_workers_that_would_share_a_gpu_are_refused(workers, words):
    from kbsub.eval.run.batch.cluster import worker_problem

    problem = worker_problem(workers)
    assert (problem is None) if words is None else (problem and words in problem)


def test_no_scheduler_is_said_within_seconds():
    from kbsub.eval.run.batch.cluster import remote_client

    with (
        pytest.raises(BatchError, match="no dask scheduler answers"),
        remote_client("tcp://127.0.0.1:1", timeout_s=1.0),
    ):
        pass


def test_broken_row_files_count_as_not_there(tmp_path):
    (tmp_path / "a.json").write_text('{"schema": 99}')
    assert read_row(tmp_path / "a.json") is None and read_row(tmp_path / "none.json") is None


HALF_A_ROW = {  # what a hand, or a sample where nothing confines it, has made of a finished row
    "no protocol": {"protocol": None},
    "a protocol without a device": {"protocol": {}},
    "an unknown status": {"status": "FINE"},
    "no seconds": {"seconds": "3"},
    "an official verdict that is none": {"official": {"compiled": True}},
    "a sample that is no number": {"sample_id": "0"},
}


@pytest.mark.parametrize("name", HALF_A_ROW)
def test_a_row_that_is_not_whole_is_judged_again_and_ends_no_batch(folder, name):
    stem = sample(folder, 0, "ms=1")
    good = evaluate(prepare(folder, SETTINGS))[stem]
    assert prepare(folder, SETTINGS).jobs == []
    row_path(folder, stem).write_text(json.dumps({**good, **HALF_A_ROW[name]}))
    batch = prepare(folder, SETTINGS)
    assert [job.stem for job in batch.jobs] == [stem]
    assert evaluate(batch)[stem]["status"] == "OK"
