"""Golden vectors: what native LayerNorm gives on a GPU, in bits, for inputs that any machine can make again.

    kbsub measure golden --write tests/golden/h200.json     # on a machine with the GPU; about a minute

Recorded for each case: mean and rstd of `torch.native_layer_norm` (bit patterns), the SHA-256 of its output, and the
variance. Native returns no variance: it is the one of operators/layer_norm/order.py, and the recorder proves on the
GPU that the device's own rsqrt(variance + eps) is native's rstd, bit for bit, at three values of eps; a case where it
is not is an error and nothing is written. A run without a GPU reads the vectors and compares
(tests/measure/test_golden.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbsub.eval.operators.layer_norm import order as contract

SCHEMA = 1
EPS = 1e-5
PROOF_EPS = (1e-5, 0.0, 1e-3)  # the first is the recorded one
SUBNORMAL_SCALE = 1e-38
# Canonical NaN: payloads differ between processors and say nothing.
_NAN = {4: 0x7FC00000, 2: 0x7FC0}
_HALF_NAN = 0x7E00
_GENERATOR = np.random.PCG64  # its raw stream is fixed by NumPy's promise; the distributions made of it are not


@dataclass(frozen=True)
class GoldenCase:
    """One input: `rows` x `n` numbers of `kind`, drawn from `seed`, in `dtype` (fp32, fp16, bf16)."""

    kind: str
    rows: int
    n: int
    dtype: str = "fp32"
    seed: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}x{self.n} {self.dtype} seed {self.seed}"


KINDS = ("uniform", "normal", "x100", "+1000", "constant", "tiny", "zero", "nonfinite")
# Widths of one chain, of a few vec4 a thread, with a ragged end, past what fits in registers and in shared memory.
WIDTHS = ((5, 4), (4, 1028), (3, 20_672), (2, 131_076))
CASES = (
    *(GoldenCase(kind, rows, n) for kind in KINDS for rows, n in WIDTHS),
    *(
        GoldenCase(kind, rows, n, t)
        for t in ("fp16", "bf16") for kind in ("uniform", "x100", "zero") for rows, n in WIDTHS
    ),
)  # fmt: skip
OFFICIAL = (GoldenCase("uniform", 16, 4_194_304, seed=42), GoldenCase("+1000", 16, 4_194_304, seed=43))


def _uniform(seed: int, stream: int, count: int) -> NDArray[np.float32]:
    """fp32 multiples of 2^-24 in [0, 1): the top bits of PCG64's raw stream."""
    raw = _GENERATOR([seed, stream]).random_raw(count)
    drawn: NDArray[np.float32] = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
    return drawn


def _normal(seed: int, stream: int, count: int) -> NDArray[np.float32]:
    """Near-normal (Irwin-Hall of 4, unit variance), by exact and correctly rounded operations only."""
    total = np.zeros(count, np.float64)
    for part in range(4):
        total += _uniform(seed, 100 * stream + part, count)
    drawn: NDArray[np.float32] = ((total - 2.0) * 1.7320508075688772).astype(np.float32)
    return drawn


def row_of(case: GoldenCase, row: int) -> NDArray[np.float32]:
    """Row number `row` of a case, (n,) fp32, before it is narrowed to the case's dtype."""
    n, stream = case.n, row + 10
    if case.kind == "uniform":
        return _uniform(case.seed, stream, n)
    if case.kind in ("zero", "constant"):
        return np.full(n, 0.0 if case.kind == "zero" else 1e4, np.float32)
    values = _normal(case.seed, stream, n)
    if case.kind == "nonfinite":
        values[(row * 7) % n] = (np.nan, np.inf, -np.inf)[row % 3]
        return values
    scale = {"x100": 100.0, "tiny": SUBNORMAL_SCALE}.get(case.kind, 1.0)
    moved: NDArray[np.float32] = values * np.float32(scale) + np.float32(1000.0 if case.kind == "+1000" else 0.0)
    return moved


def narrowed(x: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """fp32 numbers in the model's terms of a dtype: float32, float16, or uint16 bits of bfloat16."""
    with np.errstate(over="ignore"):
        return x if dtype == "fp32" else x.astype(np.float16) if dtype == "fp16" else contract.to_bfloat16(x)


def inputs(case: GoldenCase) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """(x (rows, n), gamma (n,), beta (n,)) of a case, the same bits on every machine."""
    x: NDArray[Any] = np.stack([narrowed(row_of(case, row), case.dtype) for row in range(case.rows)])
    gamma, beta = (narrowed(_normal(case.seed, stream, case.n), case.dtype) for stream in (1, 2))
    return x, gamma, beta


def digest(values: NDArray[Any], dtype: str) -> str:
    """SHA-256 of an array's bits, every NaN counted as the same."""
    bits = np.ascontiguousarray(values).view(np.uint32 if values.itemsize == 4 else np.uint16)
    nan = np.isnan(contract.from_bfloat16(values)) if dtype == "bf16" else np.isnan(values)
    canonical = _HALF_NAN if dtype == "fp16" else _NAN[values.itemsize]
    return hashlib.sha256(np.where(nan, bits.dtype.type(canonical), bits).tobytes()).hexdigest()


def patterns(values: NDArray[np.float32]) -> list[str]:
    """fp32 numbers as hexadecimal bit patterns, every NaN as the canonical one."""
    bits = np.where(np.isnan(values), np.uint32(_NAN[4]), np.ascontiguousarray(values).view(np.uint32))
    return [f"{int(b):08x}" for b in bits]


def from_patterns(texts: Sequence[str]) -> NDArray[np.float32]:
    """The numbers of `patterns`."""
    return np.array([int(text, 16) for text in texts], np.uint32).view(np.float32)


def _on(device: str, values: NDArray[Any], dtype: str) -> Any:
    import torch

    tensor = torch.from_numpy(values.view(np.int16) if dtype == "bf16" else values)
    return (tensor.view(torch.bfloat16) if dtype == "bf16" else tensor).to(device)


def _off(tensor: Any) -> NDArray[Any]:
    import torch

    cpu = tensor.cpu()
    return cpu.view(torch.int16).numpy().view(np.uint16) if cpu.dtype == torch.bfloat16 else cpu.numpy()  # type: ignore[no-any-return]


def record_case(case: GoldenCase, device: str) -> dict[str, Any]:
    """The record of one case on `device` ("cuda"). RuntimeError when the variance does not explain native's rstd."""
    import torch

    x, gamma, beta = inputs(case)
    tensors = [_on(device, values, case.dtype) for values in (x, gamma, beta)]
    mean_model, m2 = contract.row_moments(contract.widened(x))
    with np.errstate(all="ignore"):
        var = m2 / np.float32(case.n)
    record: dict[str, Any] = {}
    for eps in PROOF_EPS:
        y, mean, rstd = torch.native_layer_norm(tensors[0], (case.n,), tensors[1], tensors[2], eps)
        root = torch.rsqrt(_on(device, var, "fp32") + torch.tensor(eps, dtype=torch.float32, device=device))
        got, expected = patterns(_off(rstd.reshape(-1))), patterns(_off(root))
        if got != expected:
            raise RuntimeError(f"{case.name}, eps {eps:g}: native rstd {got[:4]}, rsqrt(model var) {expected[:4]}")
        if not record:
            record = {
                "name": case.name,
                "input_sha256": digest(x, case.dtype),
                "mean": patterns(_off(mean.reshape(-1))),
                "var": patterns(var),
                "rstd": got,
                "output_sha256": digest(_off(y), case.dtype),
            }
    if record["mean"] != patterns(mean_model):
        raise RuntimeError(f"{case.name}: native mean {record['mean'][:4]}, the model's {patterns(mean_model)[:4]}")
    return record


def read(path: Path) -> dict[str, dict[str, Any]]:
    """{case name: record} of a golden file. ValueError for a schema this version does not know."""
    table = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {table.get('schema')}, this version reads {SCHEMA}; record it again")
    return {each["name"]: each for each in table["cases"]}


def write(path: Path, records: Sequence[Mapping[str, Any]], environment: Mapping[str, Any]) -> None:
    """Atomically; a line a case."""
    how = "eval/operators/layer_norm/order.py, proved on this GPU"
    head = json.dumps({"schema": SCHEMA, "variance": how, "environment": dict(environment)})
    lines = ",\n".join("  " + json.dumps(each) for each in records)
    draft = path.with_suffix(".draft")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_text(f'{head[:-1]}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    draft.replace(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the recorder. 0 written, 1 the GPU disagrees with the model, 3 no GPU."""
    parser = argparse.ArgumentParser(prog="kbsub measure golden", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", type=Path, required=True, metavar="FILE")
    parser.add_argument("--small", action="store_true", help="leave the official shape out")
    given = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("no NVIDIA GPU: golden vectors are recorded on one", file=sys.stderr)
        return 3
    from kbsub.adapters import environment

    records: list[dict[str, Any]] = []
    wrong = 0
    for case in (*CASES, *(() if given.small else OFFICIAL)):
        try:
            records.append(record_case(case, "cuda"))
            print(f"recorded {case.name}", flush=True)
        except RuntimeError as error:
            wrong += 1
            print(f"NOT RECORDED {error}", flush=True)
        torch.cuda.empty_cache()
    if wrong:
        print(f"{wrong} cases disagree with eval/operators/layer_norm/order.py; nothing written", file=sys.stderr)
        return 1
    write(given.write, records, environment.facts("cuda"))
    print(f"{len(records)} cases written to {given.write}")
    return 0
