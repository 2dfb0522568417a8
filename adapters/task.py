"""A Task: the source of one reference program, where it came from, and the objects that it defines.

Knows where KernelBench keeps its problems and how upstream seeds and casts them. Must not know what a candidate is,
nor any one problem, except the one restated below for machines that cannot have the checkout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbsub.adapters.integers import IntegersError, with_integers
from kbsub.adapters.pin import PIN

if TYPE_CHECKING:
    import torch

SEED = 42  # upstream's `seed_num`: weights, the trial seeds and the timed input
CORRECTNESS_TRIALS = 5  # upstream's scripts pass these two; the defaults of its function are 1 and 10
PERFORMANCE_TRIALS = 100
PRECISIONS = ("fp32", "fp16", "bf16")
# What is said of a reference program that cannot be used at all; words that a stage's message may hold.
BROKEN_REFERENCE = ("the reference program does not run", "a reference program must define")
OFFICIAL_SIZE = "official"  # the task as it is written

_FOLDER_TASK = "reference"  # a local task that has a folder of candidates is called after the folder

# Level 1, problem 40 in this project's own words: layer normalisation over everything but the batch. Only the
# interface that KernelBench prescribes, the shapes, the dtype and the draw of x are shared with the original.
_EMBEDDED_SHAPE = (16, 64, 256, 256)
_EMBEDDED_LEVEL1_40 = f"""\
import torch


class Model(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)


batch_size, features, dim1, dim2 = {_EMBEDDED_SHAPE}


def get_inputs():
    return [torch.rand((batch_size, features, dim1, dim2))]


def get_init_inputs():
    return [(features, dim1, dim2)]
"""


class TaskError(Exception):
    """The task cannot be had; the message says which, why, and what to do."""


def dtype_of(precision: str) -> torch.dtype:
    """torch.float32, float16 or bfloat16 for one of PRECISIONS."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]


@dataclass(frozen=True)
class Modules:
    """What a reference program defines. `context` is the dict it was executed in, which upstream shares with the
    candidate; the three objects were taken from it before any candidate came."""

    context: dict[str, Any]
    Model: Callable[..., torch.nn.Module]
    get_inputs: Callable[[], list[Any]]
    get_init_inputs: Callable[[], list[Any]]

    def inputs_on(self, device: str | torch.device) -> list[Any]:
        """What get_inputs gives, drawn on `device` where the program lets it be: seconds less than on a CPU for
        gigabytes. Not for an official question: other numbers come of a seed than upstream's."""
        import torch

        if torch.device(device).type == "cpu":
            return list(self.get_inputs())
        try:
            with torch.device(device):
                return list(self.get_inputs())
        except Exception:  # a program that needs its values on the CPU, numpy's or its own
            return list(self.get_inputs())


@dataclass(frozen=True)
class Task:
    """One problem: `provenance` is "kernelbench@<pin>", "embedded" or "local"; `sha256` is that of the program.

    A local task has level 0 and problem id 0, and the `folder` that its program lies in. At another size than
    "official" the `source` has other integers than the program; `sha256` stays that of the program.
    """

    level: int
    problem_id: int
    name: str
    source: str
    sha256: str
    provenance: str
    precision: str = "fp32"
    folder: Path | None = None
    size: str = OFFICIAL_SIZE

    @property
    def slug(self) -> str:
        """The folder and result name: "level1_40"; of a local task its file's stem, or the folder of a reference.py."""
        if self.level:
            return f"level{self.level}_{self.problem_id}"
        file = Path(self.name)
        return file.parent.name if file.stem == _FOLDER_TASK and file.parent.name else file.stem

    def at(self, size: str, values: Mapping[str, int]) -> Task:
        """This task at another size: new values for integers of its program. TaskError for a name it does not have."""
        try:
            return replace(self, size=size, source=with_integers(self.source, values))
        except IntegersError as error:
            raise TaskError(f"{self.name}, size {size}: {error}") from error

    def modules(self) -> Modules:
        """Execute the source in a fresh dict, as upstream does (no `__file__`, no module name)."""
        context: dict[str, Any] = {}
        try:
            exec(compile(self.source, "<string>", "exec"), context)  # upstream's file name, so tracebacks read alike
        except Exception as error:
            raise TaskError(f"{self.name}: {BROKEN_REFERENCE[0]}: {error}") from error
        missing = [name for name in ("Model", "get_inputs", "get_init_inputs") if not callable(context.get(name))]
        if missing:
            raise TaskError(f"{self.name}: {BROKEN_REFERENCE[1]} {', '.join(missing)}")
        return Modules(context, context["Model"], context["get_inputs"], context["get_init_inputs"])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that inputs and parameters are cast to."""
        return dtype_of(self.precision)

    def cast(self, values: list[Any], device: str | torch.device = "cpu") -> list[Any]:
        """Every tensor as upstream casts it, integers included: to the precision, then to the device."""
        import torch

        return [v.to(dtype=self.dtype).to(device=device) if isinstance(v, torch.Tensor) else v for v in values]


def trial_seeds(trials: int = CORRECTNESS_TRIALS, seed: int = SEED) -> list[int]:
    """The seeds of upstream's correctness trials: drawn from `torch.manual_seed(42)`, in [0, 2**32 - 2]."""
    import torch

    torch.manual_seed(seed)
    return [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(trials)]


def parse_task(text: str) -> tuple[int, int]:
    """(level, problem id) of "level1_40"; TaskError for anything else."""
    match = re.fullmatch(r"level(\d+)_(\d+)", text)
    if match is None:
        raise TaskError(f"--task {text}: write level<L>_<id>, as in level1_40, or the path of a reference .py file")
    return int(match[1]), int(match[2])


def load_task(level: int, problem_id: int, *, kernelbench: Path | None, precision: str = "fp32") -> Task:
    """Problem `problem_id` of `level`, from the root of a checkout that adapters.checkout has verified.

    Without a checkout (None) only level 1 problem 40 exists, as "embedded". Raises TaskError when the level has no
    file, or more than one, whose number prefix is the id, and for an unknown precision.
    """
    if precision not in PRECISIONS:
        raise TaskError(f"--precision {precision}: KernelBench knows {', '.join(PRECISIONS)}")
    if kernelbench is None:
        if (level, problem_id) != (1, 40):
            raise TaskError(f"level{level}_{problem_id} needs the KernelBench checkout; get it with: kbsub fetch")
        return _task(level, problem_id, "level1_40 (embedded)", _EMBEDDED_LEVEL1_40, "embedded", precision)
    folder = Path(kernelbench) / "KernelBench" / f"level{level}"
    if not folder.is_dir():
        raise TaskError(f"level{level}_{problem_id}: there is no folder {folder}; levels at the pin are 1 to 4")
    files = [file for file in sorted(folder.glob("*.py")) if _number_prefix(file) == problem_id]
    if len(files) != 1:
        ids = sorted(number for file in folder.glob("*.py") if (number := _number_prefix(file)) is not None)
        span = f"{ids[0]} to {ids[-1]}" if ids else "none"
        found = ", ".join(file.name for file in files) or "none"
        raise TaskError(f"level{level}_{problem_id}: one file starts with {problem_id}_, found {found} (ids: {span})")
    return _task(level, problem_id, files[0].name, files[0].read_text("utf-8"), f"kernelbench@{PIN}", precision)


def load_local_task(path: Path, precision: str = "fp32") -> Task:
    """A reference program of one's own (upstream's ref_origin=local); TaskError when it cannot be read."""
    if precision not in PRECISIONS:
        raise TaskError(f"--precision {precision}: KernelBench knows {', '.join(PRECISIONS)}")
    try:
        source = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"--task {path}: cannot be read as a reference program: {error}") from error
    file = Path(path)
    name = f"{file.resolve().parent.name}/{file.name}" if file.stem == _FOLDER_TASK else file.name
    return _task(0, 0, name, source, "local", precision, file.parent)


def resolve_task(text: str, *, kernelbench: Path | None, precision: str = "fp32") -> Task:
    """The task a person names: "level1_40", "local:<path>" or the path of a .py file."""
    if text.startswith("local:") or text.endswith(".py"):
        return load_local_task(Path(text.removeprefix("local:")), precision)
    level, problem_id = parse_task(text)
    return load_task(level, problem_id, kernelbench=kernelbench, precision=precision)


def task_from_payload(payload: Mapping[str, Any]) -> Task:
    """The task of a judge's payload: keys "task", "precision", "kernelbench" (a folder, or None) and, optional,
    "size" ({name, values}): the size to judge it at."""
    checkout = Path(payload["kernelbench"]) if payload.get("kernelbench") else None
    task = resolve_task(str(payload["task"]), kernelbench=checkout, precision=payload.get("precision", "fp32"))
    size = payload.get("size") or {}
    return task.at(size["name"], size["values"]) if size.get("values") else task


def _number_prefix(file: Path) -> int | None:
    prefix = file.name.split("_")[0]
    return int(prefix) if prefix.isdecimal() else None


def _task(
    level: int, problem_id: int, name: str, source: str, provenance: str, precision: str, folder: Path | None = None
) -> Task:
    digest = hashlib.sha256(source.encode("utf-8")).hexdigest()
    return Task(level, problem_id, name, source, digest, provenance, precision, folder)
