"""Reads submissions/<task>/candidates.toml: what each candidate file claims, before anything is measured.

The file and the folder must agree: a declared file that is missing and a file that is not declared are both errors.
A declaration lowers what is asked of a candidate, so one counts only in this repository's own task folders, or from
the file that the caller names. What lies beside somebody else's candidate is that candidate's own word.
This module must not know how a claim is checked.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from kbsub.eval.tasks.toml_file import FrozenModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "candidates.toml"
# Python files of a task folder that are no candidates: the reference program of a local task, a package marker.
NOT_CANDIDATES = ("__init__.py", "reference.py")

Precision = Literal["fp32", "fp16", "bf16"]
Contract = Literal["bit-identical", "tolerance", "baseline", "control"]


class DeclarationError(ValueError):
    """A candidates.toml that cannot be believed; the message names the file, the row, the rule and the way out."""


class Expect(FrozenModel):
    """Verdicts a candidate is declared to get; measured otherwise, the declaration is wrong."""

    official: Literal["pass", "fail"] = "pass"
    # pass: every case bit-equal to native on CUDA; fail: at least one is not; skip: measured, nothing claimed
    identity: Literal["pass", "fail", "skip"] = "skip"
    # Inputs at which every full-size case is beyond the tolerance against native, and no other full-size case is.
    # Speaks of fp32 only (1e-4; the tolerance of the others is 1e-2). None claims nothing.
    beyond_tolerance: tuple[str, ...] | None = None
    # Precision -> how far from float64 it may be in `kbsub measure sweep` (random parameters), in units of what the
    # official tolerance allows. Only for a file that is beyond 1 there, for a reason that candidates.toml gives.
    beyond_float64: dict[Precision, float] = Field(default_factory=dict)
    # The stress suite's own words for its cases; for all precisions alike, or under the name of each.
    stress: dict[str, Any] = Field(default_factory=dict)


class Declaration(FrozenModel):
    """One candidate file: the precisions it is meant for, its contract, and what it is expected to get."""

    title: str = Field(min_length=1)
    precision: tuple[Precision, ...] = Field(min_length=1)
    contract: Contract
    # False: it computes something else on purpose. Timed beside the others, its output held to its own first one.
    same_function: bool = True
    accurate: bool = False  # nearest to the float64 oracle; may disagree with native where native is wrong
    expect: Expect = Field(default_factory=Expect)

    @field_validator("precision")
    @classmethod
    def _each_once(cls, value: tuple[Precision, ...]) -> tuple[Precision, ...]:
        if len(set(value)) != len(value):
            raise ValueError("names a precision twice")
        return value


def read_declarations(folder: Path) -> dict[str, Declaration]:
    """File stem -> Declaration, in the order of the file. DeclarationError for the first thing that is wrong."""
    path = Path(folder) / FILE_NAME
    declarations = _rows(path, "; every task folder has one")
    files = {file.stem for file in Path(folder).glob("*.py") if file.name not in NOT_CANDIDATES}
    if missing := sorted(declarations.keys() - files):
        raise DeclarationError(
            f"{path}: declares {', '.join(missing)}, but {missing[0]}.py is not there; add the file or remove its row"
        )
    if undeclared := sorted(files - declarations.keys()):
        raise DeclarationError(
            f"{path}: has no row for {', '.join(f'{stem}.py' for stem in undeclared)}; "
            f"add [{undeclared[0]}] with title, precision and contract"
        )
    return declarations


def is_ours(candidate: Path) -> bool:
    """Whether the file lies in a task folder of this repository: where kbsub.submissions is, links followed."""
    spec = importlib.util.find_spec("kbsub.submissions")
    roots = (spec.submodule_search_locations or []) if spec else []
    return any(Path(candidate).resolve().is_relative_to(Path(root).resolve()) for root in roots)


def declaration_of(candidate: Path) -> Declaration | None:
    """The row of one of this repository's own files in its folder's candidates.toml; None for any other file.

    DeclarationError when that candidates.toml cannot be believed.
    """
    file = Path(candidate).resolve()  # the file itself: a link must not take another file's row
    if not is_ours(file) or not (file.parent / FILE_NAME).is_file():
        return None
    return read_declarations(file.parent).get(file.stem)


@dataclass(frozen=True)
class Declared:
    """What counts for the candidates of one call, read before any of them runs. Keys: the paths as they were given.

    wrong: what a candidates.toml of this repository has wrong, for the files that it should declare.
    ignored: the candidates.toml files that lie beside a candidate and do not count.
    """

    rows: Mapping[Path, Declaration]
    wrong: Mapping[Path, str]
    ours: frozenset[Path]
    ignored: tuple[Path, ...] = ()

    def of(self, file: Path) -> dict[str, Any]:
        """The row of a file as JSON; {} for a file that nothing declares."""
        return self.rows[file].model_dump(mode="json") if file in self.rows else {}

    def notes(self) -> list[str]:
        """A sentence for each file that does not count, with the way out."""
        return [
            f"{path} does not count: only this repository's own task folders declare what is asked of their "
            f"candidates. If you vouch for it: --declarations {path}"
            for path in self.ignored
        ]


def read_declared(candidates: Sequence[Path], believed: Path | None = None) -> Declared:
    """The declarations that count for `candidates`.

    `believed`: a candidates.toml that the caller vouches for, wherever it lies; a row speaks of the candidate of that
    stem, unless that is one of this repository's own files.
    Raises DeclarationError for a `believed` that cannot be read; one of this repository's own becomes `wrong`.
    """
    vouched = _rows(believed, "") if believed is not None else {}
    rows: dict[Path, Declaration] = {}
    wrong: dict[Path, str] = {}
    ours = frozenset(file for file in candidates if is_ours(file))
    ignored: list[Path] = []
    for file in candidates:
        beside = file.parent / FILE_NAME
        try:
            found = declaration_of(file) if file in ours else vouched.get(file.stem)
        except DeclarationError as error:
            wrong[file], found = str(error), None
        if found is not None:
            rows[file] = found
        if file in ours or not beside.is_file() or beside in ignored:
            continue
        if believed is None or beside.resolve() != believed.resolve():
            ignored.append(beside)
    return Declared(rows, wrong, ours, tuple(ignored))


def _rows(path: Path, hint: str) -> dict[str, Declaration]:
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DeclarationError(f"{path}: cannot be read ({error.strerror}){hint}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{path}: is not TOML: {error}") from error
    return {stem: _row(path, stem, row) for stem, row in table.items()}


def _row(path: Path, stem: str, row: Any) -> Declaration:
    if not isinstance(row, dict):
        raise DeclarationError(f"{path}: {stem} = ... is not a row; write [{stem}], the stem of a file, as a table")
    try:
        return Declaration.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DeclarationError(f"{path}: [{stem}] {where}: {first['msg']}") from error
