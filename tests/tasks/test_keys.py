"""docs/task-folder.md lists every key of the files of a task folder, with its default, and none that is not read."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from kbsub.eval.tasks.bench_file import BenchFile, ChainSpec, ShapeSpec
from kbsub.eval.tasks.cases import Input, load_task_cases
from kbsub.eval.tasks.declarations import Declaration, Expect
from kbsub.eval.tasks.grid import GridShape
from kbsub.eval.tasks.task_file import Sizes, TaskFile
from support.paths import ROOT

PAPER = (ROOT / "docs" / "task-folder.md").read_text("utf-8")
# The words that stand before its table -> the model.
MODELS: dict[str, type[BaseModel]] = {
    "## task.toml": TaskFile,
    "`[sizes]`, each": Sizes,
    "## candidates.toml": Declaration,
    "`[NAME.expect]`:": Expect,
    "`[[grid]]`:": GridShape,
    "## bench.toml": BenchFile,
    "`[chain]`:": ChainSpec,
    "`[[shapes]]`:": ShapeSpec,
}


def table(words: str) -> dict[str, list[str]]:
    """Key -> its other cells, of the first table behind these words."""
    assert PAPER.count(f"\n{words}") == 1, words
    found = re.search(r"\n\| key .*\n\|[-|]+\n((?:\|.*\n?)+)", PAPER[PAPER.index(f"\n{words}") :])
    assert found, words
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found[1].splitlines()]
    return {key.strip("`"): cells for key, *cells in rows}


def default_in_words(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    plain = value.model_dump(exclude_defaults=True) if isinstance(value, BaseModel) else value
    return f"`{json.dumps(plain)}`"


def literals(annotation: Any) -> set[str]:
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return set().union(*map(literals, get_args(annotation)))


@pytest.mark.parametrize("words", MODELS)
def test_every_key_stands_there_with_its_default_and_its_words(words: str) -> None:
    model, rows = MODELS[words], table(words)
    assert list(rows) == list(model.model_fields), "docs/task-folder.md: other keys than the model's, or another order"
    for key, field in model.model_fields.items():
        value, default, meaning = rows[key]
        assert default == default_in_words(field), f"{words} {key}: the default"
        missing = [each for each in literals(field.annotation) if f'"{each}"' not in value and key != "beyond_float64"]
        assert not missing and meaning, f"{words} {key}: {missing} can be written, too"


def test_every_table_of_models_is_held() -> None:
    with_defaults = PAPER.count("| key | value | default | meaning |")
    assert with_defaults == len(MODELS)


def test_every_number_of_an_input_stands_there() -> None:
    sentence = re.search(r"a table of\n((?:`\w+`,? ?)+);", PAPER)
    assert sentence
    assert set(re.findall(r"\w+", sentence[1])) == {field.name for field in fields(Input)} - {"name"}


OF_A_CASE = {
    "inputs": "[[2, 4]]", "init": "[4]", "input": '"normal"', "parameters": '"initial"', "eps": "0.5",
    "layout": '"strided"', "check": '"run_twice"', "may_refuse": "false", "expect": '"beta"', "oracle": "true",
}  # fmt: skip


def test_every_key_of_a_case_stands_there_and_is_read(tmp_path) -> None:
    (tmp_path / "cases.toml").write_text(
        '[[case]]\nname = "one"\n' + "".join(f"{key} = {value}\n" for key, value in OF_A_CASE.items())
    )
    (case,) = load_task_cases(tmp_path).cases
    assert (case.eps, case.layout, case.expect, case.may_refuse, case.oracle) == (0.5, "strided", "beta", False, True)
    paragraph = PAPER[PAPER.index("In a `[[case]]`:") : PAPER.index("## bench.toml")]
    assert all(f"`{key}`" in paragraph for key in OF_A_CASE)
    of_an_input = {field.name for field in fields(Input)} - {"name"}
    assert set(re.findall(r"`(\w+)`", paragraph)) - {"true"} == OF_A_CASE.keys() | of_an_input
