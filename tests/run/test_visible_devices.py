"""`kbsub eval RUNS_DIR --gpus N` uses the caller's own GPUs, says what is missing by its name, and keeps dask quiet."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kbsub.eval.cli import app
from kbsub.eval.run import machine_facts
from kbsub.eval.run.batch import cluster
from kbsub.eval.run.batch.samples import BatchError
from kbsub.eval.run.visible_devices import DevicesError, devices_for, visible_devices

FULL = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"

# CUDA_VISIBLE_DEVICES -> its entries
ENTRIES = {
    None: None,
    "": [],
    "-1": [],
    "4,5": ["4", "5"],
    " 4 , 5 ": ["4", "5"],
    "5,4": ["5", "4"],
    FULL: [FULL],
    "GPU-8932f937,GPU-11aa": ["GPU-8932f937", "GPU-11aa"],  # abbreviated, as the driver takes them
    f"{MIG}, MIG-11aa": [MIG, "MIG-11aa"],
    "0,-1,2": ["0"],  # nothing counts after an entry that is no device
    "1,GPU-11aa": ["1"],  # one kind: numbers or names
    "GPU-11aa,1": ["GPU-11aa"],
    "4,4": [],  # named twice: the driver shows none
    "nonsense": [],
    "04": ["4"],
}


@pytest.mark.parametrize("text", ENTRIES)
def test_the_entries_are_what_the_driver_reads(text):
    assert visible_devices(text) == ENTRIES[text]


# --gpus, CUDA_VISIBLE_DEVICES, GPUs that the driver shows -> one text a worker
GIVEN = [
    (2, "4,5", 2, ["4", "5"]),
    (1, "4,5", 2, ["4"]),
    (2, "4,5", None, ["4", "5"]),
    (2, None, 8, ["0", "1"]),
    (2, None, None, ["0", "1"]),
    (2, "GPU-8932f937,GPU-11aa", 2, ["GPU-8932f937", "GPU-11aa"]),
    (2, "MIG-1,MIG-2", 1, ["MIG-1", "MIG-2"]),  # the driver shows a process one MIG instance, however many are named
]


@pytest.mark.parametrize(("gpus", "text", "there", "given"), GIVEN)
def test_each_worker_is_given_one_of_the_callers_gpus(gpus, text, there, given):
    variables = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert devices_for(gpus, variables, there) == given


TOO_MANY = [
    (3, "4,5", 2, 'CUDA_VISIBLE_DEVICES="4,5" shows 2 GPUs (4, 5); write --gpus 2 or fewer'),
    (2, "0,7", 1, "shows 1 GPU (0); write --gpus 1 or fewer"),  # this machine has no 7
    (2, None, 1, "this machine shows 1 GPU; write --gpus 1 or fewer"),
    (2, "", 0, "shows 0 GPUs; no GPU can be used"),
    (2, "-1", None, "shows 0 GPUs; no GPU can be used"),
]


@pytest.mark.parametrize(("gpus", "text", "there", "words"), TOO_MANY)
def test_more_gpus_than_are_visible_is_said(gpus, text, there, words):
    with pytest.raises(DevicesError) as caught:
        devices_for(gpus, {} if text is None else {"CUDA_VISIBLE_DEVICES": text}, there)
    assert words in str(caught.value)


# options -> words; every one a wrong call
WRONG_CALLS = [
    (["--gpus", "3"], "--gpus 3"),
    (["--gpus", "2", "--device", "cuda:1"], "--device cuda:1 names one GPU"),
]


@pytest.mark.parametrize(("options", "words"), WRONG_CALLS)
def test_it_is_a_wrong_call_with_exit_code_2(tmp_path, monkeypatch, options, words):
    (tmp_path / "level_1_problem_40_sample_0_kernel.py").write_text("")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(machine_facts, "gpu_name", lambda index=0: "NVIDIA H200")
    monkeypatch.setattr(cluster, "gpu_count", lambda: 2)
    done = CliRunner().invoke(app, ["eval", str(tmp_path), *options])
    assert (done.exit_code, words in done.output) == (2, True), done.output


# ---- a real cluster ----

CLUSTER = """
from kbsub.eval.run.batch.cluster import gpu_environments, local_client
import logging, os

def seen():
    logging.getLogger("distributed.worker").error("an error of a worker")
    return os.environ["CUDA_VISIBLE_DEVICES"]

if __name__ == "__main__":
    with local_client(gpu_environments(range(2))) as client:
        print(*sorted(client.run(seen).values()))
    print("left behind" if "DASK_LOGGING__DISTRIBUTED" in os.environ else "as it was")
"""


@pytest.fixture(scope="module")
def clustered(tmp_path_factory):
    """A local cluster under CUDA_VISIBLE_DEVICES=GPU-a,GPU-b in a process of its own: (stdout, stderr)."""
    pytest.importorskip("distributed", reason="distributed: pip install 'kb-submissions[cluster]'")
    script = tmp_path_factory.mktemp("cluster") / "script.py"
    # No driver is asked: these names exist nowhere.
    script.write_text(
        CLUSTER.replace("import logging", "import kbsub.eval.run.batch.cluster as c, logging", 1).replace(
            "if __name__", "c.gpu_count = lambda: None\nif __name__", 1
        )
    )
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    done = subprocess.run([sys.executable, str(script)], env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_workers_see_the_callers_gpus(clustered):
    assert clustered[0].splitlines()[0] == "GPU-a GPU-b"


def test_dask_says_nothing_about_starting_and_stopping(clustered):
    assert "INFO" not in clustered[1], clustered[1]


def test_an_error_of_a_worker_is_still_shown(clustered):
    assert clustered[1].count("an error of a worker") == 2, clustered[1]


def test_the_callers_environment_is_left_as_it_was(clustered):
    assert clustered[0].splitlines()[1] == "as it was"


# ---- what is missing ----

# the package that cannot be imported -> words
MISSING = {
    "distributed": "several GPUs need dask.distributed; install it with: pip install 'kb-submissions[cluster]'",
    "tornado": "No module named 'tornado'",
}


@pytest.mark.parametrize("package", MISSING)
def test_the_module_that_is_missing_is_named(monkeypatch, package):
    """In a distribution that dask.distributed needs, not only in itself."""
    pytest.importorskip("distributed", reason="distributed: pip install 'kb-submissions[cluster]'")

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for name in [name for name in sys.modules if name.partition(".")[0] in ("distributed", "tornado")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(BatchError) as caught:
        cluster.require_distributed()
    assert MISSING[package] in str(caught.value)
