"""Shapes of a task's inputs with the constructor arguments that go with them: what a candidate can be asked beyond the
task's own size.

They come from the task folder alone: the [[grid]] tables of task.toml, which say how a number of rows and a width
become a call, cases.toml and bench.toml; and from the task's own program. Must not know candidates or operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from kbsub.eval.tasks.bench_file import read_bench_file
from kbsub.eval.tasks.cases import CaseShape, load_task_cases
from kbsub.eval.tasks.toml_file import FrozenModel

if TYPE_CHECKING:
    from kbsub.adapters.task import Task

ROWS, WIDTH = "rows", "width"


class GridShape(FrozenModel):
    """How (rows, width) becomes a call: both words stand for the numbers, in the inputs' shapes and in `init`.

    Rows of the answer must not depend on one another, so every input begins with "rows".
    """

    inputs: tuple[tuple[int | Literal["rows", "width"], ...], ...] = Field(min_length=1)
    init: tuple[Any, ...] = ()

    @field_validator("inputs")
    @classmethod
    def _each_has_rows_of_a_width(cls, value: tuple[tuple[int | str, ...], ...]) -> tuple[tuple[int | str, ...], ...]:
        for shape in value:
            if shape[:1] != (ROWS,) or WIDTH not in shape[1:]:
                raise ValueError(f'an input of shape {list(shape)} must begin with "rows" and hold "width"')
        return value

    def at(self, rows: int, width: int) -> CaseShape:
        """The call for these numbers, named by its first input: "3x1000", "3x64x7x5"."""
        numbers = {ROWS: rows, WIDTH: width}
        inputs = tuple(tuple(numbers[each] if isinstance(each, str) else each for each in one) for one in self.inputs)
        return named(inputs, tuple(_filled(each, numbers) for each in self.init))


def _filled(value: Any, numbers: Mapping[str, int]) -> Any:
    """An argument with its words replaced, lists as tuples."""
    if isinstance(value, (list, tuple)):
        return tuple(_filled(each, numbers) for each in value)
    return numbers.get(value, value) if isinstance(value, str) else value


def named(inputs: Iterable[Iterable[int]], init: Iterable[Any]) -> CaseShape:
    """A shape under the name of its first input; lists among the arguments become tuples."""
    sizes = tuple(tuple(int(size) for size in each) for each in inputs)
    return CaseShape("x".join(map(str, sizes[0])), sizes, tuple(_filled(each, {}) for each in init))


def to_json(shape: CaseShape) -> dict[str, Any]:
    """For a child's payload; `named(**...)` reads it."""
    return {"inputs": [list(each) for each in shape.inputs], "init": list(shape.init)}


def folder_shapes(folder: Path, grid: Iterable[GridShape], pairs: Iterable[tuple[int, int]]) -> list[CaseShape]:
    """Every shape that a task folder knows of, each once: `grid` (its own) at each (rows, width), cases, benchmarks.

    Raises what reading the folder's files raises. Empty shapes are left out: nothing is launched for them.
    """
    cases, spread = load_task_cases(folder).cases, list(pairs)
    found = [each.at(rows, width) for each in grid for rows, width in spread]
    found += [named(case.shape.inputs, case.shape.init) for case in cases if case.shape.inputs]
    found += [named(shape.inputs, shape.init) for shape in read_bench_file(folder).shapes]
    return list(dict.fromkeys(shape for shape in found if shape.elements))


def own_shape(task: Task) -> CaseShape | None:
    """The task's own shape and arguments; None where its inputs are not float tensors. Executes its program.

    Inputs are made without contents where the program lets them be. TaskError for a program that does not run.
    """
    import torch

    modules = task.modules()
    try:
        with torch.device("meta"):
            inputs = modules.get_inputs()
    except Exception:  # a program that needs its values
        inputs = modules.get_inputs()
    if not inputs or not all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in inputs):
        return None
    return named([tuple(each.shape) for each in inputs], modules.get_init_inputs())
