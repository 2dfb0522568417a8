"""Host runs against the bits that an H200 gave (tests/golden/*.json), and the recorder that wrote them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kbsub.eval.host_executor import SMALL_LIMITS, host_namespace
from kbsub.eval.measure import golden
from kbsub.eval.operators.layer_norm import order as contract
from support.host_run import DTYPES, array_of, cuda_candidates, source_of
from support.paths import TESTS, child_path

FILES = sorted((TESTS / "golden").glob("*.json"))
VECTORS = {name: row for path in FILES for name, row in golden.read(path).items()}
BIT_IDENTICAL = cuda_candidates("bit-identical")
RSTD_ULPS = 2  # CUDA's documented error of rsqrtf; the host's is correctly rounded
OFFICIAL_SECONDS, OFFICIAL_BYTES = 60, 2e9

recorded = pytest.mark.skipif(
    not FILES,
    reason="golden: no tests/golden/*.json (record on a GPU: python -m kbsub.eval.measure.golden --write FILE)",
)


@cache
def space_of(stem: str) -> dict[str, Any]:
    return host_namespace(source_of(stem), SMALL_LIMITS, workers=1)


def ulps(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> int:
    """The largest distance of positive fp32 numbers in units in the last place; NaN equals NaN."""
    apart = np.abs(got.view(np.int32).astype(np.int64) - expected.view(np.int32))
    return int(np.where(np.isnan(got) & np.isnan(expected), 0, apart).max())


@recorded
def test_files_hold_every_case() -> None:
    assert set(VECTORS) == {case.name for case in (*golden.CASES, *golden.OFFICIAL)}


@recorded
@pytest.mark.parametrize("case", golden.CASES, ids=lambda case: case.name)
def test_model_has_the_bits_of_the_gpu(case: golden.GoldenCase) -> None:
    vector, (x, gamma, beta) = VECTORS[case.name], golden.inputs(case)
    assert golden.digest(x, case.dtype) == vector["input_sha256"], "the input is not the recorded one"
    made = contract.layer_norm(x, gamma, beta, golden.EPS, rstd=golden.from_patterns(vector["rstd"]))
    assert golden.patterns(made.mean) == vector["mean"]
    assert golden.patterns(made.var) == vector["var"]
    assert golden.digest(made.y, case.dtype) == vector["output_sha256"], "output, with the GPU's own rstd"


@recorded
@pytest.mark.parametrize(
    "stem,case",
    [(s, c) for s, declared in BIT_IDENTICAL.items() for c in golden.CASES if c.dtype in declared],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_host_kernel_has_the_bits_of_the_gpu(stem: str, case: golden.GoldenCase) -> None:
    vector, arrays = VECTORS[case.name], golden.inputs(case)
    x, gamma, beta = (torch.from_numpy(a.view(np.int16) if case.dtype == "bf16" else a) for a in arrays)
    dtype = DTYPES[case.dtype]
    model = space_of(stem)["ModelNew"]((case.n,)).to(dtype)
    model.load_state_dict({"ln.weight": gamma.view(dtype), "ln.bias": beta.view(dtype)})
    y, mean, rstd = model.forward_with_stats(x.view(dtype))
    device_rstd = golden.from_patterns(vector["rstd"])
    assert golden.patterns(mean.numpy()) == vector["mean"]
    with np.errstate(all="ignore"):  # the variance, seen through the host's own, correctly rounded rsqrt
        root = contract.rsqrt(golden.from_patterns(vector["var"]) + np.float32(golden.EPS))
    assert golden.patterns(rstd.numpy()) == golden.patterns(root)
    assert ulps(rstd.numpy(), device_rstd) <= RSTD_ULPS
    expected = contract.layer_norm(*arrays, golden.EPS, rstd=rstd.numpy())
    assert golden.digest(array_of(y), case.dtype) == golden.digest(expected.y, case.dtype)


OFFICIAL = [pytest.param(stem, marks=[pytest.mark.slow] if stem == "reference_order" else []) for stem in BIT_IDENTICAL]


@pytest.mark.parametrize("stem", OFFICIAL)  # `make test` takes the file with more kernels
def test_official_shape_fits_in_time_and_memory(stem: str) -> None:
    index = 0 if stem == "reference_order" else 1
    case = golden.OFFICIAL[index]
    command = [sys.executable, str(TESTS / "support" / "official_shape_on_host.py"), stem, str(index)]
    environment = {**os.environ, **child_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["finite"] and got["seconds"] < OFFICIAL_SECONDS and got["peak_bytes"] < OFFICIAL_BYTES, got
    if case.name in VECTORS:
        mean, var = (golden.from_patterns(VECTORS[case.name][key]) for key in ("mean", "var"))
        checked = slice(None)
    else:  # not recorded yet: one row against the model
        checked = slice(5, 6)
        mean, m2 = contract.row_moments(golden.row_of(case, 5)[None])
        var = m2 / np.float32(case.n)
    assert got["mean"][checked] == golden.patterns(mean)
    assert got["rstd"][checked] == golden.patterns(contract.rsqrt(var + np.float32(golden.EPS)))


# ---- the recorder ----
def native_of_the_model(shift_ulps: int = 0) -> Any:
    """A stand-in for the GPU's native layer norm: the model, with torch's own rsqrt, its mean off by `shift_ulps`."""

    def native(x: torch.Tensor, shape: Any, gamma: torch.Tensor, beta: torch.Tensor, eps: float) -> tuple[Any, ...]:
        arrays = [array_of(t) for t in (x, gamma, beta)]
        mean, m2 = contract.row_moments(contract.widened(arrays[0]))
        var = torch.from_numpy(m2 / np.float32(arrays[0].shape[1]))
        rstd = torch.rsqrt(var + torch.tensor(eps, dtype=torch.float32))
        y = contract.layer_norm(*arrays, eps, rstd=rstd.numpy()).y
        shifted = torch.from_numpy((mean.view(np.int32) + shift_ulps).view(np.float32))
        bits = torch.from_numpy(y.view(np.int16) if y.dtype == np.uint16 else y)
        return bits.view(x.dtype), shifted[:, None], rstd[:, None]

    return native


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", golden.KINDS)
def test_recorder_records_and_is_read_back(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "native_layer_norm", native_of_the_model())
    case = golden.GoldenCase(kind, 3, 516, dtype)
    record = golden.record_case(case, "cpu")
    golden.write(tmp_path / "golden.json", [record], {"gpu": "none"})
    assert golden.read(tmp_path / "golden.json") == {case.name: record}
    x, gamma, beta = golden.inputs(case)
    made = contract.layer_norm(x, gamma, beta, golden.EPS, rstd=golden.from_patterns(record["rstd"]))
    assert (golden.patterns(made.mean), golden.digest(made.y, dtype)) == (record["mean"], record["output_sha256"])


def test_recorder_refuses_a_gpu_that_adds_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "native_layer_norm", native_of_the_model(shift_ulps=1))
    with pytest.raises(RuntimeError, match="native mean"):
        golden.record_case(golden.GoldenCase("normal", 2, 516), "cpu")


DIGESTS = {
    "uniform": "e6d1d3d92aad",
    "normal": "e02d2181ea67",
    "x100": "e023b2e7a366",
    "+1000": "4d72cb87954e",
    "constant": "2e9b71a898c5",
    "tiny": "892bdcba7d0e",
    "zero": "f5a5fd42d16a",
    "nonfinite": "5db8df514f57",
}


def test_inputs_are_the_same_everywhere() -> None:
    # If this changes, recorded vectors no longer belong to their cases: the drawing must never depend on a version.
    digests = {
        kind: golden.digest(golden.inputs(golden.GoldenCase(kind, 2, 8))[0], "fp32")[:12] for kind in golden.KINDS
    }
    assert digests == DIGESTS
