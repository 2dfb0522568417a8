"""The official stage runs a candidate in its own cell: what it attacks on disk and in processes stays as it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("level", ["namespaces", "landlock"])
def test_a_file_cannot_edit_its_neighbour_nor_end_another_process(tmp_path: Path, level: str) -> None:
    (tmp_path / "task.py").write_text(TASK)
    neighbour = tmp_path / "z_honest.py"
    neighbour.write_text(HONEST)
    bystander = subprocess.Popen(["sleep", "120"])
    try:
        harm = HARMS.format(victims=[str(neighbour), str(tmp_path / "task.py")], parent=bystander.pid) + HONEST
        (tmp_path / "a_harm.py").write_text(harm)
        out = tmp_path / "out.json"
        command = [
            sys.executable,
            "-c",
            "from kbsub.eval.cli import main; raise SystemExit(main())",
            "eval",
            str(tmp_path / "a_harm.py"),
            str(neighbour),
        ]
        command += ["--task", str(tmp_path / "task.py"), "--only", "official", "--device", "cpu", "--out", str(out)]
        done = subprocess.run(
            command, env={**os.environ, "KBSUB_CELL": level}, capture_output=True, text=True, timeout=120
        )
        assert out.exists(), done.stdout + done.stderr
        stages = [row["stages"]["official"] for row in json.loads(out.read_text())["candidates"].values()]
        assert len(stages) == 2
        if any(stage["confined"]["level"] == "unconfined" for stage in stages):
            pytest.skip("this machine confines nothing, and the record says so")
        assert neighbour.read_text() == HONEST
        assert (tmp_path / "task.py").read_text() == TASK
        assert bystander.poll() is None
        assert all(stage["status"] in ("OK", "NOT_RUN") for stage in stages), stages
    finally:
        bystander.kill()
        bystander.wait()
