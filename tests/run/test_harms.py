"""Files that attack the run, the disk and the machine: `kbsub eval` over them, everything compared before and after.

Only the attacker's own row may suffer, whichever stage runs it, and however far the machine confines it; where it
confines nothing, the record says so. Files that harm by text or size: test_rows_apart.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest

from kbsub.eval.process.cell import probe
from kbsub.eval.run.batch.job import Settings, stage_key, this_machine
from support import harm_run
from support.harm_run import HONEST, YESTERDAY, Place, Seen
from support.kept import kept
from support.paths import TESTS

FOLDER = TESTS / "harms"
FIRST, LAST = "a_honest", "z_honest"  # LAST is the neighbour that is attacked
NO_WRITING = {"namespaces": "Read-only file system", "landlock": "Permission denied"}
NO_SUCH_PROCESS = {"namespaces": "No such process", "landlock": "Operation not permitted"}
# Stem in tests/harms: what it is told, which shows that it was stopped in the act; None: it computes, and its answer
# counts.
DISK = {
    "edits_a_neighbour": NO_WRITING,
    "edits_the_judge": NO_WRITING,
    "edits_the_task": NO_WRITING,
    "edits_upstreams_evaluator": NO_WRITING,
    "forges_batch_rows": NO_WRITING,
    "poisons_the_cubin_cache": NO_WRITING,
    "poisons_the_host_cache": NO_WRITING,
    "rewrites_yesterdays_rows": NO_WRITING,
}
SIGNALS = {"kills_the_parent": NO_SUCH_PROCESS, "stops_the_parent": NO_SUCH_PROCESS}
SURVIVORS = {"load_while_others_run": None, "outlives_the_run": None}
REST = {"parent_slowed": NO_SUCH_PROCESS, "reaches_out": None}
EVERY = {**DISK, **SIGNALS, **SURVIVORS, **REST}
WRONG = {"outlives_the_run"}  # its answer is zeros
FEW = (
    "edits_the_judge rewrites_yesterdays_rows kills_the_parent load_while_others_run parent_slowed reaches_out".split()
)


@dataclass(frozen=True)
class Run:
    """One `kbsub eval`. level: where the candidates are to be; refused: what the machine refuses (refuse_calls.py)."""

    stages: str
    stems: tuple[str, ...]
    level: str = "namespaces"
    refused: str = ""
    asked: str = ""  # KBSUB_CELL


OFFICIAL = Run("official", tuple(FEW))
REFUSED = Run("official", ("edits_a_neighbour", "kills_the_parent"), "landlock", refused="namespaces")
DISK_AND_SIGNALS = (*DISK, *SIGNALS)
RUNS = {
    "official": OFFICIAL,
    "unshare is refused": REFUSED,
    "official, every file": replace(OFFICIAL, stems=tuple(EVERY)),
    "identity, every file": Run("identity", tuple(EVERY)),
    "stress and oracle, every file": Run("stress,oracle", tuple(EVERY)),
    "guards, every file": Run("guards", tuple(EVERY)),
    "official, Landlock": Run("official", (*DISK_AND_SIGNALS, *SURVIVORS), "landlock", asked="landlock"),
    "identity, Landlock": Run("identity", DISK_AND_SIGNALS, "landlock", asked="landlock"),
    "stress and oracle, unshare is refused": Run("stress,oracle", DISK_AND_SIGNALS, "landlock", refused="namespaces"),
}
QUICK = ("official", "unshare is refused")


@pytest.fixture(scope="module")
def place():
    with harm_run.a_place() as found:
        yield found


def possible(run: Run) -> Run:
    """`run` as this machine can make it; skipped where the level cannot be had."""
    works = probe(run.level if run.level != "unconfined" else None)
    if works.level != run.level and run.level != "unconfined":
        pytest.skip(f"cell: this machine has no {run.level} ({works.why.get(run.level)})")
    if run.level == "landlock" and any("signals" in each for each in works.lacks):
        return replace(run, stems=tuple(stem for stem in run.stems if stem not in SIGNALS))
    return run


def made(place: Place, run: Run) -> Seen:
    """The run of an honest file, the harmful ones, and another honest file."""
    run = possible(run)
    for stem in run.stems:
        place.write(stem, (FOLDER / f"{stem}.py").read_text())
    for stem in (FIRST, LAST):
        place.write(stem, HONEST.format(name=stem))
    stems = [FIRST, *run.stems, LAST]
    return harm_run.run(
        place,
        stems,
        "--only",
        run.stages,
        "--timeout",
        "60",
        refused=run.refused,
        limit_s=60.0 * len(stems),
        **({"KBSUB_CELL": run.asked} if run.asked else {}),
    )


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in RUNS]
)
def seen(request, tmp_path_factory):
    run = possible(RUNS[request.param])
    base = tmp_path_factory.getbasetemp()
    found = kept(base, f"harms-{request.param}", lambda _: asdict(made(request.getfixturevalue("place"), run)))
    return run, Seen(**vars(found))


pytestmark = pytest.mark.timeout(1800)  # the first test of a run waits for all its files


def stages_of(row: dict[str, Any], run: Run) -> list[dict[str, Any]]:
    return [row["stages"][name] for name in run.stages.split(",")]


def test_nothing_but_the_attackers_rows_is_changed(seen):
    _, found = seen
    assert found.changed() == [], found.out + found.err
    assert found.before["files"].keys() >= {"work/z_honest.py", "repository/eval/cli.py"} and found.before["yesterday"]


def test_every_row_is_there_and_says_where_it_ran(seen):
    run, found = seen
    assert set(found.rows) >= {FIRST, *run.stems, LAST, YESTERDAY}, found.out + found.err
    assert {each["level"] for each in found.confined} == {run.level}
    assert all(found.result["candidates"][name]["stages"] for name in (FIRST, *run.stems, LAST))


def test_the_honest_rows_are_right(seen):
    run, found = seen
    for name in (FIRST, LAST):
        row = found.rows[name]
        assert {stage["status"] for stage in stages_of(row, run)} == {"OK"}, row["stages"]
        if "official" in run.stages:
            assert row["cpu_check"]["trials"] == "(5 / 5)"
        if "identity" in run.stages:
            assert row["bit_identity"]["identical"] == row["bit_identity"]["total"] > 40
        if "guards" in run.stages:
            assert row["guards"]["clean"] and row["guards"]["checked"] and row["guards"]["checked_inside"], row[
                "guards"
            ]
        if "stress" in run.stages:
            assert (row["stress"]["failed"], row["stress"]["passed"] > 150) == (0, True)
            assert all(case["nearer"] == "equal" for case in row["oracle"].values()) and len(row["oracle"]) > 20


def test_an_attacker_was_stopped_in_the_act(seen):
    run, found = seen
    for name in run.stems:
        words = EVERY[name]
        for stage in stages_of(found.rows[name], run):
            if run.stages == "guards":
                assert stopped_under_guards(name, stage, found.rows[name].get("guards"), words), (
                    name,
                    found.rows[name],
                )
            elif words is not None:
                assert (stage["status"], words[run.level] in stage["message"]) == ("COMPILE_ERROR", True), (name, stage)
            elif name not in WRONG or run.stages != "official":
                assert stage["status"] == "OK", (name, stage)
            else:
                assert stage["status"] == "INCORRECT_NUMERICAL", (name, stage)


def stopped_under_guards(name: str, stage: dict[str, Any], guards: dict[str, Any] | None, words: Any) -> bool:
    """A file that was refused ends its stage; one that a guard also saw at it is not clean, and the reason why the
    other guards were not asked has the refusal. One that computes is accused of the process that it starts."""
    if guards is None:
        return stage["status"] == "COMPILE_ERROR" and words["namespaces"] in stage["message"] and name not in DISK
    named = {finding["guard"] for finding in guards["findings"]}
    if words is None:
        return not guards["clean"] and "thread_started" in named and len(guards["checked"]) > 20
    reasons = {entry["reason"] for entry in guards["not_checked"]}
    told = all("gave no answer" in reason and words["namespaces"] in reason for reason in reasons)
    return not guards["clean"] and named == {"result_written"} and not guards["checked"] and bool(reasons) and told


def test_no_process_of_a_row_is_there_when_its_line_is_printed(seen):
    run, found = seen
    assert found.left == dict.fromkeys((FIRST, *run.stems, LAST), 0)


def test_the_run_ends_in_its_time_and_says_that_rows_failed(seen):
    _, found = seen
    assert (found.code, found.seconds < 60.0 * len(found.left)) == (1, True), found.out + found.err
    assert "Traceback" not in found.out + found.err


# ---- files that harm by text or size, where test_rows_apart.py does not ask ----

# Stem: the end of its stage under identity; and under stress, where what a call raises or ends is a failed case of its
# own, so that oracle has no case with an answer.
CASES = "OK, NOT_RUN"
TEXTS = {
    "ansi_in_message": ("RUNTIME_ERROR", CASES),
    "big_stdout": ("OK", "OK, OK"),
    "deep_recursion": ("CRASHED", CASES),
    "exit0_with_fake_verdict": ("CRASHED", CASES),
    "frame_that_the_parent_trips_on": ("COMPILE_ERROR", "COMPILE_ERROR, COMPILE_ERROR"),
    "noncharacter_in_message": ("RUNTIME_ERROR", CASES),
    "surrogate_in_message": ("RUNTIME_ERROR", CASES),
    "writes_on_parents_stdout": ("COMPILE_ERROR", "COMPILE_ERROR, COMPILE_ERROR"),
}


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["identity", "stress,oracle"])
def test_text_and_size_cost_their_own_row_in_every_stage(place, stages):
    run = Run(stages, tuple(TEXTS))
    found = made(place, run)
    assert found.changed() == [], found.out + found.err
    ends = {name: ", ".join(stage["status"] for stage in stages_of(found.rows[name], run)) for name in TEXTS}
    assert ends == {name: end[0 if stages == "identity" else 1] for name, end in TEXTS.items()}
    test_the_honest_rows_are_right((run, found))
    if stages != "identity":
        failed = {name: (found.rows[name].get("stress") or {}).get("passed", 0) for name in TEXTS}
        assert failed == {**dict.fromkeys(TEXTS, 0), "big_stdout": found.rows[FIRST]["stress"]["passed"]}
    unfit = [line for line in (found.out + found.err).split("\n") if not line.isprintable() or line.startswith("::")]
    forged = [line for line in found.out.split("\n") if re.match(r"\w+: official: pass", line)]
    assert (unfit, forged) == ([], [])


def test_every_harmful_file_is_in_a_table():
    """Of tests/harms; test_rows_apart.py has the files of text and size under official, and three more under gate."""
    others = {"t2_xml_text", "t3_surrogate", "u2_nonascii_error"}
    assert {file.stem for file in FOLDER.glob("*.py")} == {*EVERY, *TEXTS, *others}


# ---- a run folder ----


@pytest.mark.slow
def test_a_sample_cannot_write_anothers_finished_row():
    with harm_run.a_place() as own:
        folder = own.folder / "batch"
        name = "level_1_problem_40_sample_{}"
        own.write(name.format(0) + "_kernel", HONEST.format(name="finished"), folder)
        own.write(name.format(1) + "_kernel", (FOLDER / "forges_batch_rows.py").read_text(), folder)
        checkout = ["--kernelbench", str(own.checkout)] if own.checkout else []
        settings = Settings("fp32", "cpu", 60.0, str(own.checkout) if own.checkout else None)
        source = HONEST.format(name="finished")
        digest = hashlib.sha256(source.encode()).hexdigest()
        settings = replace(settings, host_executor=True)
        gpu, torch = this_machine("cpu")
        end = {"status": "INCORRECT_NUMERICAL", "message": "wrong", "seconds": 1.0, "timeout_s": 60.0}
        end |= {"key": stage_key(digest, "official", settings), "gpu": gpu, "torch": torch}
        row = {"schema": 2, "run": "", "level": 1, "problem_id": 40, "sample_id": 0, "status": "INCORRECT_NUMERICAL"}
        row |= {"protocol": settings.protocol(), "message": "wrong", "seconds": 1.0, "sha256": digest}
        row |= {"precision": "fp32", "stages": {"official": end}}
        finished = folder / "kbsub_rows" / f"{name.format(0)}.json"
        finished.write_text(json.dumps(row))
        before = finished.read_bytes()
        command = [sys.executable, "-m", "kbsub.eval.cli", "eval", str(folder), "--device", "cpu", "--timeout", "60"]
        command += ["--only", "official"]
        environment = {**os.environ, **own.variables}
        done = subprocess.run([*command, *checkout], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in (0, 1), done.stdout + done.stderr
        forger = json.loads((folder / "kbsub_rows" / f"{name.format(1)}.json").read_text())
        if "confined" not in forger:
            pytest.skip("run folder: this version of kbsub judges its samples without a cell")
        assert finished.read_bytes() == before, done.stdout + done.stderr
        level = forger["confined"]["level"]
        assert level == "unconfined" or (forger["status"], NO_WRITING[level] in forger["message"]) == (
            "COMPILE_ERROR",
            True,
        )


# ---- where nothing is confined ----


def test_where_neither_works_the_record_says_unconfined(place):
    """And what is compared above is seen to change: without a cell the same file reaches its neighbour."""
    found = made(place, Run("official", ("edits_a_neighbour",), "unconfined", refused="namespaces,landlock"))
    assert {each["level"] for each in found.confined} == {"unconfined"} and len(found.confined) == 3
    assert all(each["lacks"] for each in found.confined)
    elsewhere = [name for name in found.changed() if not name.startswith("home/.cache/kbsub/cells/")]
    assert elsewhere == ["work/z_honest.py"]  # and the caches of what it had become
    assert found.rows[LAST]["status"] == "INCORRECT_NUMERICAL"


CHANGES = {  # without a cell: what each attack changes of what is compared
    "edits_the_judge": {"repository/eval/suite/classes.py", "repository/eval/verdicts/official/cpu_check.py"},
    "edits_the_task": {"task/reference.py"},
    "edits_upstreams_evaluator": {"checkout/src/kernelbench/eval.py"},
    "forges_batch_rows": {"batch/kbsub_rows/level_1_problem_40_sample_0.json"},
    "poisons_the_cubin_cache": {"home/.cache/kbsub/cubin/first", "home/.cache/kbsub/cubin/second"},
    "poisons_the_host_cache": {"home/.cache/kbsub/host/kernels-0/kernels.so"},
    "parent_slowed": {"settings of the run"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_compared_is_seen_to_change_without_a_cell(name):
    """Each in a place of its own, which is thrown away."""
    with harm_run.a_place() as own:
        found = made(own, Run("official", (name,), "unconfined", asked="unconfined"))
    assert set(found.changed()) >= CHANGES[name], found.out + found.err


# ---- what Landlock lacks, and says ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [("parent_slowed", ["settings of the run"], "priority"), ("reaches_out", ["work/notes.txt"], "modes")],
)
def test_what_landlock_does_not_stop_stands_in_its_record(name, changes, words):
    with harm_run.a_place() as own:
        found = made(own, Run("official", (name,), "landlock", asked="landlock"))
    assert found.changed() == changes
    assert found.confined and all(any(words in each for each in record["lacks"]) for record in found.confined)
    if name == "reaches_out":
        assert found.rows[name]["reason"].endswith("reached: mode"), found.rows[name]["reason"]
