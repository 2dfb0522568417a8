"""The stress suite on the CPU: what is right passes, each kind of wrongness is caught by the case meant for it."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
import torch

from kbsub.adapters.task import load_local_task, load_task
from kbsub.eval.suite import judge as stress
from kbsub.eval.suite.models import BASELINES, Entrant, task_cases
from kbsub.eval.tasks.cases import suite
from support.paths import ROOT
from support.sizes import SMALL_LEVEL1_40, SMALL_TASK
from support.stress_stand_ins import NATIVE, RIGHT, WRONG, source

pytestmark = pytest.mark.usefixtures("warm_children")

COMMON = {"task": "level1_40", "precision": "fp32", "kernelbench": None, "device": "cpu", "size": SMALL_LEVEL1_40}
TASK = load_task(1, 40, kernelbench=None)
HANDED = [case.name for case in task_cases(TASK).cases if case.name.startswith("handed/")]

# Each handed case from a public bug report: (its right value in words, the classes a right candidate may get).
# "nearer_than_reference": native itself is off by more than the tolerance there.
RIGHT_VALUES = {
    "handed/width_4_noise_around_2000": ("the two-pass value", {"pass", "nearer_than_reference"}),
    "handed/wide_row_std_0.01_around_100": ("the two-pass value", {"pass", "nearer_than_reference"}),
    "handed/constant_row_is_beta": ("exactly beta", {"pass"}),
    "handed/zero_variance_eps_1e-12": ("exactly beta", {"pass"}),
    "handed/one_inf_leaves_other_rows": ("NaN in that row, the same bits in all others", {"pass"}),
    "handed/width_3_mean_1000": ("right, or a clear refusal", {"pass", "nearer_than_reference"}),
    "handed/width_17_mean_1000": ("right, or a clear refusal", {"pass", "nearer_than_reference"}),
    "handed/width_1023_mean_1000": ("right, or a clear refusal", {"pass", "nearer_than_reference"}),
    "handed/width_1500_mean_1000": ("right, or a clear refusal", {"pass", "nearer_than_reference"}),
    "handed/65535_rows": ("every row", {"pass"}),
    "handed/65536_rows": ("every row", {"pass"}),
    "handed/65537_rows": ("every row", {"pass"}),
    "handed/zero_batch": ("an empty output of the right shape", {"pass"}),
    "handed/x_one_element_in": ("right, or a clear refusal", {"pass"}),
    "handed/gamma_one_element_in": ("right, or a clear refusal", {"pass"}),
    "handed/row_alone": ("as in the batch", {"pass"}),
    "handed/values_above_1e4": ("finite and right", {"pass"}),
}


def run(body: str, only=(), **more):
    """The rows of one stand-in, by case name."""
    declaration = more.pop("declaration", {})
    candidate = {"stem": "stand_in", "candidate_source": source(body), "declaration": declaration}
    found = stress.judge_many({**COMMON, **more, "candidates": [candidate], "only": list(only)}, lambda event: None)
    return {row["name"]: row for row in found["stress"]["stand_in"]["cases"]}


@lru_cache(maxsize=None)
def right_rows():
    return run(RIGHT, declaration={"accurate": True, "contract": "tolerance"})


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_right_candidate_fails_nowhere():
    failed = {name: row["reason"] for name, row in right_rows().items() if row["class"] in ("fail", "refused")}
    assert not failed


def test_what_is_skipped_here_needs_a_gpu_and_nothing_else_is():
    skipped = {name: row["reason"] for name, row in right_rows().items() if row["class"] == "skipped"}
    assert set(skipped) == {
        "side_stream/normal/random",
        "graph_mutation/normal/random",
        "shape_8x32x128x256/normal/random",
        "shape_8x32x128x256/+1000/random",
        "shape_8x32x128x256/one_nan/random",
        "shape_4096x1x1x1024/normal/random",
        "shape_4096x1x1x1024/+1000/random",
        "shape_4096x1x1x1024/one_nan/random",
        "shape_1_row/normal/random",
        "shape_65537_rows/normal/random",
        "shape_width_16777216/normal/random",
    }
    assert all("GPU" in reason or "CUDA" in reason for reason in skipped.values())


def test_every_handed_case_has_its_right_value():
    assert set(HANDED) == set(RIGHT_VALUES)
    wrong = {name: (value, right_rows()[name]) for name, (value, classes) in RIGHT_VALUES.items()
             if right_rows()[name]["class"] not in classes}  # fmt: skip
    assert not wrong


def test_every_handed_case_catches_something():
    caught = {name for _, cases in WRONG.values() for name in cases.split()}
    assert set(HANDED) <= caught


@pytest.mark.parametrize("name", WRONG)
def test_each_kind_of_wrongness_is_caught_by_its_case(name):
    body, cases = WRONG[name]
    rows = run(body, only=cases.split())
    assert set(rows) == set(cases.split())
    passed = [f"{case}: {row['class']}" for case, row in rows.items() if row["class"] != "fail"]
    assert not passed, f"{name} was not caught by {passed}"


def test_the_row_of_a_failure_says_what_is_wrong_and_where():
    row = run(WRONG["ignores gamma and beta"][0], only=["normal/random/eps1e-05"])["normal/random/eps1e-05"]
    assert row["equal_nan"] is True and row["seed"] == 101
    assert row["native"]["failing"] > 0 and len(row["native"]["worst"]["index"]) == 4
    assert row["oracle"]["candidate_max_abs"] > row["oracle"]["reference_max_abs"]


# Off by a few fp32 roundings of the mean at +1e5: native is far off, the float64 stand-in is not.
NEARER_CASES = ("+1e5/random/eps1e-05", "+1e5/initial/eps0")


@pytest.mark.parametrize("case", NEARER_CASES)
def test_a_candidate_that_differs_because_native_is_wrong_is_visible_as_such(case):
    row = right_rows()[case]
    assert row["class"] == "nearer_than_reference"
    assert not row["native"]["allclose"], "it does disagree with native"
    assert row["oracle"]["nearer"] == "candidate" and row["oracle"]["candidate_allclose"]


def test_native_itself_passes_everywhere_but_is_not_accurate_where_it_is_off():
    rows = run(NATIVE, only=["*/random/*"])
    assert {row["class"] for row in rows.values()} == {"pass"}
    accurate = run(NATIVE, only=["+1e5/random/eps1e-05"], declaration={"accurate": True})
    assert accurate["+1e5/random/eps1e-05"]["class"] == "fail"
    assert "not as accurate as declared" in accurate["+1e5/random/eps1e-05"]["reason"]


def test_rows_whose_rstd_overflows_fp32_are_listed_apart():
    rows = run("return self.exact(x) + 1", only=["subnormal/*/eps0"], declaration={"accurate": True})
    assert {row["class"] for row in rows.values()} == {"apart"}
    assert all(row["rstd_overflows_fp32"] for row in rows.values())


def test_a_clear_refusal_is_its_own_class_where_it_is_allowed():
    body = "if not x.is_contiguous(): raise ValueError('x: strides, must be contiguous')\nreturn self.exact(x)"
    rows = run(body, only=["layout_*"])
    refused = {name for name, row in rows.items() if row["class"] == "refused"}
    assert refused == {f"layout_{name}/normal/random" for name in ("transposed", "strided", "expanded")}


def test_names_in_another_module_are_set_by_their_last_part_and_eps_by_its_value():
    other = source(RIGHT).replace("self.ln = ", "self.norm = ").replace("self.ln", "self.norm")
    candidate = {"stem": "other", "candidate_source": other}
    only = ["normal/initial/eps1e-05", "normal/random/eps1e-05", "normal/initial/eps0.001"]
    found = stress.judge_many({**COMMON, "candidates": [candidate], "only": only}, lambda event: None)
    record = found["stress"]["other"]
    assert record["passed"] == 3 and record["parameters_set"] == "by key within another module", record["cases"]
    assert record["eps_set"] == "by its value"


def test_a_mutated_input_does_not_reach_the_next_candidate():
    mutant = {"stem": "mutant", "candidate_source": source("x.zero_(); return x")}
    honest = {"stem": "honest", "candidate_source": source(NATIVE)}
    payload = {**COMMON, "candidates": [mutant, honest], "only": ["normal/random/eps1e-05"]}
    found = stress.judge_many(payload, lambda event: None)["stress"]
    assert found["mutant"]["failed"] == 1 and found["honest"]["passed"] == 1


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_is_judged_at_its_own_tolerance(precision):
    body = NATIVE
    text = source(body).replace("torch.float32:", f"torch.{'float16' if precision == 'fp16' else 'bfloat16'}:")
    candidate = {"stem": "half", "candidate_source": text}
    only = ["*/random/eps1e-05", "handed/values_above_1e4"]
    payload = {**COMMON, "precision": precision, "candidates": [candidate], "only": only}
    rows = stress.judge_many(payload, lambda event: None)["stress"]["half"]["cases"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["normal/random/eps1e-05"]["native"]["tolerance"] == 1e-2
    assert by_name["handed/values_above_1e4"]["class"] == "pass"
    assert not [row for row in rows if row["class"] not in ("pass", "skipped")]
    if precision == "fp16":
        assert "above the largest" in by_name["alternating_1e18/random/eps1e-05"]["reason"]


GENERIC = """
import torch

class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.linear = torch.nn.Linear(features, 3)

    def forward(self, x, other):
        return self.linear(x) + other.sum()

def get_inputs():
    return [torch.rand(5, 4), torch.rand(2)]

def get_init_inputs():
    return [4]
"""


def test_the_transforms_apply_to_any_task(tmp_path):
    path = tmp_path / "generic.py"
    path.write_text(GENERIC)
    assert not task_cases(load_local_task(path)).cases
    candidate = GENERIC.replace("class Model(", "class ModelNew(").split("def get_inputs")[0]
    doubled = candidate.replace("other.sum()", "2 * other.sum()")
    payload = {
        **COMMON,
        "size": {},
        "task": f"local:{path}",
        "candidates": [
            {"stem": "same", "candidate_source": candidate},
            {"stem": "doubled", "candidate_source": doubled},
        ],
        "calls": 20,
    }
    found = stress.judge_many(payload, lambda event: None)["stress"]
    assert found["same"]["failed"] == 0 and found["same"]["passed"] > 60
    assert found["doubled"]["failed"] > 20
    assert found["same"]["left_out"]["the task's model has no eps"] > 50


def test_the_error_table_holds_every_finite_input_for_each_entrant():
    table = stress.error_table(SMALL_TASK, torch.device("cpu"), [
        Entrant("eager", "baseline", False, BASELINES["eager"])])  # fmt: skip
    expected = {case.name for case in suite(task_cases(TASK)) if case.oracle}
    assert set(table["eager"]) == expected and len(expected) == 32
    assert all(record["nearer"] == "equal" for record in table["eager"].values())


def test_the_record_is_json_with_the_keys_of_the_result_file():
    candidate = {"stem": "right", "candidate_source": source(RIGHT), "declaration": {"accurate": True}}
    record = stress.judge({**COMMON, **candidate, "only": ["near_constant_8e37/*", "zero/*"]}, lambda event: None)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert {"passed", "failed", "refused", "skipped", "cases", "equal_nan"} <= set(record)
    total = sum(record[key] for key in ("passed", "failed", "refused", "skipped", "nearer_than_reference", "apart"))
    assert total == len(record["cases"]) == 14


def test_the_oracle_stage_gives_three_keys_a_case():
    candidate = {"stem": "right", "candidate_source": source(RIGHT)}
    record = stress.judge_oracle({**COMMON, **candidate, "only": ["+1000/*"]}, lambda event: None)
    assert set(record) == {"+1000/initial/eps1e-05", "+1000/random/eps1e-05"}
    for case in record.values():
        assert {"reference_max_abs", "candidate_max_abs", "nearer"} <= set(case)


def hosted(text: str) -> dict[str, str]:
    """The classes of a CUDA candidate whose kernels are executed on the CPU, on a few cases."""
    only = [
        "normal/random/*",
        "+1000/random/eps1e-05",
        "alternating_1e18/random/eps0",
        "shape_width_4/*",
        "run_twice/*",
    ]
    candidate = {"stem": "hosted", "candidate_source": text, "declaration": {"contract": "bit-identical"}}
    payload = {**COMMON, "host_executor": True, "candidates": [candidate], "only": only}
    rows = stress.judge_many(payload, lambda event: None)["stress"]["hosted"]["cases"]
    return {row["name"]: row["class"] for row in rows}


REFERENCE_ORDER = ROOT / "submissions" / "level1_40" / "reference_order.py"
ONE_BIT = ("const float r = rstd[row];", "const float r = rstd[row] * 1.0000002f;")


def test_a_kernel_executed_on_the_cpu_is_held_to_the_bits_of_cudas_order():
    text = REFERENCE_ORDER.read_text("utf-8")
    assert set(hosted(text).values()) == {"pass"}
    assert text.count(ONE_BIT[0]) == 1, "the kernel has changed: plant the fault anew"
    assert hosted(text.replace(*ONE_BIT))["normal/random/eps1e-05"] == "fail", "one bit off, far inside the tolerance"
