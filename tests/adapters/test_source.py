"""How large a candidate's file may be, and what it may be called; the same for every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbsub.adapters.candidate import cuda_source_of
from kbsub.adapters.source import SOURCE_LIMIT, SourceError, check_names, read_limited
from kbsub.adapters.task import TaskError
from kbsub.eval.bench.plan import PlanError, read_candidate
from kbsub.eval.run.batch.job import Settings, judge
from kbsub.eval.run.batch.work import prepare
from kbsub.eval.run.export import ExportError, choose_entries
from kbsub.eval.tasks.files import candidate_files


def test_a_file_of_the_limit_is_read_and_one_beyond_it_is_not(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_bytes(b"#" * SOURCE_LIMIT)
    assert len(read_limited(file)) == SOURCE_LIMIT
    file.write_bytes(b"#" * (SOURCE_LIMIT + 1))
    with pytest.raises(SourceError, match=r"x\.py: 262145 bytes of source, the limit is 262144 .* constructor"):
        read_limited(file)


def test_every_command_that_reads_a_candidate_keeps_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "level_1_problem_40_sample_0_kernel.py"
    file.write_bytes(b"#" * (4 << 20))
    with pytest.raises(PlanError, match="the limit is"):
        read_candidate(file)
    with pytest.raises(ExportError, match="the limit is"):
        choose_entries([str(file)], tmp_path)
    batch = prepare(tmp_path, Settings(device="cpu"))
    (todo,) = batch.jobs
    row = judge(batch.job(todo), isolate=lambda *_, **__: pytest.fail("it was run"))
    assert row["status"] == "COMPILE_ERROR" and "the limit is" in row["message"] and batch.job(todo).source == ""


# Text of the largest size that is slow or large to parse; each was measured (adapters/source.py).
WORST = {
    "literals": "CUDA = [" + "0," * (SOURCE_LIMIT // 2 - 8) + "]",
    "statements": "cuda\n" + "a;" * (SOURCE_LIMIT // 2 - 8),
    "sum": "cuda = " + "1+" * (SOURCE_LIMIT // 2 - 8) + "1",
    "signs": "cuda = " + "-" * (SOURCE_LIMIT - 16) + "1",
    "brackets": "cuda = " + "(" * (SOURCE_LIMIT - 16),
    "calls": "cuda" + "()" * (SOURCE_LIMIT // 2 - 8),
}


@pytest.mark.parametrize("text", WORST.values(), ids=WORST)
def test_the_parent_reads_the_worst_file_within_memory(text: str) -> None:
    """In a process of its own, under 512 MB of heap: Python 3.11 takes 240 MB and 1.1 s for the worst of them."""
    code = (
        "import resource, sys\n"
        "from kbsub.adapters.candidate import cuda_source_of\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (512 << 20, 512 << 20))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (30, 30))\n"
        "print(cuda_source_of(sys.stdin.read()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr[-500:]


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("CUDA_SOURCE = ''", "CUDA_SOURCE"),
        ("CUDA_SOURCE: str = ''", "CUDA_SOURCE"),
        ("def f():\n    import cupy as cp", "import cupy"),
        ("from torch.utils import cpp_extension", "import torch.utils.cpp_extension"),
        ("from cuda import nvrtc", "import cuda"),
        ("import \uff43\uff55\uff50\uff59", "import cupy"),  # full-width letters: Python imports cupy
        ("x = 'import cupy'", None),
        ("x.cuda()", None),
        ("import torch", None),
    ],
    ids=ascii,
)
def test_what_needs_cuda_is_read_from_the_text(source: str, needs: str | None) -> None:
    assert cuda_source_of(source) == needs


# files, words of what is wrong with their names; None when nothing is
NAMES = [
    (["a.py", "b.py"], None),
    (["[a].py", "two\nlines.py", "\x1b.py", os.fsdecode(b"caf\xe9.py")], None),
    (["a.py", "a@fp16.py"], "may hold no @"),
    (["a@v2.py"], "may hold no @"),
    (["x/a.py", "y/a.py"], "x/a.py and y/a.py: two files of one name would share a row"),
    (["two\nlines.py", "two\\nlines.py"], "would share a row"),  # shown alike
]


@pytest.mark.parametrize(("files", "words"), NAMES, ids=[ascii(files) for files, _ in NAMES])
def test_names_keep_apart(files: list[str], words: str | None) -> None:
    if words is None:
        check_names(map(Path, files))
        return
    with pytest.raises(SourceError, match=words):
        check_names(map(Path, files))


def test_every_command_that_names_candidates_refuses_an_at_sign(tmp_path: Path) -> None:
    file = tmp_path / "a@fp16.py"
    file.write_text("")
    with pytest.raises(TaskError, match="may hold no @"):
        candidate_files([str(file)], None)  # asked by eval, gate, bench and export alike
    with pytest.raises(TaskError, match="may hold no @"):
        choose_entries([str(file)], tmp_path)
