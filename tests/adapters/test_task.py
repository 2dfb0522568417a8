"""Tasks come from the checkout, the embedded restatement or a file; candidates load as upstream loads them."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
import torch

from kbsub.adapters.candidate import CandidateError, cuda_source_of, load_candidate, source_problem
from kbsub.adapters.pin import PIN
from kbsub.adapters.task import (
    SEED,
    TaskError,
    load_local_task,
    load_task,
    resolve_task,
    task_from_payload,
    trial_seeds,
)
from kbsub.eval.process.isolated import Status

TINY = """
import torch

rows, width = 2, 3


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2


def get_inputs():
    return [torch.rand(rows, width), 7]


def get_init_inputs():
    return []
"""


@pytest.fixture
def fake_checkout(tmp_path: Path) -> Path:
    """A folder laid out as a checkout, with a problem 4, a problem 40 and a second file that claims 41."""
    folder = tmp_path / "KernelBench" / "level1"
    folder.mkdir(parents=True)
    for name in ("4_Four.py", "40_Forty.py", "41_One.py", "41_Two.py", "no_number.py"):
        (folder / name).write_text(TINY + f"# {name}\n")
    return tmp_path


def test_id_is_the_whole_number_prefix(fake_checkout: Path) -> None:
    assert load_task(1, 4, kernelbench=fake_checkout).name == "4_Four.py"


def test_identity_of_a_task(fake_checkout: Path) -> None:
    task = load_task(1, 40, kernelbench=fake_checkout)
    expected = hashlib.sha256((fake_checkout / "KernelBench/level1/40_Forty.py").read_bytes()).hexdigest()
    assert (task.sha256, task.provenance, task.slug) == (expected, f"kernelbench@{PIN}", "level1_40")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("level1_41", "41_One.py, 41_Two.py"),  # two files claim the id
        ("level1_5", "ids: 4 to 41"),  # none does
        ("level9_1", "no folder"),
        ("problem 40", "write level<L>_<id>"),
        ("absent.py", "cannot be read"),
    ],
)
def test_task_that_cannot_be_had(fake_checkout: Path, text: str, words: str) -> None:
    with pytest.raises(TaskError, match=re.escape(words)):
        resolve_task(text, kernelbench=fake_checkout)


def test_without_a_checkout_only_one_task_exists() -> None:
    with pytest.raises(TaskError, match="kbsub fetch"):
        load_task(1, 36, kernelbench=None)


def test_embedded_is_labelled() -> None:
    assert load_task(1, 40, kernelbench=None).provenance == "embedded"


def test_unknown_precision() -> None:
    with pytest.raises(TaskError, match="fp32, fp16, bf16"):
        load_task(1, 40, kernelbench=None, precision="fp8")


def test_local_task_and_cast(tmp_path: Path) -> None:
    path = tmp_path / "my_reference.py"
    path.write_text(TINY)
    task = task_from_payload({"task": str(path), "precision": "bf16"})
    tensor, number = task.cast(task.modules().get_inputs())
    assert (task.slug, task.provenance, tensor.dtype, number) == ("my_reference", "local", torch.bfloat16, 7)


def test_reference_without_model(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("def get_inputs():\n    return []\n")
    with pytest.raises(TaskError, match="must define Model, get_init_inputs"):
        load_local_task(path).modules()


def test_modules_are_fresh_each_time(tmp_path: Path) -> None:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    task = load_local_task(path)
    task.modules().context["rows"] = 99
    assert task.modules().context["rows"] == 2


@pytest.mark.kernelbench
def test_embedded_and_upstream_agree(kernelbench) -> None:
    """Same parameters (names, shapes, bits) and the same bits of x at the official shape, for the timed seed."""
    ours, theirs = (load_task(1, 40, kernelbench=path).modules() for path in (None, kernelbench.path))
    assert ours.get_init_inputs() == theirs.get_init_inputs()
    states = []
    for modules in (ours, theirs):
        torch.manual_seed(SEED)
        states.append(modules.Model(*modules.get_init_inputs()).state_dict())
    assert list(states[0]) == list(states[1])
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name
    torch.manual_seed(SEED)
    (x,) = ours.get_inputs()
    torch.manual_seed(SEED)
    (y,) = theirs.get_inputs()
    assert x.dtype == y.dtype and torch.equal(x, y)


@pytest.mark.kernelbench
def test_trial_seeds_are_upstreams(kernelbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's own correctness loop, on CPU tensors (its CUDA calls made idle), sees the seeds that we draw."""
    from kbsub.adapters.evaluator import import_upstream

    upstream = import_upstream(kernelbench.path).module
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: None)
    seen: list[int] = []

    def get_inputs() -> list[torch.Tensor]:
        seen.append(torch.initial_seed())
        return [torch.rand(2, 3)]

    class OneInput(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    upstream.run_and_check_correctness(
        OneInput(), OneInput(), get_inputs, {}, num_correct_trials=5, device=torch.device("cpu")
    )
    assert seen == trial_seeds()


# source, status, words of the message
BROKEN = [
    ("def f(:\n", Status.COMPILE_ERROR, "line 1"),
    ("x = 1\n", Status.COMPILE_ERROR, "defines no ModelNew"),
    ("import no_such_module\n", Status.COMPILE_ERROR, "no_such_module"),
    ("raise MemoryError\n", Status.OUT_OF_MEMORY, "MemoryError"),
    ("print(__file__)\n", Status.COMPILE_ERROR, "__file__"),  # it does not exist in upstream, nor here
]


@pytest.mark.parametrize("build_dir", [False, True])
@pytest.mark.parametrize(("source", "status", "words"), BROKEN, ids=[row[2] for row in BROKEN])
def test_broken_candidate(source: str, status: Status, words: str, build_dir: bool) -> None:
    with pytest.raises(CandidateError) as caught:
        load_candidate(source, load_task(1, 40, kernelbench=None), build_dir=build_dir)
    assert caught.value.status is status
    assert words in caught.value.message


def test_future_import_fails_only_behind_the_build_lines() -> None:
    source = "from __future__ import annotations\nclass ModelNew: ...\n"
    task = load_task(1, 40, kernelbench=None)
    assert load_candidate(source, task).__name__ == "ModelNew"
    with pytest.raises(CandidateError, match="__future__"):
        load_candidate(source, task, build_dir=True)


def test_candidate_shares_the_references_dict(tmp_path: Path) -> None:
    """A module-level name of the candidate changes the official inputs: so it does in upstream."""
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    task = load_local_task(path)
    modules = task.modules()
    load_candidate("rows = 5\nclass ModelNew(Model): ...\n", task, modules=modules)
    assert modules.get_inputs()[0].shape == (5, 3)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("CUDA_SOURCE = 'x'\n", "CUDA_SOURCE"),
        ("CUDA_SOURCE: str = 'x'\n", "CUDA_SOURCE"),
        ("def f():\n    import cupy\n", "import cupy"),
        ("from torch.utils.cpp_extension import load_inline\n", "import torch.utils.cpp_extension"),
        ("from torch.utils import cpp_extension\n", "import torch.utils.cpp_extension"),
        ("import triton.language as tl\n", "import triton.language"),
        ("import torch  # CUDA_SOURCE = 1, import cupy\n", None),
        ("import cupyish\n", None),
        ("def f(:\n", None),
    ],
)
def test_what_needs_cuda_is_read_from_the_text(source: str, expected: str | None) -> None:
    assert cuda_source_of(source) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(:", "line 1: "),
        ("x = 1\0", "source code string"),
        ("x = 1", "defines no ModelNew"),
        ("from __future__ import annotations", "line 1: "),
    ],
)
def test_source_problem_tells_the_two_apart(source: str, expected: str) -> None:
    assert str(source_problem(source)).startswith(expected)
