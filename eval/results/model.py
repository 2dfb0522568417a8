"""The result file: its keys as pydantic models, a reader, an atomic writer and a merge that loses nothing.

The keys are those other tools rely on (one file a task and GPU); a producer may add keys, never rename these. Times in
ms, sizes in bytes, bandwidth in GB/s. Must not know how any of the numbers came about, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from filelock import FileLock
from pydantic import BaseModel, Field, ValidationError, model_validator
from typing_extensions import Self

from kbsub.eval.process.isolated import Status
from kbsub.eval.process.printable import printable, shown_name
from kbsub.eval.results.files import write_text_atomic
from kbsub.eval.results.record import Environment, Record
from kbsub.eval.results.timing import BenchOutcome, BenchRuns, Floors, ShapeRow, Timing

SCHEMA = 1
_SURROGATE = re.compile("[\ud800-\udfff]")
# What may differ between two runs in the same environment.
_RUN_FACTS = ("date", "project_commit", "stand_ins")


class ResultError(Exception):
    """A result file cannot be read or joined; the message names it and says what to do."""


class TaskFacts(Record):
    """provenance: "kernelbench@<pin>", "embedded" or "local"."""

    level: int
    problem_id: int
    sha256: str
    provenance: str

    @property
    def slug(self) -> str | None:
        """KernelBench's "level1_40"; None of a local task, whose name is not in its facts."""
        return f"level{self.level}_{self.problem_id}" if self.level else None


class Official(Record):
    """Upstream's words; null where its function returned no object. Times in ms, rounded by upstream to 3 digits."""

    KEY: ClassVar[str] = "official"

    compiled: bool | None
    correctness: bool | None
    trials: str | None
    metadata: dict[str, Any]
    runtime: float | None = None
    runtime_stats: dict[str, Any] | None = None
    ref_runtime: float | None = None
    ref_runtime_stats: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        return bool(self.compiled and self.correctness)

    @property
    def ms(self) -> float | None:
        """Upstream's own mean (ms) where it called the candidate correct and timed it."""
        return self.runtime if self.correctness and self.runtime is not None and self.runtime > 0 else None

    @property
    def reference_ms(self) -> float | None:
        """Upstream's mean (ms) of eager, timed by it right after this candidate."""
        return self.ref_runtime if self.ref_runtime is not None and self.ref_runtime > 0 else None

    @property
    def speedup(self) -> float | None:
        return self.reference_ms / self.ms if self.reference_ms and self.ms else None


class StageSize(Record):
    """The size of the task that a judge was given. name: official, check, small, or "operator": shapes of the task's
    operator. values: new ones for integers of the reference program. why: "" where it is the task as it is written."""

    name: str
    values: dict[str, int] = Field(default_factory=dict)
    why: str = ""


class StageEnd(Record):
    """How a judge's process ended for one row. `log`: the child's own words, where a person will want them."""

    status: Status
    message: str | None = None
    seconds: float = 0.0
    log: str | None = None
    confined: dict[str, Any] | None = None  # {"level", "lacks", "why"} of the candidate's process, where one began
    size: StageSize | None = None  # absent where it did not run, and in older files


VERDICT_RECORDS: dict[str, type[Record]] = {}  # key of a row -> its record; the register of verdicts fills it
V = TypeVar("V", bound=Record)


class ResultRow(Record):
    """A row that verdicts may stand in, each under its own key."""

    def verdict(self, record: type[V]) -> V | None:
        """The verdict of one kind; None where it was not asked for, or gave nothing."""
        found = getattr(self, record.KEY, None)
        return found if found is None or isinstance(found, record) else record.model_validate(found)

    @model_validator(mode="after")
    def _verdicts_are_records(self) -> Self:
        for key, found in (self.model_extra or {}).items():
            if key in VERDICT_RECORDS and found is not None:
                VERDICT_RECORDS[key].model_validate(found)
        return self


class Baseline(ResultRow):
    """What PyTorch itself offers. `earlier`: run -> shape key -> method, older timings that candidates ran beside."""

    timing: dict[str, Timing] = Field(default_factory=dict)
    shapes: dict[str, ShapeRow] | None = None
    bench: BenchOutcome | None = None
    earlier: dict[str, dict[str, dict[str, Timing]]] | None = None


class Candidate(ResultRow):
    """One row. `status` is upstream's verdict in one word (or why there is none); nothing else may change it.

    stages: how each judge ended. reference, floors: eager's time and the memory floor of the official run. accurate:
    declared nearest to float64. blind_spots: what else
    the official check of this task accepts. environment: where the row was made, when that is not the file's.
    """

    sha256: str
    contract: str | None
    precision: str
    status: Status
    reason: str | None = None
    official: Official | None = None
    accurate: bool | None = None
    blind_spots: str | None = None
    stages: dict[str, StageEnd] | None = None
    declaration_error: str | None = None
    cpu_check: dict[str, Any] | None = None
    reference: dict[str, Timing] | None = None
    floors: Floors | None = None
    timing: dict[str, Timing] | None = None
    shapes: dict[str, ShapeRow] | None = None
    bench: BenchOutcome | None = None
    environment: Environment | None = None


class Result(Record):
    """The whole file. Keys of `candidates`: the file stem for fp32, else `<stem>@fp16` or `<stem>@bf16`."""

    schema_: int = Field(default=SCHEMA, alias="schema")
    environment: Environment
    task: TaskFacts
    floors: Floors = Field(default_factory=Floors)
    baselines: dict[str, Baseline] = Field(default_factory=dict)
    candidates: dict[str, Candidate] = Field(default_factory=dict)
    bench: BenchRuns | None = None


def row_key(stem: str, precision: str) -> str:
    """The key of a candidate's row: "split_eager" for fp32, "split_eager@bf16" otherwise; the name as it is shown."""
    name = shown_name(stem)
    return name if precision == "fp32" else f"{name}@{precision}"


def jsonable(value: Any) -> Any:
    """The value with every non-finite float as "NaN", "Infinity" or "-Infinity": JSON has no words for them.

    The models read those strings back as floats. Text that UTF-8 cannot hold (a lone surrogate) becomes printable.
    """
    if isinstance(value, str):
        return printable(value) if _SURROGATE.search(value) else value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {jsonable(str(key)): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return value


def write_json_atomic(path: Path, content: BaseModel | Mapping[str, Any]) -> None:
    """Write JSON beside `path` and rename it into place: a reader sees the old file or the new, never a part."""
    if isinstance(content, BaseModel):
        content = content.model_dump(mode="json", by_alias=True)
    text = json.dumps(jsonable(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_text_atomic(path, text)


def read_result(path: Path) -> Result:
    """The result in `path`. Raises ResultError: no such file, no JSON, another schema, a missing or wrong key."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ResultError(f"{path}: cannot be read as a result file: {error}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise ResultError(
            f"{path}: schema {schema!r}, this version reads schema {SCHEMA}; read it with the matching kbsub"
        )
    try:
        return Result.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ResultError(
            f"{path}: {key}: {first['msg']} ({error.error_count()} such); write it again with kbsub"
        ) from error


def merge(old: Result, new: Result, path: Path | str = "the result file") -> Result:
    """`old` with the rows of `new` put in: what `new` does not mention is kept.

    A row of the same candidate file (sha256) keeps the keys that `new` did not measure; a row of a changed file, or
    one made in another environment, is replaced: one row never mixes two. Rows that stay from another environment
    carry it in their own `environment` key. Raises ResultError when the two are about different tasks or GPUs: one
    file is one task on one GPU.
    """
    if old.task != new.task:
        changed = ", ".join(
            f"{k} {getattr(old.task, k)} -> {v}" for k, v in new.task if getattr(old.task, k, None) != v
        )
        raise ResultError(f"{path} is about another task ({changed}); write to another file with --out")
    if old.environment.gpu != new.environment.gpu:
        raise ResultError(f"{path} was made on {old.environment.gpu}, this is {new.environment.gpu}; use --out")
    merged = new.model_copy(deep=True)
    merged.environment.stand_ins = sorted({*old.environment.stand_ins, *new.environment.stand_ins})
    before, now = (_without_run_facts(result.environment) for result in (old, new))
    merged.floors = Floors.model_validate({**_dump(old.floors), **_dump(new.floors)})
    merged.baselines = {**old.baselines, **{k: _join(old.baselines.get(k), v) for k, v in new.baselines.items()}}
    rows: dict[str, Candidate] = {}
    for key, row in old.candidates.items():
        kept = row.model_copy(deep=True)
        if before != now and kept.environment is None:
            kept.environment = old.environment.model_copy(deep=True)
        rows[key] = kept
    for key, row in new.candidates.items():
        same_file = key in rows and rows[key].sha256 == row.sha256 and rows[key].environment is None
        rows[key] = _join(rows[key], row) if same_file else row
    merged.candidates = dict(sorted(rows.items()))
    merged.bench = merged.bench or old.bench
    for key, value in (old.model_extra or {}).items():
        if key not in (merged.model_extra or {}):
            merged.__pydantic_extra__ = {**(merged.model_extra or {}), key: value}
    return merged


def update_result(
    path: Path,
    new: Result | None = None,
    change: Callable[[Result], None] | None = None,
    *,
    known: Result | None = None,
    own: Collection[str] = (),
    fresh: bool = False,
) -> Result:
    """Join `new` into the file (or create it), and apply `change` to what it then holds, under a lock.

    `known`: what the file held when this process last saw it; `own`: the rows of it that this process wrote. A
    candidate can delete or damage the file: rows that are gone come back, and rows of our own stay as we wrote them.
    `fresh`: there was no file when this process began, so one that is no result is a candidate's, and is written over.
    Raises ResultError, also when the file cannot be written.
    """
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:24]
    with FileLock(Path(tempfile.gettempdir()) / f"kbsub-{name}.guard", timeout=60):
        current = _as_known(path, known, own, fresh)
        if new is not None:
            current = merge(current, new, path) if current is not None else new
        if current is None:
            raise ResultError(f"{path}: there is nothing to change; run kbsub eval first")
        if change is not None:
            change(current)
        try:
            write_json_atomic(path, current)
        except OSError as error:
            raise _unwritable(path, error) from error
    return current


def check_writable(path: Path) -> None:
    """Raise ResultError when no file can be put at `path`: better before hours of runs than after them."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ResultError:
    return ResultError(f"{path}: cannot be written: {error.strerror or error}; write to another file with --out")


def _as_known(path: Path, known: Result | None, own: Collection[str], fresh: bool) -> Result | None:
    """What the file holds, with everything of `known` put back that a candidate took out of it."""
    if known is None and not (fresh or path.exists()):
        return None
    try:
        found = read_result(path)
    except ResultError:  # deleted or no result any more; it was one when we last looked
        if known is None and not fresh:
            raise
        return known.model_copy(deep=True) if known is not None else None
    if known is None:
        return found
    if found.task != known.task or found.environment.gpu != known.environment.gpu:
        return known.model_copy(deep=True)
    ours = {key: row for key, row in known.candidates.items() if key in own}
    found.candidates = {**known.candidates, **found.candidates, **ours}  # another kbsub may have added rows meanwhile
    found.baselines = {**known.baselines, **found.baselines}
    return found


def _dump(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True)


def _without_run_facts(environment: Environment) -> dict[str, Any]:
    return {key: value for key, value in _dump(environment).items() if key not in _RUN_FACTS}


def _join(old: Any, new: Any) -> Any:
    """`old` updated by `new`, one level into the tables of timings, shapes and stages; other keys replaced whole."""
    if old is None:
        return new
    joined = _dump(old)
    for key, value in _dump(new).items():
        both_tables = (
            key in ("timing", "shapes", "stages") and isinstance(joined.get(key), dict) and isinstance(value, dict)
        )
        joined[key] = {**joined[key], **value} if both_tables else value
    if isinstance(new, Candidate) and new.status is Status.NOT_RUN and "official" not in new.model_fields_set:
        # The official stage was not asked for this time, so what it said last time still stands.
        joined.update({key: value for key, value in _dump(old).items() if key in ("status", "reason")})
    return type(new).model_validate(joined)
