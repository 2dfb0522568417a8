"""Every CUDA candidate compiles for every architecture, cleanly and within its budget; the gate sees what it should."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kbsub.eval.host_executor import compile_gate, kernel_names
from kbsub.eval.host_executor.compile_gate import DEVICES, findings, read_budget, source_and_builds
from kbsub.eval.measure import resources
from kbsub.eval.process.cell import probe
from support.host_run import FOLDER, cuda_candidates
from support.paths import TESTS

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC: pip install 'kb-submissions[cuda13]'")

pytestmark = pytest.mark.usefixtures("kept_compiles")
BUDGET_FILE = TESTS / "resource_budget.toml"
BUDGET = read_budget(BUDGET_FILE)
CUDA = cuda_candidates()
# The builds of a candidate, as the values of its -D options; every combination is gated on every architecture.
BUILDS: dict[str, dict[str, tuple[int, ...]]] = {
    "oracle_accurate": {"ELEMENT": (0, 1, 2)},
    "reference_order_pipelined": {"ELEMENT": (0, 1, 2), "STAGE": (64, 32)},
}
IEEE = ("--std=c++17", "--fmad=true", "--ftz=false")


MANY_BUILDS = ("reference_order_pipelined", "oracle_accurate")  # seconds of NVRTC an architecture; the others need one
OFTEN = ("sm_90",)  # of those two, `make test` compiles the H200's, the one that budgets and evidence are of
COMPILED = [
    pytest.param(stem, arch, marks=[pytest.mark.slow] if stem in MANY_BUILDS and arch not in OFTEN else [])
    for stem, arch in itertools.product(CUDA, DEVICES)
]


@pytest.mark.parametrize(("stem", "arch"), COMPILED)
def test_candidate_compiles_cleanly_within_its_budget(stem: str, arch: str) -> None:
    source, builds = source_and_builds(FOLDER / f"{stem}.py", CUDA[stem], arch)
    assert len(builds) >= 1, f"{stem}: no shape of compile_gate.SHAPES made it launch anything"
    found = []
    for options, module in builds.items():
        compiled = compile_gate.compile_source(source, options, arch)
        found += findings(stem, source, options, arch, compiled, BUDGET.get(stem, {}), module)
        assert compiled.error or set(compiled.resources) == set(kernel_names(source, options))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("arch", DEVICES)
@pytest.mark.parametrize("stem", CUDA)
def test_every_build_of_a_candidate_is_gated(stem: str, arch: str) -> None:
    _, builds = source_and_builds(FOLDER / f"{stem}.py", CUDA[stem], arch)
    gated = sorted(tuple(option for option in options if option.startswith("-D")) for options in builds)
    named = [[f"-D{name}={value}" for value in values] for name, values in BUILDS.get(stem, {}).items()]
    assert gated == sorted(itertools.product(*named)), "add a shape to compile_gate.SHAPES, or a row to BUILDS"


def test_budget_names_the_kernels_there_are() -> None:
    there = {}
    for path in FOLDER.parent.glob("*/*.py"):
        space = {"__name__": "candidate"}
        exec(compile(path.read_text("utf-8"), path.name, "exec"), space)
        if "CUDA_SOURCE" in space:
            there[path.stem] = set(kernel_names(space["CUDA_SOURCE"]))
    named = {stem: set(kernels) for stem, kernels in BUDGET.items()}
    assert named == there, "remake it: kbsub measure resources --write tests/resource_budget.toml FILE ..."


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
    assert resources.main([str(path), "--write", str(written)]) == 0
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


@pytest.mark.parametrize(("given", "inputs"), [("x", 1), ("x, residual", 2), ("x, residual=None", 1), ("x, *more", 1)])
def test_a_forward_gets_as_many_tensors_as_it_requires(given: str, inputs: int) -> None:
    source = (FOLDER / "split_flat.py").read_text("utf-8")
    head, class_, _ = source.partition("class ModelNew")
    seen = f"        SEEN.append(sum(t is not None for t in ({given.split('=')[0]},)))\n"
    body = (
        f"(nn.Module):\n    def __init__(self, shape):\n        super().__init__()\n\n    def forward(self, {given}):\n"
    )
    rehearsal = compile_gate.Rehearsal(f"SEEN = []\n{head}{class_}{body}{seen}", DEVICES["sm_90"])
    rehearsal.forward(3, 8, "fp32")
    assert rehearsal.space["SEEN"] == [inputs]
