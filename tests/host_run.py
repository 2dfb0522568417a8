"""Launch one kernel of a CUDA source on the host executor: what the tests of the executor share."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from kbsub.eval.host_executor import SMALL_LIMITS, HostExecutor, Limits
from kbsub.eval.host_executor.executor import HostModule

FOLDER = Path(__file__).resolve().parents[1] / "submissions" / "level1_40"
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def source_of(stem: str) -> str:
    return (FOLDER / f"{stem}.py").read_text(encoding="utf-8")


def cuda_candidates(contract: str | None = None) -> dict[str, tuple[str, ...]]:
    """Stem -> declared precisions of each file of level1_40 that has CUDA_SOURCE (one not yet declared: fp32)."""
    table = tomllib.loads((FOLDER / "candidates.toml").read_text(encoding="utf-8"))
    stems = sorted(path.stem for path in FOLDER.glob("*.py") if "CUDA_SOURCE =" in path.read_text(encoding="utf-8"))
    rows = {stem: table.get(stem, {"precision": ["fp32"], "contract": None}) for stem in stems}
    return {s: tuple(row["precision"]) for s, row in rows.items() if contract in (None, row["contract"])}


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
