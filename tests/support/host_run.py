"""Launch one kernel of a CUDA source on the host executor: what the tests of the executor share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kbsub.adapters.task import PRECISIONS, dtype_of
from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, Limits
from kbsub.eval.host_executor.executor import HostModule
from kbsub.eval.operators.layer_norm import order as contract
from kbsub.eval.tasks.declarations import read_declarations
from support.paths import ROOT

FOLDER = ROOT / "submissions" / "level1_40"
DTYPES = {precision: dtype_of(precision) for precision in PRECISIONS}


def source_of(stem: str) -> str:
    return (FOLDER / f"{stem}.py").read_text(encoding="utf-8")


def cuda_files() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """By "level1_38/l1_order": (path, declared precisions) of every CUDA file that a task folder declares."""
    found = {}
    for folder in sorted(table.parent for table in FOLDER.parent.glob("*/candidates.toml")):
        for stem, row in sorted(read_declarations(folder).items()):
            if "\nCUDA_SOURCE =" in (path := folder / f"{stem}.py").read_text("utf-8"):
                found[f"{folder.name}/{stem}"] = path, row.precision
    return found


def cuda_candidates(promise: str | None = None) -> dict[str, tuple[str, ...]]:
    """Stem -> declared precisions of each file of level1_40 that has CUDA_SOURCE.

    Left out: a control that is declared wrong already where the official check looks.
    """
    return {
        stem: row.precision
        for stem, row in sorted(read_declarations(FOLDER).items())
        if "CUDA_SOURCE =" in source_of(stem) and promise in (None, row.contract) and row.expect.official != "fail"
    }


def array_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """NumPy view in the model's terms: bfloat16 as its bits."""
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


def differing(name: str, got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> list[str]:
    """Where two arrays differ in any bit, any NaN being equal to any NaN; the first few, in words."""
    bits = np.uint16 if got.itemsize == 2 else np.uint32
    widen = contract.from_bfloat16 if got.dtype == np.uint16 else lambda a: a.astype(np.float32)
    both_nan = np.isnan(widen(got)) & np.isnan(widen(expected))
    wrong = np.argwhere((got.view(bits) != expected.view(bits)) & ~both_nan)
    return [
        f"{name}{w.tolist()}: got {widen(got)[tuple(w)]} = {got.view(bits)[tuple(w)]:#x}, "
        f"the model {widen(expected)[tuple(w)]} = {expected.view(bits)[tuple(w)]:#x} ({len(wrong)} differ)"
        for w in wrong[:3]
    ]


def expected_of(model: Any, x: torch.Tensor, eps: float = 1e-5) -> contract.Normalised:
    """What the reference order gives for x (rows, n) and the parameters of `model`."""
    return contract.layer_norm(array_of(x), array_of(model.ln.weight), array_of(model.ln.bias), eps)


def disagreement(
    model: Any, x: torch.Tensor, eps: float = 1e-5, expected: contract.Normalised | None = None
) -> list[str]:
    """The candidate's output, mean and rstd of x (rows, n) against the model's, bit for bit."""
    model.ln.eps = eps
    y, mean, rstd = model.forward_with_stats(x)
    if expected is None:
        expected = expected_of(model, x, eps)
    parts = (("y", y, expected.y), ("mean", mean, expected.mean), ("rstd", rstd, expected.rstd))
    return [line for name, got, want in parts for line in differing(name, array_of(got), want)]


SCALE_AND_OFFSET = {
    "normal": (1, 0), "offset": (1, 1000), "huge": (1e19, 0), "tiny": (1e-38, 0), "constant": (0, 1e4),
}  # fmt: skip


def drawn(kind: str, rows: int, n: int, seed: int) -> torch.Tensor:
    """fp32 values of one kind, (rows, n)."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal((rows, n)).astype(np.float32)
    if kind == "bits":  # every finite pattern alike: 76 decades
        magnitudes = random.integers(0, 0x7F800000, (rows, n)).astype(np.uint32).view(np.float32)
        return torch.from_numpy(magnitudes * np.sign(normal))
    if kind == "subnormal":
        magnitudes = random.integers(0, 1 << 12, (rows, n)).astype(np.uint32).view(np.float32)
        return torch.from_numpy(magnitudes * np.sign(normal))
    if kind == "special":
        special = random.choice([np.nan, np.inf, -np.inf, -0.0, 3.4e38])
        normal.flat[random.integers(0, rows * n, 1 + rows * n // 100)] = special
        return torch.from_numpy(normal)
    scale, offset = SCALE_AND_OFFSET[kind]
    return torch.from_numpy(normal * np.float32(scale) + np.float32(offset))


class Host:
    """A source on the host: guarded tensors and launches. Tensor arguments are passed by address."""

    def __init__(
        self, source: str, *, options: tuple[str, ...] = (), limits: Limits = SMALL_LIMITS, seed: int = 0,
        workers: int = 1, timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        self.executor = HostExecutor(seed=seed, workers=workers, timeout_s=timeout_s)
        self.module = HostModule(self.executor, source, options, limits)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32, name: str = "") -> torch.Tensor:
        return self.executor.memory.empty(shape, dtype, name)

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32, name: str = "") -> torch.Tensor:
        return self.executor.memory.copy(torch.as_tensor(values, dtype=dtype), name)

    def launch(
        self, kernel: str, grid: Any, block: Any, *arguments: Any, shared_bytes: int = 0, cooperative: bool = False
    ) -> None:
        grid, block = ((size,) if isinstance(size, int) else size for size in (grid, block))
        passed = tuple(value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments)
        self.module.launch(kernel, grid, block, passed, shared_bytes, cooperative)
