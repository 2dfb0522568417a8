"""What `kbsub bench` plans (who may be timed where) and how it judges the machine's quality; nothing is run."""

from __future__ import annotations

import pytest

from kbsub.eval import quality
from kbsub.eval.baselines import require_known
from kbsub.eval.bench_plan import (
    BenchFile,
    CandidateFile,
    PlanError,
    ShapeSpec,
    candidate_files,
    choose_methods,
    choose_shapes,
    plan_scenes,
    read_bench_file,
)
from kbsub.eval.machine_facts import submissions_folder
from kbsub.eval.result import Result

# ---- the plan ----


def stored(file: CandidateFile, *, correct: bool = True, sha256: str | None = None, precision: str = "fp32") -> Result:
    key = file.stem if precision == "fp32" else f"{file.stem}@{precision}"
    official = {"compiled": True, "correctness": correct, "trials": "(5 / 5)", "metadata": {}}
    environment = dict.fromkeys(("gpu", "driver", "cuda", "cupy", "nvrtc", "project_commit"))
    environment |= {"torch": "2", "python": "3", "kernelbench_commit": "0" * 40, "date": "2026-01-01"}
    row = {"sha256": sha256 or file.sha256, "contract": "tolerance", "precision": precision, "status": "OK"}
    task = {"level": 1, "problem_id": 40, "sha256": "0", "provenance": "embedded"}
    content = {
        "schema": 1,
        "environment": environment,
        "task": task,
        "candidates": {key: {**row, "official": official}},
    }
    return Result.model_validate(content)


FILE = CandidateFile("honest", "class ModelNew: ...", "tolerance", ("fp32",))
# what is stored -> what must be in the reason for not timing it ("" means it is timed)
VERDICTS = [
    (stored(FILE), ""),
    (None, "no official verdict is stored for honest; run: kbsub eval --only official honest.py"),
    (stored(FILE, correct=False), "was not a pass"),
    (stored(FILE, sha256="f" * 64), "another version of the file"),
]


@pytest.mark.parametrize(("result", "words"), VERDICTS)
def test_only_an_official_pass_is_timed(result, words):
    (scene,) = plan_scenes([None], ["fp32"], [FILE], ["eager"], result)
    assert (scene.candidates == ["honest"]) is (words == "")
    assert words in scene.not_run.get("honest", "")


def test_unverified_is_timed_only_when_asked_and_says_so():
    (scene,) = plan_scenes([None], ["fp32"], [FILE], [], None, allow_unverified=True)
    assert scene.candidates == ["honest"] and scene.notes["honest"] == ["timed without an official pass of this file"]


def test_outside_its_contract_says_so():
    (scene,) = plan_scenes([None], ["fp16"], [FILE], [], stored(FILE, precision="fp16"))
    assert scene.notes["honest"] == ["outside its contract: fp16 is not declared"]
    (scene,) = plan_scenes([ShapeSpec(inputs=[[2, 4]], init=[4], seed=1)], ["fp16"], [FILE], [], None)
    assert "not declared" in scene.not_run["honest"]


def test_a_control_is_named_as_one():
    control = CandidateFile("honest", FILE.source, "control", ("fp32",))
    (scene,) = plan_scenes([None], ["fp32"], [control], [], stored(control))
    assert "control" in scene.notes["honest"][0]


WRONG_CALLS = [
    (lambda: choose_shapes("9x9", BenchFile()), "--shapes 9x9: known are official"),
    (lambda: choose_shapes("all", BenchFile()), "has no bench.toml"),
    (lambda: choose_methods("stopwatch"), "--methods stopwatch: known are all, graph_replay"),
    (lambda: require_known(["jax"]), "--baselines jax: known are"),
]


@pytest.mark.parametrize(("call", "words"), WRONG_CALLS)
def test_wrong_options_say_what_is_known(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_broken_bench_file_names_the_key(tmp_path):
    (tmp_path / "bench.toml").write_text('[[shapes]]\ninputs = []\ninit = [4]\nseed = "x"\n')
    with pytest.raises(PlanError, match=r"bench.toml: shapes.0.inputs"):
        read_bench_file(tmp_path)


def test_level1_40_has_the_nine_shapes_of_the_requirement_and_four_just_beyond_8192():
    folder = submissions_folder("level1_40")
    assert folder is not None
    bench = read_bench_file(folder)
    assert [shape.key for shape in bench.shapes] == [
        "16x64x256x256",
        "8x32x128x256",
        "4096x1x1x1024",
        "3x64x17x19",
        "1x4194304",
        "64x1048576",
        "8192x8192",
        "65536x512",
        "2x16777216",
        "4096x8196",
        "4096x10000",
        "4096x12288",
        "4096x16384",
    ]
    assert bench.chain is not None and bench.chain.chains * bench.chain.updates == 16 * 64 * 256 * 256


# ---- the machine's quality ----

QUIET = {"available": True, "sm_mhz": 1980, "throttle_reasons": [], "other_processes": 0}
DISTURBED = [
    ({}, []),
    ({"throttle_reasons": ["power cap"]}, ["throttled: power cap"]),
    ({"sm_mhz": 1900}, ["SM clock fell from 1980 to 1900 MHz"]),
    ({"sm_mhz": 1965}, []),  # one step of the governor
    ({"other_processes": 2}, ["2 other processes on the GPU"]),
]


@pytest.mark.parametrize(("change", "flags"), DISTURBED)
def test_machine_flags(change, flags):
    assert quality.machine_flags(QUIET, {**QUIET, **change}) == flags


def test_throttle_bits_in_words():
    assert quality.throttle_words(0x1) == [], "an idle GPU is not throttled"
    assert quality.throttle_words(0x4 | 0x40) == ["power cap", "hardware thermal slowdown"]


@pytest.mark.parametrize(("pids", "others"), [([], 0), ([7], 0), ([7, 9], 1), ([1234], 0), ([1234, 5], 1)])
def test_other_processes_also_behind_a_container(pids, others):
    assert quality.other_processes(pids, own=7) == others


def test_sample_flags():
    noisy = {"relative_iqr": 0.05, "samples_for_half_percent": 100}
    assert [flag.split(":")[0] for flag in quality.sample_flags(noisy, 35)] == [
        "noisy",
        "35 samples, 100 needed for a standard error of 0.5%",
    ]
    assert quality.sample_flags({"relative_iqr": 0.01, "samples_for_half_percent": 3}, 35) == []


def test_no_gpu_is_said():
    assert quality.snapshot(None) == {"available": False, "reason": "no NVIDIA GPU"}


def test_candidates_are_the_declared_ones_unless_named(tmp_path):
    (tmp_path / "candidates.toml").write_text('[one]\ntitle = "t"\nprecision = ["fp32"]\ncontract = "tolerance"\n')
    (tmp_path / "one.py").write_text("")
    (tmp_path / "reference.py").write_text("")
    assert [path.name for path in candidate_files([], tmp_path)] == ["one.py"]
    assert [path.name for path in candidate_files(["one"], tmp_path)] == ["one.py"]
    with pytest.raises(PlanError, match="two: no such candidate file"):
        candidate_files(["two"], tmp_path)
    with pytest.raises(PlanError, match="name the files to time"):
        candidate_files([], None)
