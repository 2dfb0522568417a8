"""Reads submissions/<task>/candidates.toml: what each candidate file claims, before anything is measured.

The file and the folder must agree: a declared file that is missing and a file that is not declared are both errors.
This module must not know how a claim is checked, only how a finished identity verdict can contradict one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

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


class Expect(BaseModel):
    """Verdicts a candidate is declared to get; measured otherwise, the declaration is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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


class Declaration(BaseModel):
    """One candidate file: the precisions it is meant for, its contract, and what it is expected to get."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DeclarationError(f"{path}: cannot be read ({error.strerror}); every task folder has one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"{path}: is not TOML: {error}") from error
    declarations = {stem: _row(path, stem, row) for stem, row in table.items()}
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


def declaration_of(candidate: Path) -> Declaration | None:
    """The row of a candidate file in its own folder's candidates.toml; None where the folder declares nothing."""
    folder = Path(candidate).resolve().parent
    if not (folder / FILE_NAME).is_file():
        return None
    return read_declarations(folder).get(Path(candidate).stem)


def _row(path: Path, stem: str, row: Any) -> Declaration:
    if not isinstance(row, dict):
        raise DeclarationError(f"{path}: {stem} = ... is not a row; write [{stem}], the stem of a file, as a table")
    try:
        return Declaration.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DeclarationError(f"{path}: [{stem}] {where}: {first['msg']}") from error


def identity_contradictions(expect: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Where a finished verdict of eval.identity, measured on CUDA, contradicts what was declared; [] if nowhere."""
    said = Expect.model_validate(expect)
    problems: list[str] = []
    different = [case["name"] for case in found["cases"] if "skipped" not in case and not case["identical"]]
    distinct = found.get("repeated_runs", {}).get("distinct", 1)
    if said.identity == "pass" and different:
        problems.append(f"declared bit-identical, but {len(different)} cases differ, the first: {different[0]}")
    if distinct != 1:
        problems.append(f"repeated runs gave {distinct} different results; a candidate gives the same bits every time")
    if said.identity == "fail" and not different:
        problems.append("declared to differ from native somewhere, but every case is bit-identical")
    if said.beyond_tolerance is not None and found["precision"] == "fp32":
        for case in found["cases"]:
            if case["group"] != "full size" or "skipped" in case:
                continue
            declared_beyond = case["input"] in said.beyond_tolerance
            if case.get("allclose", False) == declared_beyond:
                words = ("beyond", "within") if declared_beyond else ("within", "beyond")
                problems.append(f"{case['name']}: declared {words[0]} {found['tolerance']:g} of native, is {words[1]}")
    return problems
