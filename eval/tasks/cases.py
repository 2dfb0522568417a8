"""The stress cases, as data: input transforms x parameter settings x eps, shapes, layouts and behaviour checks.

Nothing here computes: eval/suite makes the tensors and runs the cases. Seeds are written down, one an
entry. Everything applies to the float inputs of any KernelBench task; what only one task can know (shapes, constructor
arguments, cases from its own bug reports) stands in `submissions/<task>/cases.toml`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CASES_FILE = "cases.toml"

# What became of one case.
PASS = "pass"
FAIL = "fail"
REFUSED = "refused"  # a clear ValueError instead of an answer, where a refusal is allowed
SKIPPED = "skipped"  # the case does not apply here; the reason says why
NEARER = "nearer_than_reference"  # disagrees with native, agrees with the float64 answer, and is nearer to it
# Listed, not judged: float64 rstd is above the largest fp32 number, or native's own error is as large as the tolerance
# and a file that promises nothing errs no more than another order of sums would (eval/suite/classes.py).
APART = "apart"
Row = dict[str, Any]  # one entrant on one case, as a result file holds it
CLASSES = (PASS, NEARER, APART, FAIL, REFUSED, SKIPPED)

OWN_EPS = 1e-5  # torch's default, and the name of the task's own eps, whatever it is: nothing is set then
EPS_NOT_SET = "its eps cannot be set"  # the reason of a skipped case begins so
PARAMETERS_NOT_SET = "its parameters cannot be set"  # likewise
EPS = (OWN_EPS, 0.0, 1e-3)
OFFICIAL_CASE = f"official/initial/eps{OWN_EPS:g}"  # the task as it is: a reference that refuses this answers nothing


@dataclass(frozen=True)
class Input:
    """One input transform. `seed` seeds the generator; the numbers mean what `kind` says.

    official: as the task makes it. normal: randn * scale + offset. constant: value. ramp: -1 to 1 through the whole
    tensor, so that no two rows have the same mean.
    outlier: randn, and `value` at the first or last element of each row. special: randn, and `value` once, in one row.
    alternating: +value, -value, ... near_constant: value * (1 + u * 2^-20), u uniform in [0, 1).
    subnormal: randn * (smallest normal number / 8). sparse: official, and at one place that the seed draws `scale`
    times the largest there. at: "first" or "last" of an outlier; "drawn": the place of an
    outlier or a special value is one that the seed draws.
    """

    name: str
    kind: str
    seed: int
    scale: float = 1.0
    offset: float = 0.0
    value: float = 0.0
    at: str = "last"
    oracle: bool = True  # finite everywhere, so that it belongs in the error table
    wide: bool = True  # crossed with every parameter setting and eps; otherwise initial and random at OWN_EPS only


INPUTS = (
    Input("official", "official", seed=100),
    Input("normal", "normal", seed=101),
    Input("x100", "normal", seed=102, scale=100.0),
    Input("x-100", "normal", seed=103, scale=-100.0),
    Input("+1000", "normal", seed=104, offset=1000.0),
    Input("+1e5", "normal", seed=105, offset=1e5),
    Input("constant_1e4", "constant", seed=106, value=1e4),
    Input("zero", "constant", seed=107, value=0.0),
    Input("subnormal", "subnormal", seed=108),
    Input("ramp", "ramp", seed=109),
    Input("outlier_last", "outlier", seed=110, value=1e6),
    Input("one_nan", "special", seed=111, value=float("nan"), oracle=False),
    Input("one_posinf", "special", seed=112, value=float("inf"), oracle=False),
    Input("one_neginf", "special", seed=113, value=float("-inf"), oracle=False),
    Input("alternating_1e18", "alternating", seed=114, value=1e18),
    # For the error table: where plain shifts, sums of squares and fp32 ranges give way.
    Input("constant_-3.7", "constant", seed=115, value=-3.7, wide=False),
    Input("constant_8e37", "constant", seed=116, value=8e37, wide=False),
    Input("near_constant_8e37", "near_constant", seed=117, value=8e37, wide=False),
    Input("outlier_first", "outlier", seed=118, value=1e6, at="first", wide=False),
)
INPUT = {each.name: each for each in INPUTS}


@dataclass(frozen=True)
class Parameters:
    """One parameter setting. initial: as constructed; random: randn * scale; zero_gamma: every `*weight` zero; sparse:
    as constructed, but for one element of each that the seed draws."""

    name: str
    kind: str
    seed: int
    scale: float = 1.0


PARAMETERS = {
    "initial": Parameters("initial", "initial", seed=200),
    "random": Parameters("random", "random", seed=201),
    # Not larger: gamma * z and beta cancel somewhere, and fp32 roundings of 1e3 there exceed atol = 1e-4 in any order.
    "large": Parameters("large", "random", seed=202, scale=32.0),
    "zero_gamma": Parameters("zero_gamma", "zero_gamma", seed=203),
}

LAYOUTS = ("misaligned", "transposed", "strided", "expanded", "misaligned_parameters")
CHECKS = ("run_twice", "row_alone", "side_stream", "graph_mutation", "after_1000_calls", "state")


@dataclass(frozen=True)
class CaseShape:
    """Shapes of the inputs, one each, and the constructor arguments that go with them. name "": the task's own."""

    name: str = ""
    inputs: tuple[tuple[int, ...], ...] = ()
    init: tuple[Any, ...] = ()

    @property
    def elements(self) -> int:
        total = 0
        for shape in self.inputs:
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True)
class Case:
    """One question to a candidate. `may_refuse`: a clear ValueError is a right answer too."""

    name: str
    input: Input
    parameters: Parameters
    eps: float = OWN_EPS
    shape: CaseShape = CaseShape()
    layout: str = "contiguous"
    check: str = "compare"
    may_refuse: bool = False
    expect: str = ""  # "beta": the output is the bias, bit for bit
    oracle: bool = False  # belongs in the error table


def _case(entry: Input, parameters: str = "random", eps: float = OWN_EPS, **more: Any) -> Case:
    name = more.pop("name", "") or f"{entry.name}/{parameters}/eps{eps:g}"
    return Case(name, entry, PARAMETERS[parameters], eps, **more)


class CaseFileError(ValueError):
    """A task folder's cases.toml says something that cannot be run."""


@dataclass(frozen=True)
class TaskCases:
    """What a task folder adds."""

    cases: tuple[Case, ...] = ()


def suite(task_cases: TaskCases | None = None) -> list[Case]:
    """Every case, in the order it runs: cases that share shape, parameters and eps stand together."""
    task_cases = task_cases or TaskCases()
    cases = []
    for parameters in PARAMETERS:
        for eps in EPS:
            narrow = eps == OWN_EPS and parameters in ("initial", "random")
            for entry in INPUTS:
                if entry.wide or narrow:
                    cases.append(_case(entry, parameters, eps, oracle=entry.oracle and narrow))
    for layout in LAYOUTS:
        named = f"layout_{layout}/normal/random"
        cases.append(_case(INPUT["normal"], name=named, layout=layout, may_refuse=True))
    for check in CHECKS:
        cases.append(_case(INPUT["normal"], name=f"{check}/normal/random", check=check))
    return cases + list(task_cases.cases)


SECRET = "secret/"  # before the name of the case that is asked with a seed of its own


def select(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose name matches one of the shell-style patterns; all of them when there is no pattern."""
    return [case for case in cases if not patterns or any(fnmatchcase(case.name, each) for each in patterns)]


# ---- a task folder's own cases ----


def load_task_cases(folder: Path | None) -> TaskCases:
    """Read the cases.toml of a task's folder; no folder or no such file adds nothing. Raises CaseFileError.

    [[shape]] name, inputs, init, and with = [input names] (default normal).
    [[case]] name, inputs, init (or neither: the task's own shape), and any of: input = "name" or a table with kind and
    numbers, parameters, eps, layout, check, may_refuse, expect.
    """
    path = None if folder is None else folder / CASES_FILE
    if path is None or not path.is_file():
        return TaskCases()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CaseFileError(f"{path.name}: not TOML: {error}") from error
    unknown = set(content) - {"shape", "case"}
    if unknown:
        raise CaseFileError(f"{path.name}: unknown table {sorted(unknown)[0]!r}; known are shape and case")
    try:
        cases = [case for entry in content.get("shape", []) for case in _shape_cases(entry)]
        cases += [_own_case(entry) for entry in content.get("case", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise CaseFileError(f"{path.name}: {error}") from error
    names = [case.name for case in cases]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise CaseFileError(f"{path.name}: two cases are called {twice!r}; give each a name of its own")
    return TaskCases(tuple(cases))


def _shape(name: str, entry: Mapping[str, Any]) -> CaseShape:
    inputs = tuple(tuple(int(size) for size in shape) for shape in entry["inputs"])
    return CaseShape(name, inputs, tuple(_frozen(each) for each in entry["init"]))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def _shape_cases(entry: Mapping[str, Any]) -> list[Case]:
    shape = _shape(entry["name"], entry)
    return [
        _case(INPUT[name], name=f"shape_{shape.name}/{name}/random", shape=shape, may_refuse=True)
        for name in entry.get("with", ["normal"])
    ]


def _own_case(entry: Mapping[str, Any]) -> Case:
    entry = dict(entry)
    name = entry.pop("name")
    try:
        shape = _shape(name, entry) if "inputs" in entry else CaseShape()
        given = entry.pop("input", "normal")
        made = INPUT[given] if isinstance(given, str) else Input(name=name, **{"seed": 300, **given})
        parameters = PARAMETERS[entry.pop("parameters", "random")]
    except KeyError as error:
        raise ValueError(f"case {name!r}: unknown or missing {error}") from error
    for used in ("inputs", "init"):
        entry.pop(used, None)
    case = Case(name, made, parameters, shape=shape, may_refuse=True)
    for key, value in entry.items():
        allowed = {"layout": ("contiguous", *LAYOUTS), "check": ("compare", *CHECKS), "expect": ("", "beta")}
        if key not in (*allowed, "eps", "may_refuse", "oracle"):
            raise ValueError(f"case {name!r}: unknown key {key!r}")
        if key in allowed and value not in allowed[key]:
            raise ValueError(f"case {name!r}: {key} = {value!r}; known are {', '.join(map(repr, allowed[key]))}")
    return replace(case, **entry)
