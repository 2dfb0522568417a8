"""KernelBench's problems at their derived small size: an honest file passes every stage, a wrong one fails by name."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kbsub.adapters.task import load_task
from kbsub.eval.cli import app
from kbsub.eval.suite.judge import judge_many
from kbsub.eval.tasks.sizes import SMALL, recorded, size_payload
from kbsub.eval.verdicts.identity.judge import judge as judge_identity
from kbsub.eval.verdicts.register import KINDS

# Products, elementwise, reductions, norms with and without parameters, pooling, convolutions, losses, scans, indices.
pytestmark = pytest.mark.usefixtures("warm_children")

FAST = (
    "level1_1 level1_12 level1_19 level1_23 level1_33 level1_35 level1_36 level1_40 level1_42 level1_48 level1_51 "
    "level1_67 level1_89 level1_94 level2_12 level2_33 level2_37 level2_40 level2_84 level2_88"
).split()
SLOW = (
    "level1_5 level1_9 level1_26 level1_34 level1_37 level1_39 level1_44 level1_47 level1_50 level1_53 level1_61 "
    "level1_82 level1_87 level1_93 level1_97 level1_98 level1_99 level2_1 level2_5 level2_9 level2_11 level2_17 "
    "level2_21 level2_28 level2_30 level2_34 level2_41 level2_45 level2_52 level2_57 level2_62 level2_68 level2_73 "
    "level2_75 level2_76 level2_81 level2_86 level2_94 level2_97 level2_99"
).split()

# The reference, executed apart, inside a module of another name: its parameters are found within it. Nothing of
# upstream's is written down here. `{answer}` makes it wrong, or not.
CANDIDATE = """
import torch
own = {{}}
exec(compile({source!r}, "<string>", "exec"), own)
class ModelNew(torch.nn.Module):
    def __init__(self, *arguments):
        super().__init__()
        self.inner = own["Model"](*arguments)
    def forward(self, *inputs):
        y = self.inner(*inputs)
        return {answer}
"""
ANSWERS = {"right": "y", "wrong": "y + 0.01 * (1 + y.abs()) if y.is_floating_point() else y.flip(0)"}
# Of the fast half: transforms, parameters, layouts and checks, not all of them crossed.
SOME = [
    "official/*",
    "+1000/random/*",
    "one_nan/*/eps1e-05",
    "layout_*",
    "run_*",
    "row_*",
    "after_*",
    "state/*",
    "x100/*",
]


def payload_of(slug, kernelbench):
    level, number = map(int, slug.removeprefix("level").split("_"))
    size = size_payload(SMALL, recorded().tasks[slug].sizes[SMALL])
    task = load_task(level, number, kernelbench=kernelbench.path).at(SMALL, size["values"])
    sources = {name: CANDIDATE.format(source=task.source, answer=answer) for name, answer in ANSWERS.items()}
    common = {"task": slug, "precision": "fp32", "kernelbench": str(kernelbench.path), "device": "cpu", "size": size}
    return common, sources


@pytest.mark.kernelbench
@pytest.mark.parametrize("slug", FAST)
def test_an_honest_file_passes_and_a_wrong_one_fails_by_name(kernelbench, slug):
    common, sources = payload_of(slug, kernelbench)
    candidates = [{"stem": stem, "candidate_source": source} for stem, source in sources.items()]
    found = judge_many({**common, "candidates": candidates, "calls": 3, "only": SOME}, lambda event: None)
    right, wrong = found["stress"]["right"], found["stress"]["wrong"]
    assert not right["failed"], [row for row in right["cases"] if row["class"] == "fail"][:3]
    assert KINDS["stress"].not_checked(KINDS["stress"].record.model_validate(right)) == "" and right["passed"] > 5
    failed = [row["name"] for row in wrong["cases"] if row["class"] == "fail"]
    assert "official/initial/eps1e-05" in failed, [row for row in wrong["cases"] if row["name"].startswith("official")]
    assert found["oracle"]["right"], "no case has a float64 answer"
    common |= {"repeats": 2, "declaration": {}}
    for stem, source in sources.items():
        identity = judge_identity({**common, "candidate_source": source}, lambda event: None)
        assert identity["total"] > 0 and (identity["identical"] == identity["total"]) is (stem == "right"), identity


@pytest.mark.slow
@pytest.mark.timeout(900)  # level2_34 has 2 million elements at its small size, in 209 cases
@pytest.mark.kernelbench
@pytest.mark.parametrize("slug", SLOW)
def test_the_whole_command_of_an_honest_and_a_wrong_file(kernelbench, slug, tmp_path):
    _, sources = payload_of(slug, kernelbench)
    for name, source in sources.items():
        (tmp_path / f"{name}.py").write_text(source)
    out = tmp_path / "out.json"
    call = ["eval", *(str(tmp_path / f"{name}.py") for name in sources), "--task", slug, "--device", "cpu"]
    call += ["--size", SMALL, "--out", str(out), "--only", "identity,stress,oracle,guards"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 1, done.output  # the wrong one
    rows = json.loads(out.read_text())["candidates"]
    assert {name: end["status"] for name, end in rows["right"]["stages"].items()} == {
        "identity": "OK",
        "stress": "OK",
        "oracle": "OK",
        "guards": "OK",
    }, done.output
    assert not rows["right"]["stress"]["failed"] and rows["right"]["guards"]["clean"], done.output
    assert any(row["class"] == "fail" for row in rows["wrong"]["stress"]["cases"])
    assert "wrong.py, stress: " in done.output.replace("\n", "")
