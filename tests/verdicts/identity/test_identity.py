"""The bit-identity verdict on CPU stand-ins: what is equal is called identical, what is not is shown with its place."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from kbsub.eval.operators.compare import bitwise
from kbsub.eval.operators.compare.bitwise import first_difference, judge_pair, repeated_hashes, ulps
from kbsub.eval.operators.identity import FULL_SIZE
from kbsub.eval.operators.layer_norm import identity as layer_norm_identity
from kbsub.eval.operators.layer_norm.identity_cases import GROUPS, OFFICIAL_SHAPE, count, inputs_of, steps
from kbsub.eval.process.isolated import JudgeFailure, Status, run_isolated
from kbsub.eval.tasks.declarations import read_declarations
from kbsub.eval.verdicts.identity.judge import judge
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("warm_children")

FOLDER = ROOT / "submissions" / "level1_40"
torch.set_num_threads(1)  # tiny tensors: thread pools only wait for each other

# A candidate with statistics whose arithmetic is native's; `{change}` may spoil y, mean or rstd of input x.
STAND_IN = """
import torch


class ModelNew(torch.nn.Module):
    def __init__(self, normalized_shape, eps=1e-5):
        super().__init__()
        self.ln = torch.nn.LayerNorm(normalized_shape, eps)
        self.calls = 0
        self.kept = {}

    def forward(self, x):
        return self.forward_with_stats(x)[0]

    def forward_with_stats(self, x):
        self.calls += 1
        ln = self.ln
        y, mean, rstd = torch.native_layer_norm(x, ln.normalized_shape, ln.weight, ln.bias, ln.eps)
        mean, rstd = mean.reshape(-1), rstd.reshape(-1)
        {change}
        return y, mean, rstd


def ulp_up(tensor, at):
    flat = tensor.reshape(-1)
    flat[at] = torch.nextafter(flat[at], torch.tensor(float("inf")))
"""


def payload(change: str, contract: str = "bit-identical", **more) -> dict:
    return {
        "candidate": "stand_in.py",
        "candidate_source": STAND_IN.replace("{change}", change),
        "stem": "stand_in",
        "task": "level1_40",
        "precision": "fp32",
        "kernelbench": None,
        "device": "cpu",
        "declaration": {"contract": contract, "precision": ["fp32"], "expect": {}},
        "timeout_s": 60.0,
        **more,
    }


def judged(change: str, contract: str = "bit-identical", **more) -> dict:
    result = judge(payload(change, contract, **more), lambda event: None)
    json.dumps(result, allow_nan=False)  # what cannot be stored as strict JSON is no result
    return result


def different(result: dict) -> list[dict]:
    return [case for case in result["cases"] if not case.get("identical", True)]


def test_a_candidate_equal_to_native_is_identical_in_every_case():
    result = judged("")
    assert result["identical"] == result["total"] == len(result["cases"]), different(result)
    assert result["repeated_runs"] == {"runs": 5, "distinct": 1, "sha256": result["repeated_runs"]["sha256"]}
    assert result["full_size"] == {"identical": 30, "total": 30}


def test_one_ulp_is_seen_and_shown_where():
    result = judged("ulp_up(y, 7) if x.shape == (4, 8, 8, 16) else None")
    assert result["full_size"] == {"identical": 0, "total": 30}
    shown = different(result)[0]["first_difference"]
    assert (shown["index"], shown["ulps"]) == ([0, 0, 0, 7], 1), shown
    assert int(shown["candidate_bits"], 16) - int(shown["reference_bits"], 16) in (1, -1)
    assert different(result)[0]["allclose"], "one ulp is within the tolerance"
    assert different(result)[0]["bit_equal"] == 4095 / 4096


# change: (tensor that must be named, group of the cases that must differ)
SPOILED = {
    "mean by one ulp": ("ulp_up(mean, 1) if len(mean) > 1 else None", "mean"),
    "rstd by one ulp": ("ulp_up(rstd, 0) if len(rstd) else None", "rstd"),
    "mean in fp64": ("mean = mean.double()", "mean"),
    "rstd with kept dimensions": ("rstd = rstd.reshape(-1, 1)", "rstd"),
    "forward is not the same launches": (
        "ulp_up(y, 0) if self.calls % 2 == 0 and len(x) else None",
        "output_with_stats",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_statistics_are_judged_beside_the_output(case):
    change, named = SPOILED[case]
    result = judged(change)
    assert result["full_size"]["identical"] == 0
    worst = different(result)[0]
    assert worst["output_identical"] and not worst["tensors"][named]["identical"]
    others = [name for name, found in worst["tensors"].items() if name != named and not found["identical"]]
    assert not others, f"only {named} was spoiled, yet {others} differ"


BEHAVIOUR = {  # change: the group that catches it, and no other need to
    "answer cached by address": ("y = self.kept.setdefault(x.data_ptr(), y)", "graph mutation"),
    "parameters cached": (
        "self.kept.setdefault('w', ln.weight.detach().clone()); "
        "y = torch.nn.functional.layer_norm(x, ln.normalized_shape, self.kept['w'], ln.bias, ln.eps)",
        "graph mutation",
    ),
    "only the official shape": ("y = y if len(x) == 4 else y * 1.0001", "extra shape"),
    "eps fixed": (
        "y = torch.nn.functional.layer_norm(x, ln.normalized_shape, ln.weight, ln.bias, 1e-5)",
        "small control",
    ),
    "-0 for +0": (
        "y = torch.where(x.amax() == 0, -torch.zeros_like(y) + y * 0, y) if x.numel() else y",
        "small control",
    ),
}


@pytest.mark.parametrize("case", BEHAVIOUR)
def test_each_group_catches_its_fault(case):
    change, group = BEHAVIOUR[case]
    result = judged(change)
    assert group in {each["group"] for each in different(result)}, f"{case}: {result['identical']} of {result['total']}"


def test_a_run_that_differs_from_the_last_is_counted():
    result = judged("ulp_up(y, self.calls % 3) if len(x) else None", repeats=6)
    assert result["repeated_runs"]["distinct"] == 3
    assert len({tuple(each) for each in result["repeated_runs"]["sha256"]}) == 3


def test_any_nan_equals_any_nan_and_payloads_are_counted_apart():
    result = judged("y = torch.where(y.isnan(), torch.tensor(-0x3FFFF0, dtype=torch.int32).view(torch.float32), y)")
    assert result["identical"] == result["total"], different(result)
    assert result["nan_payload_differences"] > 0


def test_a_nan_on_one_side_only_is_a_difference():
    result = judged("y = torch.nan_to_num(y)")
    found = [case for case in different(result) if case["input"] == "non-finite"]
    assert found and all(case["first_difference"]["reference"] == "nan" for case in found)
    assert all(case["first_difference"]["ulps"] is None and not case["allclose"] for case in found)


def test_a_refusal_is_counted_and_is_not_identical():
    result = judged("if len(x) == 257: raise ValueError('x: 257 rows, must be fewer')")
    assert result["refused"] == 1 and result["identical"] == result["total"] - 1
    assert different(result)[0]["refused"] == "x: 257 rows, must be fewer"


def test_an_error_names_the_case_and_keeps_the_cases_before_it():
    with pytest.raises(JudgeFailure) as caught:
        judged("if len(x) == 257: raise RuntimeError('launch failed')")
    failure = caught.value
    assert failure.status is Status.RUNTIME_ERROR and "257x512" in failure.message, failure.message
    assert failure.value["identical"] == failure.value["total"] > 30


def test_another_shape_is_not_identical_and_says_so():
    result = judged("y = y.reshape(-1)")
    assert result["full_size"]["identical"] == 0
    assert "shape" in different(result)[0]["reason"]


NOT_RUN = {
    "CUDA source on a CPU": {"candidate_source": (FOLDER / "reference_order.py").read_text("utf-8")},
    "a precision that is not declared": {"precision": "bf16"},
}


@pytest.mark.parametrize("case", NOT_RUN)
def test_what_means_nothing_here_is_not_run(case):
    with pytest.raises(JudgeFailure) as caught:
        judge(payload("") | NOT_RUN[case], lambda event: None)
    assert caught.value.status is Status.NOT_RUN, caught.value.message


def test_the_split_contracts_have_24_full_size_cases_and_a_candidate_without_statistics_is_judged_on_its_output():
    source = (FOLDER / "split_eager.py").read_text("utf-8")
    result = judged("", contract="control", candidate_source=source)
    assert result["full_size"]["total"] == 24
    assert not any("tensors" in case for case in result["cases"])
    assert result["cases"][-1]["change"] == {"x": 0.5, "weight": 1.0, "bias": 0.0}


def test_a_foreign_candidate_is_skipped_where_its_state_cannot_be_set():
    source = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
    def forward(self, x):
        return torch.nn.functional.layer_norm(x, self.shape)
"""
    result = judged("", candidate_source=source)
    assert result["skipped"] > 0 and result["identical"] == result["total"] > 0, different(result)


def test_another_task_is_compared_with_its_own_model(tmp_path):
    task = tmp_path / "square.py"
    task.write_text(
        "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x * x\n"
        "def get_inputs():\n    return [torch.rand(3, 5)]\ndef get_init_inputs():\n    return []\n"
    )
    good = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, x):\n        return x * x\n"
    for source, identical in ((good, 3), (good.replace("x * x", "x * x * 1.0000001"), 0)):
        result = judged("", task=f"local:{task}", candidate_source=source)
        assert (result["identical"], result["total"]) == (identical, 3)


def test_it_runs_in_a_child_process_and_tells_each_case():
    events: list[dict] = []
    one_thread = {"OMP_NUM_THREADS": "1"}  # tiny tensors
    outcome = run_isolated(
        "kbsub.eval.verdicts.identity.judge:judge",
        payload(""),
        timeout_s=120,
        on_progress=events.append,
        env=one_thread,
    )
    assert outcome.status is Status.OK, outcome.message + outcome.log
    assert outcome.value["identical"] == outcome.value["total"]
    kinds = {event["case"].split()[0] for event in events}
    assert {"full", "secret"} <= kinds and {event["of"] for event in events} == {len(events)}
    assert [event["index"] for event in events] == sorted(event["index"] for event in events)


SMALL_GROUPS = tuple(group for group in GROUPS if group.name == "small control" or group.shape == (5, 4))
KERNELS = {  # (text of reference_order.py, what takes its place): are all cases still identical to the model?
    "as it ships": ("", "", True),
    "merge the other way": ("own = combine(own, upper[warp])", "own = combine(upper[warp], own)", False),
}


@pytest.mark.skipif(not shutil.which("g++"), reason="no g++: the host executor cannot be built")
@pytest.mark.parametrize("case", KERNELS)
def test_on_a_cpu_the_kernel_itself_is_judged_against_a_model_of_natives_order(case, monkeypatch):
    old, new, identical = KERNELS[case]
    source = (FOLDER / "reference_order.py").read_text("utf-8")
    assert old in source
    monkeypatch.setattr(layer_norm_identity, "GROUPS", SMALL_GROUPS)
    result = judged("", candidate_source=source.replace(old, new), host_executor=True, repeats=2)
    assert "host executor" in result["reference"] and not result["official"]
    assert (result["identical"] == result["total"]) is identical, different(result)[:1]


# ---- the cases ----


def test_the_published_cases_are_30_and_24():
    assert count(GROUPS[:1], "bit-identical") == 30
    assert count(GROUPS[:1], "control") == 24
    assert GROUPS[0].name == FULL_SIZE and inputs_of(GROUPS[0], "baseline")[-1] == "constant 1e4"


def test_the_stream_is_seeded_once_a_seed_and_the_parameters_are_drawn_before_each_set_of_inputs():
    drawn = list(steps(GROUPS[0], "bit-identical"))
    assert [at for at, step in enumerate(drawn) if step.first_of_seed] == [0, 10, 20]
    assert [at for at, step in enumerate(drawn) if step.draw_affine] == [0, 5, 10, 15, 20, 25]


def test_leaving_out_the_constant_changes_no_other_input():
    """It draws nothing, so the split candidates see the very inputs that the others see."""
    four, five = (steps(GROUPS[0], contract) for contract in ("control", "bit-identical"))
    assert [step.input for step in four] == [step.input for step in five if step.input != "constant 1e4"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group.name} {group.shape}")
def test_every_row_takes_natives_vectorised_path(group):
    for shape in (group.shape or OFFICIAL_SHAPE, group.small):
        n = torch.Size(shape[1:]).numel()
        assert n % 4 == 0 and n <= 2**24, f"{shape}: the reference order is that of the vectorised path"
        assert torch.Size(shape).numel() < 2**31


# ---- the comparison ----

ULPS = [  # (first, second, steps between them)
    (1.0, 1.0, 0),
    (1.0, 1.0000001, 1),
    (0.0, -0.0, 0),
    (1e-45, -1e-45, 2),  # across zero: the smallest subnormals
    (3.4028235e38, float("inf"), 1),
]


@pytest.mark.parametrize(("first", "second", "steps_between"), ULPS)
def test_ulps(first, second, steps_between):
    pair = [int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) for value in (first, second)]
    assert ulps(*pair, 32) == ulps(*reversed(pair), 32) == steps_between


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_the_first_difference_is_found_beyond_the_first_chunk(dtype, monkeypatch):
    monkeypatch.setattr(bitwise, "CHUNK_ELEMENTS", 8)
    reference = torch.arange(1, 31).to(dtype).view(5, 6)
    candidate = reference.clone()
    candidate[3, 2] *= -1
    candidate[4, 4] *= 2
    found = first_difference(reference, candidate)
    assert found["index"] == [3, 2] and found["reference"] == 21 and found["candidate"] == -21


def test_signed_zeros_are_different_bits_and_equal_values():
    found = judge_pair(torch.zeros(3), -torch.zeros(3), 1e-4)
    assert not found["identical"] and found["allclose"] and found["first_difference"]["ulps"] == 0


def test_a_reused_output_buffer_does_not_hide_a_changed_result():
    buffer = torch.zeros(4)

    def run():
        return (buffer.add_(1),)

    assert repeated_hashes(run, 3)["distinct"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "stem", [stem for stem, row in read_declarations(FOLDER).items() if row.contract in ("bit-identical", "baseline")]
)
def test_on_a_gpu_every_bit_is_natives(stem):
    row = read_declarations(FOLDER)[stem]
    source = (FOLDER / f"{stem}.py").read_text("utf-8")
    data = payload("") | {
        "device": "cuda",
        "candidate_source": source,
        "declaration": row.model_dump(mode="json"),
        "repeats": 20,
    }
    outcome = run_isolated("kbsub.eval.verdicts.identity.judge:judge", data, timeout_s=300)
    assert outcome.status is Status.OK, outcome.message
    wrong = [case for case in outcome.value["cases"] if not case.get("identical", True)]
    assert not wrong and not outcome.value["contradictions"], wrong[:1]
