"""The case tables are complete and unambiguous, and a task folder's own file is read or refused."""

from __future__ import annotations

import pytest

from kbsub.eval.suite.judge import HOSTED_ELEMENTS
from kbsub.eval.suite.records import contradictions, counts, unexpected
from kbsub.eval.tasks.bench_file import read_bench_file
from kbsub.eval.tasks.cases import (
    CHECKS,
    EPS,
    INPUTS,
    LAYOUTS,
    PARAMETERS,
    CaseFileError,
    TaskCases,
    load_task_cases,
    select,
    suite,
)
from kbsub.eval.tasks.folder import submissions_folder
from support.paths import ROOT

LEVEL1_40 = ROOT / "submissions" / "level1_40"

# What the issue asks for: (kind, scale, offset, value) of each input.
ASKED = {
    "official": ("official", 1, 0, 0),
    "normal": ("normal", 1, 0, 0),
    "x100": ("normal", 100, 0, 0),
    "x-100": ("normal", -100, 0, 0),
    "+1000": ("normal", 1, 1000, 0),
    "+1e5": ("normal", 1, 1e5, 0),
    "constant_1e4": ("constant", 1, 0, 1e4),
    "zero": ("constant", 1, 0, 0),
    "subnormal": ("subnormal", 1, 0, 0),
    "ramp": ("ramp", 1, 0, 0),
    "outlier_last": ("outlier", 1, 0, 1e6),
    "one_posinf": ("special", 1, 0, float("inf")),
    "one_neginf": ("special", 1, 0, float("-inf")),
    "alternating_1e18": ("alternating", 1, 0, 1e18),
    "constant_-3.7": ("constant", 1, 0, -3.7),
    "constant_8e37": ("constant", 1, 0, 8e37),
    "near_constant_8e37": ("near_constant", 1, 0, 8e37),
    "outlier_first": ("outlier", 1, 0, 1e6),
}
SHAPES = {
    "8x32x128x256": (8, 32, 128, 256),
    "4096x1x1x1024": (4096, 1, 1, 1024),
    "3x64x17x19": (3, 64, 17, 19),
    "rows_of_20672": (5, 20672),
    "1_row": (1, 64, 256, 256),
    "65537_rows": (65537, 256),
    "width_4": (4096, 4),
    "width_8196": (13, 8196),
    "width_10000": (13, 10000),
    "width_12288": (9, 12288),
    "width_16384": (7, 16384),
    "width_16777216": (2, 16777216),
    "batch_0": (0, 64, 256, 256),
}


@pytest.mark.parametrize("name", ASKED)
def test_an_asked_input_is_there(name):
    entry = next(each for each in INPUTS if each.name == name)
    assert (entry.kind, entry.scale, entry.offset, entry.value) == ASKED[name]


def test_inputs_parameters_and_eps_are_crossed():
    names = {case.name for case in suite()}
    wanted = {
        f"{entry.name}/{parameters}/eps{eps:g}"
        for entry in INPUTS
        for parameters in PARAMETERS
        for eps in EPS
        if entry.wide
    }
    assert wanted <= names
    assert set(EPS) == {0.0, 1e-5, 1e-3} and set(PARAMETERS) == {"initial", "random", "large", "zero_gamma"}


def test_seeds_are_written_down_once_each():
    seeds = [entry.seed for entry in INPUTS] + [setting.seed for setting in PARAMETERS.values()]
    assert len(set(seeds)) == len(seeds)


def test_names_are_unique_and_every_layout_and_check_is_asked():
    cases = suite(load_task_cases(LEVEL1_40))
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert set(LAYOUTS) <= {case.layout for case in cases}
    assert set(CHECKS) <= {case.check for case in cases}


def test_the_shapes_asked_for_are_there():
    shapes = {case.shape.name: case.shape.inputs[0] for case in load_task_cases(LEVEL1_40).cases if case.shape.inputs}
    assert {name: shapes.get(name) for name in SHAPES} == SHAPES


def test_only_the_task_s_own_shape_may_not_be_refused():
    for case in suite(load_task_cases(LEVEL1_40)):
        own = not case.shape.inputs and case.layout == "contiguous"
        assert case.may_refuse is not own, case.name


def test_a_folder_without_a_file_adds_nothing(tmp_path):
    assert load_task_cases(tmp_path) == TaskCases()


BAD_FILES = {
    "not TOML": "[[case",
    "unknown table": "[[cases]]\nname = 'x'",
    "two cases are called": "[[case]]\nname = 'x'\n[[case]]\nname = 'x'",
    "unknown key 'epsilon'": "[[case]]\nname = 'x'\nepsilon = 1.0",
    "layout = 'diagonal'": "[[case]]\nname = 'x'\nlayout = 'diagonal'",
    "'huge'": "[[case]]\nname = 'x'\ninput = 'huge'",
    "'init'": "[[case]]\nname = 'x'\ninputs = [[2, 3]]",
    "'name'": "[[case]]\ninput = 'normal'",
}


@pytest.mark.parametrize("words", BAD_FILES)
def test_a_file_that_cannot_be_run_is_refused_by_name(tmp_path, words):
    path = tmp_path / "cases.toml"
    path.write_text(BAD_FILES[words])
    with pytest.raises(CaseFileError) as caught:
        load_task_cases(tmp_path)
    assert words in str(caught.value) and "cases.toml" in str(caught.value)


def test_patterns_select_cases():
    assert [case.name for case in select(suite(), ["zero/*/eps0"])] == [f"zero/{each}/eps0" for each in PARAMETERS]
    assert len(select(suite(), [])) == len(suite())


ROWS = [
    {"name": "a/1", "class": "pass"},
    {"name": "a/2", "class": "fail", "reason": "too far"},
    {"name": "b/1", "class": "nearer_than_reference"},
    {"name": "c/1", "class": "refused"},
    {"name": "d/1", "class": "skipped"},
    {"name": "e/1", "class": "apart"},
]


def test_counts_have_the_names_of_the_result_file():
    assert counts(ROWS) == dict.fromkeys(
        ("passed", "failed", "refused", "skipped", "nearer_than_reference", "apart"), 1
    )


# declaration, accurate, what is said (a word of each problem)
DECLARED = (
    ({"fail": ["a/2"], "nearer_than_reference": ["b/*"]}, False, []),
    ({"disagrees": ["a/2", "b/*"]}, False, []),
    ({"fail": ["a/2"]}, True, []),  # accurate candidates may be nearer anywhere
    ({"fail": ["a/2"]}, False, ["b/1"]),
    ({}, True, ["a/2: fail: too far"]),
    ({"fail": ["a/*", "b/1"]}, True, ["a/1: declared fail, but it is pass", "b/1: declared fail"]),
    ({"disagrees": ["a/2", "b/*", "z/*"]}, False, ["z/*"]),
    ({"disagrees": ["a/2", "b/*", "d/*"]}, False, ["d/*"]),  # a skipped case shows nothing
    ({"flunk": ["a/2"]}, False, ["unknown class 'flunk'"]),
)


@pytest.mark.parametrize(("declared", "accurate", "said"), DECLARED)
def test_a_declaration_is_met_exactly(declared, accurate, said):
    problems = unexpected(ROWS, declared, accurate=accurate)
    assert len(problems) == len(said), problems
    assert all(words in problem for words, problem in zip(said, problems, strict=True)), problems


BY_PRECISION = {"expect": {"stress": {"fp32": {"fail": ["a/2"]}, "fp16": {"fail": ["a/*"]}}}}
# declaration, precision, how many contradictions ROWS show
CLAIMS = (
    ({"contract": "control"}, "fp32", 0),  # claims nothing about stress
    ({"contract": "bit-identical"}, "fp32", 2),  # a/2 fails, b/1 differs
    ({"contract": "tolerance", "accurate": True}, "fp32", 1),  # it may be nearer, not fail
    ({"contract": "tolerance", "accurate": True, **BY_PRECISION}, "fp32", 0),
    ({"contract": "tolerance", "accurate": True, **BY_PRECISION}, "fp16", 1),  # a/1 was to fail, too
    ({"contract": "tolerance", "accurate": True, **BY_PRECISION}, "bf16", 1),  # nothing declared there, a/2 fails
)


@pytest.mark.parametrize(("declaration", "precision", "count"), CLAIMS)
def test_a_declaration_speaks_of_its_precision(declaration, precision, count):
    found = contradictions(ROWS, declaration, precision)
    assert len(found) == count, found


# Where a launch of more threads than the kernel was compiled for went unseen: in both folders, and small enough that
# the kernels are executed on a CPU, too.
@pytest.mark.parametrize("width", [8196, 10000, 12288, 16384])
@pytest.mark.parametrize("folder", ["level1_40", "local_layernorm_tokens"])
def test_widths_beyond_8192_are_in_the_suite_and_the_bench(folder, width):
    path = submissions_folder(folder)
    shapes = [case.shape for case in load_task_cases(path).cases]
    here = [shape for shape in shapes if shape.inputs and shape.inputs[0][-1] == width]
    assert here and all(shape.elements <= HOSTED_ELEMENTS for shape in here)
    assert [shape.inputs[0][-1] for shape in read_bench_file(path).shapes].count(width) == 1
