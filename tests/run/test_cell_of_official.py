"""The official stage runs a candidate in its own cell: what it attacks on disk and in processes stays as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbsub.eval.process.cell import probe

MAIN = "from kbsub.eval.cli import main; raise SystemExit(main())"
TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, x): return x + 1
def get_inputs(): return [torch.rand(4, 4)]
def get_init_inputs(): return []
"""
HONEST = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x): return x + 1\n"
HARMS = """import os, signal
for victim in {victims!r}:
    try:
        open(victim, "a").write("# changed")
    except OSError:
        pass
try:
    os.kill({parent}, signal.SIGKILL)
except OSError:
    pass
"""


def kbsub(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KBSUB_CELL"}
    command = [sys.executable, "-c", MAIN, *arguments]
    return subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=120)


# Of each command that judges: how it is asked about one file of a small task.
ASKED = {
    "eval": ("--only", "official", "--device", "cpu"),
    "gate": ("--require", "official", "--device", "cpu"),
    "bench": ("--allow-unverified", "--baselines", "none", "--rounds", "3", "--device", "cpu"),
}


@pytest.fixture
def honest(tmp_path: Path) -> list[str]:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "honest.py").write_text(HONEST)
    return [str(tmp_path / "honest.py"), "--task", str(tmp_path / "task.py")]


@pytest.mark.parametrize("verb", ASKED)
def test_a_cell_that_was_asked_for_and_is_refused_ends_the_call_with_the_way_out(
    verb: str, honest: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    for asked in (("--cell", "namespaces"), ()):
        variables = {"KBSUB_CELL_REFUSE": "unshare"} | ({} if asked else {"KBSUB_CELL": "namespaces"})
        done = kbsub(verb, *honest, *ASKED[verb], *asked, "--out", str(out), **variables)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "this machine refuses it" in done.stderr and "user namespaces" in done.stderr and "auto" in done.stderr
        assert not out.exists()


def test_no_such_cell(honest: list[str]) -> None:
    done = kbsub("gate", *honest, "--cell", "bubble")
    assert done.returncode == 2 and "there are namespaces, landlock, unconfined, auto" in done.stderr


@pytest.mark.parametrize("verb", ["gate", "bench", pytest.param("eval", marks=pytest.mark.slow)])
def test_a_fall_back_says_why_in_one_line_and_in_the_record(verb: str, honest: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    more = ("--json", str(tmp_path / "gate.json")) if verb == "gate" else ()
    done = kbsub(verb, *honest, *ASKED[verb], *more, "--out", str(out), KBSUB_CELL_REFUSE="unshare,landlock")
    lines = [line for line in done.stderr.splitlines() if line.startswith(f"kbsub {verb}: candidates run unconfined: ")]
    assert len(lines) == 1 and "unshare" in lines[0] and "Landlock" in lines[0], done.stderr
    content = json.loads(out.read_text())
    if verb == "bench":
        found = [run["confined"] for run in content["bench"]["runs"].values()]
    else:
        found = [content["candidates"]["honest"]["stages"]["official"]["confined"]]
    assert [each["level"] for each in found] == ["unconfined"]
    assert all("unshare" in each["why"] for each in found)
    if verb == "gate":
        assert json.loads((tmp_path / "gate.json").read_text())["confined"].startswith("unconfined: namespaces: ")


@pytest.mark.slow
def test_the_option_goes_before_the_environment(honest: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = (*honest, *ASKED["eval"], "--cell", "auto", "--out", str(out))
    done = kbsub("eval", *arguments, KBSUB_CELL="unconfined", KBSUB_CELL_REFUSE="unshare,landlock")
    confined = json.loads(out.read_text())["candidates"]["honest"]["stages"]["official"]["confined"]
    assert "unshare" in confined["why"], done.stderr  # what this machine refused, not what somebody asked for


@pytest.mark.parametrize(
    ("level", "variables"),
    [
        ("namespaces", {"KBSUB_CELL": "namespaces"}),
        ("landlock", {"KBSUB_CELL_REFUSE": "unshare"}),
        pytest.param("landlock", {"KBSUB_CELL": "landlock"}, marks=pytest.mark.slow),
    ],
)
def test_a_file_cannot_edit_its_neighbour_nor_end_another_process(
    tmp_path: Path, level: str, variables: dict[str, str]
) -> None:
    if probe(level).level != level:
        pytest.skip(f"cell: this machine has no {level} ({probe(level).why.get(level)})")
    (tmp_path / "task.py").write_text(TASK)
    neighbour = tmp_path / "z_honest.py"
    neighbour.write_text(HONEST)
    bystander = subprocess.Popen(["sleep", "120"])
    try:
        harm = HARMS.format(victims=[str(neighbour), str(tmp_path / "task.py")], parent=bystander.pid) + HONEST
        (tmp_path / "a_harm.py").write_text(harm)
        out = tmp_path / "out.json"
        arguments = [str(tmp_path / "a_harm.py"), str(neighbour), "--task", str(tmp_path / "task.py")]
        done = kbsub("eval", *arguments, *ASKED["eval"], "--out", str(out), **variables)
        assert out.exists(), done.stdout + done.stderr
        stages = [row["stages"]["official"] for row in json.loads(out.read_text())["candidates"].values()]
        assert len(stages) == 2
        assert {stage["confined"]["level"] for stage in stages} == {level}
        assert neighbour.read_text() == HONEST
        assert (tmp_path / "task.py").read_text() == TASK
        assert bystander.poll() is None
        assert all(stage["status"] in ("OK", "NOT_RUN") for stage in stages), stages
    finally:
        bystander.kill()
        bystander.wait()
