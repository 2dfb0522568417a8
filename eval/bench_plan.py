"""What one benchmark run will do: which candidates may be timed where, on which shapes, against which baselines.

Reads files (candidates, candidates.toml, bench.toml, the stored result); imports no torch and starts nothing.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kbsub.adapters.source import SourceError, check_names, read_limited
from kbsub.eval.declarations import Declaration
from kbsub.eval.result import Result, row_key
from kbsub.eval.timing import COLD_REPLAY, METHODS, TimingProtocol

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BENCH_FILE = "bench.toml"
OFFICIAL = "official"  # the key of the task's own shape


class PlanError(ValueError):
    """A run that cannot be planned; the message names the file or option, the rule and the way out."""


class ShapeSpec(BaseModel):
    """One shape beyond the official one: uniform inputs of these sizes, the constructor's arguments, the seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    inputs: list[list[int]] = Field(min_length=1)
    init: list[Any]
    seed: int
    rounds: int | None = None

    @property
    def key(self) -> str:
        """The key of results.md: "8x32x128x256", from the first input."""
        return "x".join(map(str, self.inputs[0]))


class ChainSpec(BaseModel):
    """How many independent chains of how many dependent updates the task's reference order has."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chains: int = Field(ge=1)
    updates: int = Field(ge=1)


class BenchFile(BaseModel):
    """The bench.toml of a task folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    chain: ChainSpec | None = None
    shapes: list[ShapeSpec] = Field(default_factory=list)


def read_bench_file(folder: Path | None) -> BenchFile:
    """The task folder's bench.toml; an empty one where there is none. PlanError when it cannot be believed."""
    path = None if folder is None else folder / BENCH_FILE
    if path is None or not path.is_file():
        return BenchFile()
    try:
        return BenchFile.model_validate(tomllib.loads(path.read_text("utf-8")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: is not TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise PlanError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


@dataclass(frozen=True)
class CandidateFile:
    """One candidate as the plan knows it. `precisions`: the declared ones, () when nothing is declared.

    `same_function` False: it does not compute what the reference does, and says so.
    """

    stem: str
    source: str
    contract: str | None
    precisions: tuple[str, ...] = ()
    same_function: bool = True

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode("utf-8")).hexdigest()


@dataclass
class SceneSpec:
    """One shape at one precision, the programs to time there, and what must be said about them."""

    key: str
    precision: str
    shape: dict[str, Any] | None
    rounds: int | None = None
    candidates: list[str] = field(default_factory=list)
    baselines: list[str] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)  # stem -> what its row must say
    not_run: dict[str, str] = field(default_factory=dict)  # stem -> why it is not timed

    @property
    def id(self) -> str:
        return f"{self.key}@{self.precision}"


@dataclass
class Plan:
    """One run. `sources` holds every candidate's text; `task` is what kbsub.adapters.task.resolve_task takes."""

    task: str
    kernelbench: str | None
    device: str
    candidates: dict[str, CandidateFile]
    scenes: list[SceneSpec]
    methods: list[str]
    protocol: TimingProtocol
    budget_s: float
    chain: ChainSpec | None = None
    floors: bool = True


def read_candidate(path: Path, declared: Declaration | None = None) -> CandidateFile:
    """A candidate file with the declaration that counts for it, if any does. PlanError when it cannot be read."""
    try:
        source = read_limited(path).decode("utf-8")  # not read_text: it would change the line ends, and the hash
    except SourceError as error:
        raise PlanError(str(error)) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read as a candidate: {error}") from error
    if declared is None:
        return CandidateFile(path.stem, source, None)
    precisions = tuple(declared.precision)
    return CandidateFile(path.stem, source, declared.contract, precisions, declared.same_function)


def candidate_files(names: Sequence[str], folder: Path | None) -> list[Path]:
    """The files a person names: paths, or stems of the task's folder; without names every one the folder declares.

    Raises PlanError for a name that is no file, for two of one stem, and when there is nothing to choose from.
    """
    from kbsub.eval.declarations import FILE_NAME, read_declarations

    declared = folder is not None and (folder / FILE_NAME).is_file()
    if not names:
        if folder is None or not declared:
            raise PlanError(f"{folder or 'this task'}: declares no candidates ({FILE_NAME}); name the files to time")
        return [folder / f"{stem}.py" for stem in read_declarations(folder)]
    found = []
    for name in names:
        path = Path(name)
        if not path.is_file() and folder is not None and path.parent == Path("."):
            path = folder / f"{path.stem}.py"
        if not path.is_file():
            raise PlanError(
                f"{name}: no such candidate file" + (f", and none of that name in {folder}" if folder else "")
            )
        found.append(path)
    try:
        check_names(found)
    except SourceError as error:
        raise PlanError(str(error)) from error
    return found


def choose_shapes(wanted: str, bench: BenchFile) -> list[ShapeSpec | None]:
    """The scenes of --shapes: "official" (None), "all", or keys joined by commas. PlanError for an unknown key."""
    known = {shape.key: shape for shape in bench.shapes}
    if wanted == OFFICIAL:
        return [None]
    if wanted == "all":
        if not known:
            raise PlanError(f"--shapes all: this task has no {BENCH_FILE}; leave --shapes out for its own shape")
        return list(bench.shapes)
    chosen: list[ShapeSpec | None] = []
    for key in wanted.split(","):
        if key == OFFICIAL:
            chosen.append(None)
        elif key in known:
            chosen.append(known[key])
        else:
            raise PlanError(f"--shapes {key}: known are official, all, {', '.join(known) or 'no other'}")
    return chosen


def choose_methods(wanted: str) -> list[str]:
    """The methods of --methods: "all" or names joined by commas. PlanError for an unknown one."""
    if wanted == "all":
        return list(METHODS)
    names = wanted.split(",")
    for name in names:
        if name not in (*METHODS, COLD_REPLAY):
            raise PlanError(f"--methods {name}: known are all, {', '.join(METHODS)}, {COLD_REPLAY}")
    return names


def plan_scenes(
    shapes: Sequence[ShapeSpec | None],
    precisions: Sequence[str],
    candidates: Sequence[CandidateFile],
    baselines: Sequence[str],
    stored: Result | None,
    *,
    allow_unverified: bool = False,
) -> list[SceneSpec]:
    """Every shape at every precision with the candidates that may be timed there.

    A candidate is timed only when upstream's stored verdict on this very file at this precision is a pass;
    `allow_unverified` times it all the same and makes its row say so. One that does not declare the precision is left
    out of extra shapes, and timed with a note where it was judged officially.
    """
    scenes = []
    for shape in shapes:
        for precision in precisions:
            spec = None if shape is None else shape.model_dump(exclude={"rounds"})
            rounds = None if shape is None else shape.rounds
            scene = SceneSpec(OFFICIAL if shape is None else shape.key, precision, spec, rounds, [], list(baselines))
            for candidate in candidates:
                _place(scene, candidate, stored, allow_unverified)
            scenes.append(scene)
    return scenes


def _place(scene: SceneSpec, candidate: CandidateFile, stored: Result | None, allow_unverified: bool) -> None:
    """Put one candidate into a scene, or write down why not."""
    notes = []
    declared = not candidate.precisions or scene.precision in candidate.precisions
    problem = official_problem(candidate, scene.precision, stored)
    if not declared:
        if problem or scene.key != OFFICIAL:
            scene.not_run[candidate.stem] = f"{scene.precision} is not declared in candidates.toml"
            return
        notes.append(f"outside its contract: {scene.precision} is not declared")
    if problem and not allow_unverified:
        scene.not_run[candidate.stem] = problem
        return
    if problem:
        notes.append("timed without an official pass of this file")
    if not candidate.same_function:
        notes.append("computes another function: its output was held to its own first one, not to the reference's")
    elif candidate.contract == "control":
        notes.append("control: right on these uniform inputs, known to fail on others")
    scene.candidates.append(candidate.stem)
    if notes:
        scene.notes[candidate.stem] = notes


def official_problem(candidate: CandidateFile, precision: str, stored: Result | None) -> str | None:
    """Why there is no official pass for this file at this precision, and what to do; None when there is one."""
    key = row_key(candidate.stem, precision)
    option = "" if precision == "fp32" else f" --precision {precision}"
    rerun = f"run: kbsub eval --only official{option} {candidate.stem}.py"
    row = stored.candidates.get(key) if stored is not None else None
    if row is None or row.official is None:
        return f"no official verdict is stored for {key}; {rerun}"
    if row.sha256 != candidate.sha256:
        return f"the stored verdict of {key} is about another version of the file; {rerun}"
    if not (row.official.compiled and row.official.correctness):
        return f"upstream's verdict on {key} was not a pass ({row.status})"
    return None
