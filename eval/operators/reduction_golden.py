"""Golden vectors of PyTorch's CUDA reductions: their bits on a GPU for inputs that any machine can make again.

    python -m kbsub.eval.operators.reduction_golden --write tests/golden/reductions/torch_2_11.json    # seconds, GPU

A case is one reduction on a shape that takes one path of `Reduce.cuh` (each has its reason). Recorded: the SHA-256 of
the results' bits, and the first of them. The recorder compares with the model of reduction_order.py at once and says
where it differs, but writes what the GPU gave. A run without a GPU compares with what is written (tests/operators).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kbsub.eval.operators import reduction_order as order
from kbsub.eval.operators.layer_norm.order import Float32

SCHEMA = 1
FIRST = 4  # results that are kept as they are, to see how far a wrong model is off


@dataclass(frozen=True)
class ReductionCase:
    """kind: mean, norm or sum; shape: (outputs, inputs) of rows, or (batch, channels, plane) reduced over the channels.

    shift: elements by which x begins behind an aligned address. why: the path that the shape takes. half: x is float16,
    and the result fp32 (the sum before it would be rounded).
    """

    kind: str
    shape: tuple[int, ...]
    why: str
    shift: int = 0
    half: bool = False

    @property
    def name(self) -> str:
        return (
            f"{self.kind} {'x'.join(map(str, self.shape))}"
            + (f" shift {self.shift}" if self.shift else "")
            + " half" * self.half
        )


_STRIDED = (
    ((2, 64, 96), "four outputs a thread, four threads an output"),
    ((2, 32, 96), "four outputs a thread, a thread an output"),
    ((3, 128, 34), "two outputs a thread, eight threads an output"),
    ((2, 300, 65), "one output a thread, sixteen threads an output"),
    ((2, 63, 35), "one output a thread, a thread an output"),
    ((1, 200, 8), "few outputs: a narrow block, many threads an output"),
    ((1, 7, 5), "fewer inputs than accumulators times threads"),
    ((1, 9000, 16), "an output over several blocks"),
)
_ROWS = (
    ((40, 100), "too short for vectors, a warp a row"),
    ((3, 100), "too short for vectors, threads along x beyond a warp"),
    ((600, 20), "shorter than a warp"),
    ((16, 8191), "vectors, all 512 threads a row, warps of 32 x 16"),
    ((32, 65535), "the rows of level 1 problems 38 and 39"),
    ((3, 20001), "vectors, a block of 256 x 2"),
    ((1, 4099), "one row: a block of 512 x 1"),
    ((40, 1003), "vectors, a row of threads a row"),
    ((2, 300_007), "a row over several blocks"),
    ((1, 2_000_003), "a row over more blocks than a warp has lanes"),
)
CASES = (
    *(ReductionCase("mean", shape, why) for shape, why in _STRIDED),
    *(ReductionCase(kind, shape, why) for kind in ("mean", "norm", "sum") for shape, why in _ROWS),
    *(ReductionCase("norm", (16, 8191), "x begins behind an aligned address", shift) for shift in (1, 2, 3)),
    ReductionCase("sum", (2, 300_007), "x begins behind an aligned address, several blocks a row", 3),
    *(ReductionCase(kind, shape, f"16 bits: {why}", half=True) for kind in ("mean", "norm") for shape, why in _ROWS),
    *(ReductionCase("mean", (16, 8191), "16 bits: x begins behind an aligned address", by, True) for by in (1, 4, 7)),
    ReductionCase("mean", (2, 64, 96), "16 bits: four outputs a thread, four threads an output", half=True),
)


def input_of(case: ReductionCase) -> Float32:
    """x of the case, fp32 multiples of 2^-24 in [-1, 1): the top bits of PCG64's raw stream, whose values are fixed."""
    seed = int.from_bytes(hashlib.sha256(case.name.encode()).digest()[:4], "little")
    raw = np.random.PCG64(seed).random_raw(int(np.prod(case.shape)))
    drawn = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    x: Float32 = drawn.astype(np.float16 if case.half else np.float32).astype(np.float32).reshape(case.shape)
    return x


def modelled(case: ReductionCase, trees: order.Trees, device: order.Device) -> Float32:
    """What the model gives for the case, flat."""
    x = input_of(case)
    vector = 8 if case.half and case.kind != "norm" else order.VECTOR
    if len(case.shape) == 3:
        batch, channels, plane = case.shape
        rows = np.ascontiguousarray(x.transpose(0, 2, 1).reshape(batch * plane, channels))
        how = order.plan(batch * plane, channels, False, plane, device, vector)
    else:
        rows, how = x, order.plan(case.shape[0], case.shape[1], True, 1, device, vector)
    total = order.reduce(rows, how, trees, order.add_square if case.kind == "norm" else order.add, case.shift)
    if case.kind == "mean":
        total = total * (np.float32(rows.shape[0]) / np.float32(rows.size))
    return np.sqrt(total) if case.kind == "norm" else total


def digest(values: Float32) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, np.float32).tobytes()).hexdigest()


def first(values: Float32) -> list[str]:
    return [f"{int(bits):08x}" for bits in np.ascontiguousarray(values, np.float32).view(np.uint32)[:FIRST]]


def recorded(case: ReductionCase) -> Float32:
    """What PyTorch gives on this machine's GPU, flat."""
    import torch

    x = input_of(case)
    room = torch.empty(x.size + case.shift, dtype=torch.float16 if case.half else torch.float32, device="cuda")
    given = room[case.shift :].view(case.shape)
    given.copy_(torch.from_numpy(x))
    wide = torch.float32  # of a 16-bit input: cast and reduction in one kernel
    if case.kind == "norm":
        result = torch.linalg.vector_norm(given, 2, dim=1, dtype=wide)
    else:
        result = (torch.mean if case.kind == "mean" else torch.sum)(given, dim=1, dtype=wide)
    flat: Float32 = result.reshape(-1).cpu().numpy()
    return flat


def read(path: Path) -> dict[str, Any]:
    """A golden file. ValueError for a schema this version does not know."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if table.get("schema") != SCHEMA:
        raise ValueError(f"{path}: schema {table.get('schema')}, this version reads {SCHEMA}; record it again")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """0 written and as modelled, 1 written but not as modelled, 3 no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", type=Path, required=True, metavar="FILE")
    given = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("no GPU: nothing recorded", file=sys.stderr)
        return 3
    facts = torch.cuda.get_device_properties(0)
    device = order.Device(facts.multi_processor_count, facts.max_threads_per_multi_processor)
    everything = [order.Trees(falling, x_first) for falling in (True, False) for x_first in (True, False)]
    try:
        known: order.Trees | None = order.trees_of(torch.__version__)
    except order.UnknownOrder as why:
        print(why, file=sys.stderr)
        known = None
    rows, wrong = [], 0
    for case in CASES:
        values = recorded(case)
        rows.append({"name": case.name, "why": case.why, "sha256": digest(values), "first": first(values)})
        if known is None or digest(modelled(case, known, device)) != digest(values):
            wrong += 1
            fits = [str(trees) for trees in everything if digest(modelled(case, trees, device)) == digest(values)]
            print(f"{case.name} ({case.why}): not as modelled; trees that fit: {', '.join(fits) or 'none'}")
    environment = {"torch": torch.__version__, "gpu": facts.name, **vars(device)}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = json.dumps({"schema": SCHEMA, "environment": environment})
    given.write.write_text(f'{head[:-1]}, "cases": [\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{given.write}: {len(rows)} cases, {wrong} not as modelled")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
