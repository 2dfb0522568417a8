"""submissions/<task>/bench.toml: what `kbsub bench` measures beyond the task's own shape. Starts nothing, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from kbsub.eval.tasks.toml_file import FrozenModel, read_record

BENCH_FILE = "bench.toml"


class ShapeSpec(FrozenModel):
    """One shape beyond the official one: uniform inputs of these sizes, the constructor's arguments, the seed."""

    inputs: list[list[int]] = Field(min_length=1)
    init: list[Any]
    seed: int
    rounds: int | None = None

    @property
    def key(self) -> str:
        """Its key in a result file, from the first input: "8x32x128x256"."""
        return "x".join(map(str, self.inputs[0]))


class ChainSpec(FrozenModel):
    """How many independent chains of how many dependent updates the task's reference order has."""

    chains: int = Field(ge=1)
    updates: int = Field(ge=1)


class BenchFile(FrozenModel):
    """The bench.toml of a task folder."""

    chain: ChainSpec | None = None
    shapes: list[ShapeSpec] = Field(default_factory=list)


def read_bench_file(folder: Path | None) -> BenchFile:
    """The task folder's bench.toml; an empty one where there is none. TaskFolderError when it cannot be believed."""
    return read_record(None if folder is None else folder / BENCH_FILE, BenchFile)
