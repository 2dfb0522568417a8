"""Every CUDA candidate compiles for every architecture, cleanly and within its budget; the gate sees what it should."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from kbsub.adapters.task import load_task
from kbsub.eval.host_executor import compile_gate, kernel_names
from kbsub.eval.host_executor.compile_gate import (
    BUDGET_FILE,
    DEVICES,
    Rehearsal,
    findings,
    read_budget,
    source_and_builds,
)
from kbsub.eval.measure import resources
from kbsub.eval.process.cell import probe
from kbsub.eval.tasks.grid import named, own_shape
from support.host_run import FOLDER, cuda_candidates, cuda_files

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC: pip install 'kb-submissions[cuda13]'")

pytestmark = pytest.mark.usefixtures("kept_compiles")
FILES = cuda_files()  # of every task folder: a new one is found by its candidates.toml
CUDA = cuda_candidates()
# The builds of a file of level1_40, as the values of its -D options; every combination is gated on every architecture.
BUILDS: dict[str, dict[str, tuple[int, ...]]] = {
    "oracle_accurate": {"ELEMENT": (0, 1, 2)},
    "reference_order_pipelined": {"ELEMENT": (0, 1, 2), "STAGE": (64, 32)},
}
IEEE = ("--std=c++17", "--fmad=true", "--ftz=false")


ONE_BUILD = [f"level1_40/{stem}" for stem in CUDA if stem not in BUILDS]
OFTEN = ("sm_90",)  # of the others, with seconds of NVRTC, `make test` compiles the H200's: evidence is of it
COMPILED = [
    pytest.param(name, arch, marks=[] if name in ONE_BUILD or arch in OFTEN else [pytest.mark.slow])
    for name, arch in itertools.product(FILES, DEVICES)
]
FEW = 2  # builds of a file that `make test` compiles; kernels are the same text in each


@pytest.mark.parametrize(("name", "arch"), COMPILED)
def test_candidate_compiles_cleanly_within_its_budget(name: str, arch: str) -> None:
    gated(name, arch, slice(None) if name.startswith("level1_40/") else slice(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("level1_40/")])
def test_the_other_builds_too(name: str, arch: str) -> None:
    gated(name, arch, slice(FEW, None))


def gated(name: str, arch: str, which: slice) -> None:
    """Some builds of a file: no finding in any of them."""
    path, precisions = FILES[name]
    budget = read_budget(path.parent / BUDGET_FILE)
    source, builds = source_and_builds(path, precisions, arch)
    assert len(builds) >= 1, f"{name}: no shape that its folder knows made it launch anything"
    found = []
    for options, module in list(builds.items())[which]:
        compiled = compile_gate.compile_source(source, options, arch)
        found += findings(path.stem, source, options, arch, compiled, budget.get(path.stem, {}), module)
        assert compiled.error or set(compiled.resources) == set(kernel_names(source, options))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("stem", CUDA)
def test_every_build_of_a_candidate_is_gated(stem: str, arch: str) -> None:
    _, builds = source_and_builds(FOLDER / f"{stem}.py", CUDA[stem], arch)
    gated = sorted(tuple(option for option in options if option.startswith("-D")) for options in builds)
    named = [[f"-D{name}={value}" for value in values] for name, values in BUILDS.get(stem, {}).items()]
    assert gated == sorted(itertools.product(*named)), "add a shape to compile_gate.SHAPES, or a row to BUILDS"


def test_budgets_name_the_kernels_there_are() -> None:
    there: dict[str, set[str]] = {}
    for name, (path, _) in FILES.items():
        space = {"__name__": "candidate"}
        exec(compile(path.read_text("utf-8"), path.name, "exec"), space)
        there[name] = set(kernel_names(space["CUDA_SOURCE"]))
    named = {
        f"{file.parent.name}/{stem}": set(kernels)
        for file in FOLDER.parent.glob(f"*/{BUDGET_FILE}")
        for stem, kernels in read_budget(file).items()
    }
    assert named == there, "remake them: kbsub measure resources --write FILE ..."


def kernel(body: str, parameters: str = "float* y") -> str:
    return f'extern "C" __global__ void k({parameters}) {{ {body} }}'


ROOMY = {"k": {"registers": 255, "shared": 49_152, "spill": 0, "stack": 0}}
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) k(float* y)
{
    float v[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) v[i] = y[i * 1024 + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 64; ++i) y[(63 - i) * 1024 + threadIdx.x] = v[i] * v[63 - i];
}
"""
# (name, source, options, budget, words of the one finding; None: clean)
PLANTED = (
    ("clean", kernel("y[threadIdx.x] = __fmaf_rn(y[0], y[1], y[2]);"), IEEE, ROOMY, None),
    ("error", kernel("y[0] = nothing;"), IEEE, ROOMY, 'identifier "nothing" is undefined'),
    ("warning", kernel("int unused; y[0] = 1.f;"), IEEE, ROOMY, "warning"),
    ("flush", kernel("y[0] = y[1] * y[2];"), (*IEEE[:2], "--ftz=true"), ROOMY, "flushes subnormals"),
    ("fused", kernel("y[0] = y[1] * y[2] + y[3];"), IEEE, ROOMY, "1 fused multiply-adds, the source asks for 0"),
    ("loose", kernel("y[0] = y[1] * y[2]; y[4] = y[5] + y[6];"), IEEE, ROOMY, "ptxas may fuse them"),
    ("shared", kernel("__shared__ float s[100]; s[threadIdx.x] = y[0]; __syncthreads(); y[0] = s[1];"), IEEE,
     {"k": {"registers": 255, "shared": 0, "spill": 0, "stack": 0}}, "shared 400 > 0"),
    ("registers", kernel("y[0] = 1.f;"), IEEE, {"k": {"registers": 1, "shared": 0, "spill": 0, "stack": 0}},
     "registers"),
    ("spill", SPILLING, IEEE, ROOMY, "spill"),
    ("unknown", kernel("y[0] = 1.f;"), IEEE, {}, "has no budget"),
)  # fmt: skip


@pytest.mark.parametrize("name,source,options,budget,words", PLANTED, ids=[case[0] for case in PLANTED])
def test_gate_finds_what_is_planted(name, source, options, budget, words) -> None:
    compiled = compile_gate.compile_source(source, options, "sm_90")
    found = findings(name, source, options, "sm_90", compiled, budget)
    assert (found == []) if words is None else (len(found) == 1 and words in found[0]), found


@pytest.mark.usefixtures("warm_children")  # in its cell: the next one
def test_command_fails_on_a_finding_and_writes_a_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / "split_flat.py"
    assert resources.main([str(path), "--budget", str(tmp_path / "none.toml")]) == 1
    assert "has no budget" in capsys.readouterr().out
    written = tmp_path / "budget.toml"
    assert resources.main([str(path), "--write", "--budget", str(written)]) == 0
    assert set(read_budget(written)["split_flat"]) == {"normalise_flat"}


@pytest.mark.usefixtures("cold_children")
def test_command_runs_a_file_in_its_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if probe().level == "unconfined":
        pytest.skip(f"cell: {probe()}")
    victim, path = tmp_path / "victim", tmp_path / "edits.py"
    victim.write_text("honest")
    path.write_text(f'CUDA_SOURCE = ""\nopen({str(victim)!r}, "a").write("changed")\n')
    assert resources.main([str(path), "--budget", str(tmp_path / "none.toml")]) == 1
    assert "edits: RUNTIME_ERROR: " in capsys.readouterr().out
    assert victim.read_text() == "honest"


def test_a_folder_that_tells_no_shape_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "alone.py"
    path.write_text((FOLDER / "split_flat.py").read_text("utf-8"))
    assert resources.main([str(path)]) == 1
    assert "[[grid]] in task.toml" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        resources.main([str(tmp_path / "none.py")])
    assert "no such file; name candidate files" in capsys.readouterr().err


@pytest.mark.kernelbench
def test_a_tasks_own_shape_is_built_too(kernelbench: Any) -> None:
    """level1_36's own program: 64 channels as its one argument."""
    task = load_task(1, 36, kernelbench=kernelbench.path)
    assert own_shape(task) == named([(112, 64, 512, 512)], [64])
    payload = {"task": "level1_36", "kernelbench": str(kernelbench.path)}
    assert resources._own(payload) == [own_shape(task)] and resources._own({**payload, "kernelbench": None}) == []
    rehearsal = Rehearsal(FILES["level1_36/pixel_order"][0].read_text("utf-8"), DEVICES["sm_90"])
    rehearsal.forward(own_shape(task), "fp32")
    (module,) = rehearsal.modules.values()
    (launch,) = module.launches
    assert (launch.kernel, launch.grid[0], launch.block[:2]) == ("pixels_held", 57_344, (128, 4))
