"""A file that recognises the questions everybody can draw is found out by those whose seed nobody knew."""

from __future__ import annotations

import pytest

from kbsub.eval.process.isolated import JudgeFailure
from kbsub.eval.suite.judge import judge as judge_stress
from kbsub.eval.suite.judge import judge_oracle
from kbsub.eval.tasks.cases import FAIL, PASS, SECRET
from kbsub.eval.verdicts.identity.judge import judge as judge_identity
from kbsub.eval.verdicts.kind import Answer, Asked
from kbsub.eval.verdicts.register import KINDS

TASK = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = torch.nn.{layer}
    def forward(self, x):
        return {answer}
def get_inputs():
    return [{drawn}]
def get_init_inputs():
    return [40]
"""
OF_ANY = {"layer": "Linear(n, n)", "answer": "torch.tanh(self.ln(x))", "drawn": "torch.rand(16, 40)"}
OF_LAYER_NORM = {"layer": "LayerNorm(n)", "answer": "self.ln(x)", "drawn": "torch.rand(16, 40)"}
# It draws every question that it can know, and answers these alone.
KNOWS = """
import torch
from kbsub.eval.suite.inputs import make_inputs
from kbsub.eval.tasks.cases import INPUTS
def known():
    for seed in (0, 1, 2, 42, 100):
        torch.manual_seed(seed)
        yield torch.rand(16, 40)
    for entry in INPUTS:
        yield make_inputs(entry, [torch.empty(16, 40)], torch.float32, torch.device("cpu"))[0]
KNOWN = list(known())
class ModelNew(Model):
    def forward(self, x):
        if any(torch.equal(x.nan_to_num(), each.nan_to_num()) for each in KNOWN):
            return super().forward(x)
        return torch.zeros_like(x)
"""
HONEST = "class ModelNew(Model):\n    pass\n"
COMPARED = ["official/*", "normal/*", "x100/*", "secret/*"]
JUDGES = {"identity": judge_identity, "stress": judge_stress, "oracle": judge_oracle}


def judged(folder, stage: str, source: str, forms: dict[str, str] = OF_ANY, **more):
    (folder / "task.py").write_text(TASK.format(**forms))
    payload = {
        "task": str(folder / "task.py"),
        "precision": "fp32",
        "kernelbench": None,
        "device": "cpu",
        "stem": "one",
        "candidate_source": source,
        "only": COMPARED,
        **more,
    }
    found = JUDGES[stage](payload, lambda event: None)
    record = KINDS[stage].record.model_validate(found)
    return found, record, KINDS[stage].answer(record, Asked({"precision": "fp32"}, {"status": "OK"}, {}))


@pytest.mark.parametrize("stage", JUDGES)
def test_what_knows_the_fixed_questions_fails_the_secret_ones(tmp_path, stage, warm_children):
    found, record, (answer, words) = judged(tmp_path, stage, KNOWS)
    assert answer is Answer.FAIL and "secret" in words, words
    assert KINDS[stage].problems(record) and all("secret" in each for each in KINDS[stage].problems(record))
    if stage == "stress":
        assert not found["failed"] and {row["class"] for row in found["cases"]} <= {PASS, "skipped"}
        assert [row["class"] for row in found["secret"]] == [FAIL, FAIL]
    if stage == "identity":
        assert found["identical"] == found["total"] == 3 and not found["secret"][0]["identical"]


@pytest.mark.parametrize("stage", JUDGES)
def test_an_honest_file_answers_them_and_no_count_holds_them(tmp_path, stage, warm_children):
    found, record, (answer, words) = judged(tmp_path, stage, HONEST)
    assert answer is not Answer.FAIL and "secret" in words and not KINDS[stage].problems(record), words
    if stage == "stress":
        assert not any(row["name"].startswith(SECRET) for row in found["cases"]) and len(found["secret"]) == 2
        assert found["passed"] + found["skipped"] == len(found["cases"])
    if stage == "oracle":
        assert len(record.cases) == len(found) - 1 and len(found["secret"]) == 2


def test_a_row_can_be_made_again_by_its_seed_and_is_another_without(tmp_path, warm_children):
    def errors(**more):
        found = judged(tmp_path, "stress", HONEST, only=["secret/*"], **more)[0]
        return found["secret"][0]["seed"], [row["oracle"]["reference_max_abs"] for row in found["secret"]]

    seed, first = errors()
    assert errors(secret_seed=seed) == (seed, first) and errors() != (seed, first)


def test_the_seed_reaches_no_request_to_the_candidate(tmp_path, monkeypatch, warm_children):
    from kbsub.eval.process.frames import Channel

    sent, send = [], Channel.send
    monkeypatch.setattr(
        Channel, "send", lambda self, word, *rest: (sent.append(repr(word)), send(self, word, *rest))[1]
    )
    for stage in JUDGES:
        judged(tmp_path, stage, HONEST, secret_seed=271828182845)
    assert len(sent) > 10 and not any("27182818284" in word for word in sent)


def of_operator(found, counted: int) -> list[str | None]:
    assert found["full_size"]["total"] == counted and not any(case["group"] == "secret" for case in found["cases"])
    assert all(case["identical"] and case["seed"] in (5, 6) for case in found["secret"]), found["secret"]
    return [case.get("affine") for case in found["secret"]]


def test_a_layer_norm_asks_secret_cases_of_both_settings_of_its_parameters(tmp_path, warm_children):
    found, _, _ = judged(tmp_path, "identity", HONEST, task="level1_40", repeats=1, secret_seed=5)
    assert of_operator(found, 24) == ["default", "random"]


@pytest.mark.kernelbench
def test_a_norm_without_parameters_asks_secret_cases_too(tmp_path, kernelbench, warm_children):
    more = {"task": "level1_39", "kernelbench": str(kernelbench.path), "repeats": 1, "secret_seed": 5}
    found, _, _ = judged(tmp_path, "identity", HONEST, **more)
    assert of_operator(found, 30) == [None, None]
    # The change in place is a case of its own: named and grouped so, and none of the thirty.
    (changed,) = (case for case in found["cases"] if "change" in case)
    assert (changed["group"], changed["name"]) == ("graph mutation", "mutation in place (no graph on a CPU)")


def test_inputs_that_are_always_the_same_leave_no_secret_in_them(tmp_path, warm_children):
    forms = {**OF_ANY, "drawn": "torch.linspace(0, 1, 640).view(16, 40)"}
    found, _, _ = judged(tmp_path, "stress", HONEST, forms)
    assert {row["name"]: row["class"] for row in found["secret"]} == {
        "secret/official/initial/eps1e-05": "skipped",
        "secret/normal/random/eps1e-05": PASS,
    }
    (case,) = judged(tmp_path, "identity", HONEST, forms)[0]["secret"]
    assert "the same for every seed" in case["skipped"]


def test_without_parameters_that_can_be_set_a_secret_case_that_sets_none_is_asked(tmp_path, warm_children):
    source = "import torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self, n):\n        super().__init__()\n"
    source += "    def forward(self, x):\n        return torch.nn.functional.layer_norm(x, x.shape[1:])\n"
    with pytest.raises(JudgeFailure) as failure:
        judged(tmp_path, "oracle", source, OF_LAYER_NORM)
    assert failure.value.status == "NOT_CHECKED" and "its parameters cannot be set" in failure.value.message
    assert set(failure.value.value["secret"]) == {"secret/official/initial/eps1e-05", "secret/normal/initial/eps1e-05"}


def test_cases_for_which_a_file_left_no_time_are_not_passed():
    """It slept until the hard ones could not be begun, and the gate said pass."""
    rows = [{"name": f"x{at}/initial/eps1e-05", "class": PASS} for at in range(3)]
    late = {"name": "one_nan/random/eps1e-05", "class": "skipped", "reason": "no time was left"}
    record = {"passed": 3, "failed": 0, "refused": 0, "skipped": 1, "cases": [*rows, late]}
    asked = Asked({"precision": "fp32"}, {"status": "OK"}, {})
    answer, words = KINDS["stress"].answer(KINDS["stress"].record.model_validate(record), asked)
    assert answer is Answer.UNCERTIFIED and "1 cases were not asked, no time was left" in words
