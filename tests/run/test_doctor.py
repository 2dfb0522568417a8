"""`kbsub doctor`: what follows from each state of a machine, and that it runs on this one."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from kbsub.eval.process.cell import Confinement
from kbsub.eval.run import doctor
from kbsub.eval.run.doctor import ABILITIES, Finding, abilities, cell_findings, cupy_findings, torch_findings

H200 = {"version": "2.11.0+cu130", "cuda": "13.0", "gpus": ["NVIDIA H200"], "error": ""}
CPU = {"version": "2.13.0+cpu", "cuda": None, "gpus": [], "error": ""}
OLD_DRIVER = {**H200, "gpus": []}
NEW_GPU = {**H200, "error": "RuntimeError: no kernel image is available"}


@pytest.mark.parametrize(
    "facts, error, driver, good, words",
    [
        (H200, "", "13.0", {"torch": True, "GPU": True}, "NVIDIA H200; driver for CUDA 13.0"),
        (CPU, "", "", {"torch": True, "GPU": False}, "no NVIDIA driver"),
        (CPU, "", "13.0", {"torch": True, "GPU": False}, "CPU build"),
        (OLD_DRIVER, "", "12.4", {"torch": True, "GPU": False}, "driver for CUDA 12.4, but torch"),
        (NEW_GPU, "", "13.0", {"torch": True, "GPU": False}, "no kernel image"),
        ({}, "CRASHED: SIGSEGV", "13.0", {"torch": False, "GPU": False}, "unknown without torch"),
    ],
)
def test_torch_findings(facts, error, driver, good, words):
    found = torch_findings(facts, error, driver)
    assert {f.name: f.good for f in found} == good
    assert words in found[1].found
    assert all(f.good or f.mend for f in found), "what is missing comes with its mending command"


@pytest.mark.parametrize(
    "facts, good",
    [
        ({"cupy": "14.2.0", "nvrtc": [13, 0], "error": ""}, {"CuPy": True, "NVRTC": True}),
        ({"cupy": "14.2.0", "nvrtc": [12, 8], "error": ""}, {"CuPy": True, "NVRTC": True}),
        ({"cupy": "14.2.0", "nvrtc": [12, 6], "error": ""}, {"CuPy": True, "NVRTC": False}),
        ({"cupy": "14.2.0", "nvrtc": None, "error": "RuntimeError: libnvrtc"}, {"CuPy": True, "NVRTC": False}),
        ({}, {"CuPy": False, "NVRTC": False}),
    ],
)
def test_cupy_findings(facts, good):
    found = cupy_findings(facts, "No module named 'cupy'")
    assert {f.name: f.good for f in found} == good
    assert all(f.good or f.mend for f in found)


def test_cupy_that_cannot_write_its_folder_is_not_called_missing():
    found = cupy_findings({}, "PermissionError: [Errno 13] Permission denied: '.cupy'")
    assert ["CUPY_CACHE_DIR" in f.mend and "pip" not in f.mend for f in found] == [True, True]


def test_each_cell_is_found_with_what_it_lacks_or_the_reason_and_the_way_out():
    refused = {"namespaces": "unshare user namespace: Operation not permitted"}
    found = {f.name: f for f in cell_findings({**refused, "landlock": Confinement("landlock", ("UDP",))})}
    assert not found["cell namespaces"].good and "Operation not permitted" in found["cell namespaces"].found
    assert "user namespaces" in found["cell namespaces"].mend
    assert found["cell landlock"].good and "does not protect: UDP" in found["cell landlock"].found


def test_the_cache_is_named_with_what_lies_there(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "kbsub: empty" in doctor.probe_cache().found
    for name in ("one", "two"):
        (tmp_path / "kbsub" / "cells" / name).mkdir(parents=True)
    (tmp_path / "kbsub" / "cells" / "one" / "built").write_bytes(bytes(2_000_000))
    (tmp_path / "kbsub" / "cells" / "two" / "away").symlink_to("/usr/lib")  # a candidate's: nobody follows it
    found = doctor.probe_cache()
    assert found.good and "cells 2.0 MB of 2 candidates" in found.found and str(tmp_path) in found.found


def test_every_ability_needs_findings_that_are_made():
    made = {finding.name for finding in doctor.examine()}
    assert {need for row in ABILITIES for need in row.needs} <= made


def test_an_ability_lacks_exactly_what_is_not_good():
    findings = [Finding("torch", True, ""), Finding("GPU", False, "", "")]
    official = abilities(findings)[0]
    assert official.missing == ("GPU", "checkout", "git")


def test_a_machine_without_tools_is_described_and_not_crashed_on(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KERNELBENCH_DIR", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    assert not doctor.probe_git().good and not doctor.probe_compiler().good
    checkout = doctor.probe_checkout(None)
    assert (checkout.good, checkout.mend) == (False, "kbsub fetch")
    assert doctor.nvidia_driver() == ""


def test_a_compiler_too_old_for_cpp20_is_missing(monkeypatch, tmp_path):
    old = tmp_path / "old-c++"
    old.write_text("#!/bin/sh\necho 'error: unrecognized command-line option -std=c++20' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    found = doctor.probe_compiler()
    assert not found.good and "unrecognized" in found.found


@pytest.mark.parametrize(
    "printed, version",
    [
        ("| NVIDIA-SMI 580.95   Driver Version: 580.95   CUDA Version: 13.0     |", "13.0"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", ""),
    ],
)
def test_driver_version_is_read_off_nvidia_smi(monkeypatch, tmp_path, printed, version):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{shutil.which('cat').rsplit('/', 1)[0]}")
    assert doctor.nvidia_driver() == version


def test_the_command_agrees_with_itself_on_this_machine():
    from kbsub.eval.cli import app

    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    content = json.loads(done.output)
    good = {f["name"] for f in content["findings"] if f["good"]}
    assert "torch" in good
    for ability in content["abilities"]:
        assert ability["missing"] == [need for need in ability["needs"] if need not in good]
    table = CliRunner().invoke(app, ["doctor"])
    assert table.exit_code == 0 and "What it can certify" in table.output
