"""What an addition touches, by CONTRIBUTING's table: made in a copy of the tree, run with `kbsub`, and counted.

A timing method is added in tests/bench/test_methods.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.paths import ROOT, TESTS

pytestmark = pytest.mark.slow  # each copies the tree and runs kbsub on it

WITHOUT = shutil.ignore_patterns("__pycache__")
SMALL = TESTS / "support" / "small_layer_norm_task" / "reference.py"  # a task that a CPU evaluates in no time


class Tree:
    """A copy of the packages and the tests, which the `kbsub` and the pytest run here take for the repository."""

    def __init__(self, root: Path) -> None:
        self.root = root / "kbsub"  # it is imported by this name
        for top in ("adapters", "eval", "submissions", "tests"):
            shutil.copytree(ROOT / top, self.root / top, ignore=WITHOUT)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        for folder in (root, self.root / "adapters"):
            shutil.copy(ROOT / "KERNELBENCH_COMMIT", folder)
        self.settle()

    def settle(self) -> None:
        """What is there now is the tree that an addition is made to."""
        self.before = self.contents()

    def contents(self) -> dict[str, bytes]:
        files = (file for file in self.root.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return {file.relative_to(self.root).as_posix(): file.read_bytes() for file in files}

    def add(self, name: str, text: str) -> Path:
        """A new file, or more text at the end of one that is there."""
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as stream:
            stream.write(text)
        return file

    def touched(self) -> set[str]:
        after = self.contents()
        return {name for name in after.keys() | self.before.keys() if after.get(name) != self.before.get(name)}

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment |= {"PYTHONPATH": str(self.root.parent), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "250"}
        call = [sys.executable, "-m", *command]
        return subprocess.run(call, cwd=self.root, env=environment, capture_output=True, text=True, check=False)

    def kbsub(self, *call: str, code: int = 0) -> str:
        done = self.run("kbsub.eval.cli", *call)
        assert done.returncode == code, f"kbsub {' '.join(call)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def passes(self, *call: str) -> None:
        """pytest on the tests of this tree: the addition obeys the rules that are there."""
        done = self.run("pytest", "-q", "-p", "no:cacheprovider", *call)
        assert done.returncode == 0, done.stdout + done.stderr

    def judged(self, *call: str, code: int = 0) -> tuple[str, dict[str, Any]]:
        """(what `kbsub eval` printed, the rows of its result file) of a run on the CPU."""
        out = self.root.parent / "out" / "result.json"
        said = self.kbsub("eval", *call, "--device", "cpu", "--out", str(out), code=code)
        return said, json.loads(out.read_text("utf-8"))["candidates"]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def row(title: str) -> str:
    return f'title = "{title}"\nprecision = ["fp32"]\ncontract = "tolerance"\n'


NATIVE = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return {answer}
"""
HONEST = NATIVE.format(answer="self.ln(x)")


# ---- a candidate: its file, its row, its paragraph ----


def test_a_candidate_is_three_files(tree):
    ladder = "submissions/level1_40"
    tree.add(f"{ladder}/new_rung.py", (tree.root / ladder / "native_affine_split.py").read_text("utf-8"))
    said, _ = tree.judged("new_rung", "--only", "official")
    assert "has no row for new_rung.py" in said
    tree.add(f"{ladder}/candidates.toml", f"\n[new_rung]\n{row('a new rung')}")
    tree.add(f"{ladder}/README.md", "\n**`new_rung.py`** - native, once more. Contract: tolerance.\n")
    assert len(tree.touched()) == 3

    said, rows = tree.judged("new_rung", "--only", "official")
    assert "has no row" not in said
    tree.passes("tests/submissions/test_rules.py", "-k", "new_rung")
    assert rows["new_rung"]["contract"] == "tolerance" and rows["new_rung"]["cpu_check"]["correctness"] is True


# ---- a task: one folder ----

ROW_MAXIMUM = """
import torch

class {name}(torch.nn.Module):
    def forward(self, x):
        return {answer}
"""
REFERENCE = (
    ROW_MAXIMUM.format(name="Model", answer="torch.softmax(x, dim=-1)")
    + """
rows, width = 6, 40

def get_inputs():
    return [torch.rand(rows, width)]

def get_init_inputs():
    return []
"""
)
SHIFTED = "(x - x.amax(-1, keepdim=True)).exp() / (x - x.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True)"
UNNORMALISED = "(x - x.amax(-1, keepdim=True)).exp()"
SOFTMAX = "submissions/local_softmax"


def add_softmax(tree: Tree, task_file: str = "", inside: str = "x") -> None:
    tree.add(f"{SOFTMAX}/README.md", "# Softmax over rows\n\n**`shifted.py`** - the formula. Contract: tolerance.\n")
    sizes = "[sizes]\ncheck = {}\nsmall = { rows = 4 }\n"
    tree.add(f"{SOFTMAX}/task.toml", f'title = "softmax over rows"\nreference = "reference.py"\n{task_file}{sizes}')
    tree.add(f"{SOFTMAX}/candidates.toml", f"[shifted]\n{row('the formula')}\n[wrong]\n{row('not divided')}")
    tree.add(f"{SOFTMAX}/reference.py", REFERENCE.replace("softmax(x,", f"softmax({inside},"))
    tree.add(f"{SOFTMAX}/shifted.py", ROW_MAXIMUM.format(name="ModelNew", answer=SHIFTED))
    tree.add(f"{SOFTMAX}/wrong.py", ROW_MAXIMUM.format(name="ModelNew", answer=UNNORMALISED))


def test_a_task_is_one_folder(tree):
    add_softmax(tree)
    assert {Path(name).parent.as_posix() for name in tree.touched()} == {SOFTMAX}

    out = tree.root.parent / "result.json"
    call = ("eval", "--task", f"{SOFTMAX}/reference.py", "--device", "cpu", "--out", str(out))
    tree.kbsub(*call, "--only", "official,stress", code=1)  # one of the two candidates is wrong
    result = json.loads(out.read_text("utf-8"))
    rows = result["candidates"]
    assert set(rows) == {"shifted", "wrong"}
    assert [rows[name]["cpu_check"]["correctness"] for name in ("shifted", "wrong")] == [True, False]
    assert rows["shifted"]["stress"]["failed"] == 0 < rows["shifted"]["stress"]["passed"]
    assert rows["wrong"]["stress"]["failed"] > 0
    tree.passes("tests/submissions/test_rules.py", "tests/tasks/test_folders.py", "-k", "local_softmax")


NORM_FOLDER = "submissions/local_rows"  # a third row norm: the files of level1_39, by their declared operator
NORM_PROGRAM = """
import torch

class Model(torch.nn.Module):
    def forward(self, x):
        return x / torch.norm(x, p=2, dim=1, keepdim=True)

rows, width = 6, 8191

def get_inputs():
    return [torch.rand(rows, width)]

def get_init_inputs():
    return []
"""


def test_a_task_with_kernels_is_one_folder(tree):
    """Its budget and what it can be asked lie in it; gate, launch limits, sweep and the norms' tests find it there."""
    like = tree.root / "submissions" / "level1_39"
    for name in ("l2_order", "l2_accurate"):
        tree.add(f"{NORM_FOLDER}/{name}.py", (like / f"{name}.py").read_text("utf-8"))
    paragraphs = [f"**`{name}.py`** - once more. Contract: tolerance.\n" for name in ("l2_order", "l2_accurate")]
    tree.add(f"{NORM_FOLDER}/README.md", "\n".join(["# L2 norm\n", *paragraphs]))
    tree.add(f"{NORM_FOLDER}/reference.py", NORM_PROGRAM)
    tree.add(
        f"{NORM_FOLDER}/task.toml",
        'title = "rows"\noperator = "l2_norm"\nreference = "reference.py"\n[sizes]\ncheck = {}\nsmall = { rows = 3 }\n'
        '[[grid]]\ninputs = [["rows", "width"]]\n',
    )
    tree.add(
        f"{NORM_FOLDER}/candidates.toml", f"[l2_order]\n{row('one')}\n[l2_accurate]\n{row('two')}accurate = true\n"
    )
    tree.add(f"{NORM_FOLDER}/resources.toml", (like / "resources.toml").read_text("utf-8"))
    assert {Path(name).parent.as_posix() for name in tree.touched()} == {NORM_FOLDER}

    tree.passes("tests/submissions/test_rules.py", "tests/tasks/test_folders.py", "-k", "local_rows")
    tree.passes("tests/submissions/test_unit_norms.py", "-k", "local_rows and (refuses or accurate_bound)")
    tree.passes("tests/host_executor/test_compile_gate.py", "-k", "(local_rows and sm_90) or budgets_name")
    out = tree.root.parent / "sweep.json"
    said = tree.kbsub(
        *("measure", "sweep", "local_rows/l2_order", "--device", "cpu", "--grid", "small", "--out", str(out))
    )
    assert "local_rows/l2_order.py fp32: 3 refused, 24 right" in said, said


# ---- an operator: one package, and its test ----

OPERATOR = '''"""Softmax over the last dimension, written out in float64."""

import torch

from kbsub.eval.operators.compare.oracle import Truth
from kbsub.eval.operators.operator import Operator


class Softmax(Operator):
    name = "softmax"

    def truth(self, model, inputs):
        return Truth(torch.softmax(inputs[0].double(), dim=-1), None, False)


OPERATOR = Softmax()
'''
ITS_TEST = """import torch
from kbsub.eval.operators.register import known, operator

def test_it_is_exact_where_the_model_is_not():
    assert "softmax" in known()
    truth = operator("softmax").truth(torch.nn.Identity(), [torch.rand(3, 5)])
    assert truth.y.dtype == torch.float64 and abs(float(truth.y.sum()) - 3) < 1e-12
"""


def test_an_operator_is_one_package_and_its_test(tree):
    """The reference rounds to half inside, in float64 too: only the operator's formula can say that it is off."""
    add_softmax(tree, 'operator = "softmax"\n', "x.half().to(x.dtype)")
    tree.settle()
    task = f"{SOFTMAX}/reference.py"
    out = str(tree.root.parent / "none.json")
    unknown = tree.kbsub("eval", "shifted", "--task", task, "--only", "oracle", "--device", "cpu", "--out", out, code=1)
    assert "there is none of that name; known are " in " ".join(unknown.split()), unknown

    package = "eval/operators/softmax"
    tree.add(f"{package}/__init__.py", '"""Softmax."""\n')
    tree.add(f"{package}/operator.py", OPERATOR)
    test = tree.add("tests/operators/softmax/test_operator.py", ITS_TEST)
    folders = {Path(name).parent.as_posix() for name in tree.touched()}
    assert folders == {package, "tests/operators/softmax"} and len(tree.touched()) == 3

    said, rows = tree.judged("shifted", "--task", task, "--only", "oracle")
    assert "oracle" in rows["shifted"], said
    errors = [case["reference_max_abs"] for case in rows["shifted"]["oracle"].values()]
    errors = [error for error in errors if isinstance(error, float)]  # "NaN" where half overflows
    assert len(errors) > 5 and max(errors) > 1e-6, "the reference's error against the operator's formula"
    tree.passes(str(test))


# ---- a guard: its check, its twin, its row ----

CHECK = """

@guard("value", "Has the answer the sign of the true one?")
def sign_turned(rig: Rig) -> list[str]:
    pair, inputs = rig.build(), rig.inputs(1)
    truth = rig.truth(pair, inputs)
    turned = rms(rig.call(pair, inputs).double() + truth) < 1e-3 * rms(truth)
    return ["the answer is the true one with its sign turned"] if turned else []
"""


def test_a_guard_is_its_check_its_twin_and_its_row(tree):
    by_value = "eval/verdicts/guards/by_value.py"
    tree.add(by_value, CHECK)
    twin = tree.add("tests/twins/sign_turned.py", NATIVE.format(answer="-self.ln(x)"))
    tree.add("tests/twins/twins.toml", '[sign_turned]\nguard = "sign_turned"\nofficial = "fail"\n')
    assert tree.touched() == {by_value, "tests/twins/sign_turned.py", "tests/twins/twins.toml"}

    honest = tree.root.parent / "honest.py"
    honest.write_text(HONEST)
    _, rows = tree.judged(str(twin), str(honest), "--task", str(SMALL), "--only", "guards", code=1)
    assert "sign_turned" in [finding["guard"] for finding in rows["sign_turned"]["guards"]["findings"]]
    # The label of the twin is what a GPU says of it: `kbsub measure twins` adds it to results/h200/twins.json.
    tree.passes("tests/verdicts/guards/test_guards.py", "-k", "sign_turned and not label_of_a_twin")
    assert rows["honest"]["guards"]["findings"] == [] and "sign_turned" in rows["honest"]["guards"]["checked"]


# ---- a kind of verdict: one package ----

REGISTRATION = '''"""How much of the answer is finite: record, words and gate answer. No torch."""

from typing import ClassVar

from kbsub.eval.results.record import Record
from kbsub.eval.verdicts.kind import Answer, Column, VerdictKind


class Finite(Record):
    KEY: ClassVar[str] = "finite"

    finite: int
    elements: int


def brief(found):
    return f"{found.finite} of {found.elements} finite"


def answer(found, asked):
    return (Answer.PASS if found is not None and found.finite == found.elements else Answer.FAIL), "counted"


KIND = VerdictKind(
    name="finite",
    judge="kbsub.eval.verdicts.finite.judge:judge",
    record=Finite,
    brief=brief,
    answer=answer,
    order=9,
    columns=(Column("finite elements", brief),),
    default=False,
)
'''
JUDGE = '''"""Counts the finite elements of one answer."""

import torch

from kbsub.adapters.candidate import load_candidate
from kbsub.adapters.task import task_from_payload


def judge(payload, progress):
    task = task_from_payload(payload)
    modules = task.modules()
    model = load_candidate(payload["candidate_source"], task)(*modules.get_init_inputs())
    answer = model(*modules.get_inputs())
    return {"finite": int(torch.isfinite(answer).sum()), "elements": answer.numel()}
'''


def test_a_kind_of_verdict_is_one_package(tree):
    package = "eval/verdicts/finite"
    tree.add(f"{package}/__init__.py", '"""Finite answers."""\n')
    tree.add(f"{package}/registration.py", REGISTRATION)
    tree.add(f"{package}/judge.py", JUDGE)
    assert {Path(name).parent.as_posix() for name in tree.touched()} == {package}

    honest, infinite = (tree.root.parent / f"{name}.py" for name in ("honest", "infinite"))
    honest.write_text(HONEST)
    infinite.write_text(NATIVE.format(answer="self.ln(x) / 0"))
    elements = 6 * 4 * 8 * 8
    said, rows = tree.judged(str(honest), str(infinite), "--task", str(SMALL), "--only", "finite")
    assert rows["honest"]["finite"] == {"finite": elements, "elements": elements}
    assert f"0 of {elements} finite" in said, "its words in the terminal's table"

    gate = ("gate", "--task", str(SMALL), "--device", "cpu", "--require", "finite")
    assert "honest: finite: pass" in tree.kbsub(*gate, str(honest))
    assert "infinite: finite: FAIL" in tree.kbsub(*gate, str(infinite), code=1)

    project = tree.root.parent / "project"
    (project / "results" / "cpu").mkdir(parents=True)
    (project / "docs").mkdir()
    shutil.copy(tree.root.parent / "out" / "result.json", project / "results" / "cpu" / "small.json")
    (project / "README.md").write_text("<!-- report:checks task=small gpu=cpu -->\n<!-- /report -->\n")
    tree.kbsub("report", "--root", str(project))
    header = (project / "README.md").read_text("utf-8").split("| candidate |")[1].splitlines()[0]
    assert "| finite elements |" in header, "its column in the papers"
    assert '"Finite"' in (project / "docs" / "result.schema.json").read_text("utf-8"), "its record in the schema"
