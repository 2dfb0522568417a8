"""A file that recognises the questions everybody can draw is found out by those whose seed nobody knew."""

from __future__ import annotations

import pytest

from kbsub.eval.process.isolated import JudgeFailure
from kbsub.eval.suite.judge import judge as judge_stress
from kbsub.eval.suite.judge import judge_oracle
from kbsub.eval.tasks.cases import APART, FAIL, INPUT, PASS, SECRET
from kbsub.eval.tasks.secret import secret_cases
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
        wrong = [row for row in found["secret"] if row["class"] == FAIL]
        others = [row for row in found["secret"] if row["class"] != FAIL]
        assert len(wrong) > 20 and all(row["class"] == APART for row in others), others
        assert all("8e37" in row["name"] for row in others), "apart only where native itself is nonsense"
    if stage == "identity":
        assert found["identical"] == found["total"] == 3 and not found["secret"][0]["identical"]


@pytest.mark.parametrize("stage", JUDGES)
def test_an_honest_file_answers_them_and_no_count_holds_them(tmp_path, stage, warm_children):
    found, record, (answer, words) = judged(tmp_path, stage, HONEST)
    assert answer is not Answer.FAIL and "secret" in words and not KINDS[stage].problems(record), words
    if stage == "stress":
        assert not any(row["name"].startswith(SECRET) for row in found["cases"]) and {
            row["class"] for row in found["secret"]
        } == {PASS}
        assert found["passed"] + found["skipped"] == len(found["cases"])
    if stage == "oracle":
        assert len(record.cases) == len(found) - 1 and len(found["secret"]) > 10


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
    assert all(case["identical"] for case in found["secret"]), found["secret"]
    assert [case["seed"] for case in found["secret"]] == [5, 6, 7, 8]
    return [case.get("affine") for case in found["secret"]]


def test_a_layer_norm_asks_secret_cases_of_both_settings_of_its_parameters(tmp_path, warm_children):
    found, _, _ = judged(tmp_path, "identity", HONEST, task="level1_40", repeats=1, secret_seed=5)
    assert of_operator(found, 24) == ["default", *["random"] * 3]


@pytest.mark.kernelbench
def test_a_norm_without_parameters_asks_secret_cases_too(tmp_path, kernelbench, warm_children):
    more = {"task": "level1_39", "kernelbench": str(kernelbench.path), "repeats": 1, "secret_seed": 5}
    found, _, _ = judged(tmp_path, "identity", HONEST, **more)
    assert of_operator(found, 30) == [None] * 4
    # The change in place is a case of its own: named and grouped so, and none of the thirty.
    (changed,) = (case for case in found["cases"] if "change" in case)
    assert (changed["group"], changed["name"]) == ("graph mutation", "mutation in place (no graph on a CPU)")


def test_inputs_that_are_always_the_same_leave_no_secret_in_them(tmp_path, warm_children):
    forms = {**OF_ANY, "drawn": "torch.linspace(0, 1, 640).view(16, 40)"}
    found, _, _ = judged(tmp_path, "stress", HONEST, forms)
    classes = {row["name"]: row["class"] for row in found["secret"]}
    assert [name for name, each in classes.items() if each != PASS] == ["secret/official/initial/eps1e-05"]
    assert classes["secret/official/initial/eps1e-05"] == "skipped"
    assert classes["secret/one_larger/initial/eps1e-05"] == classes["secret/official/sparse/eps1e-05"] == PASS
    (case,) = judged(tmp_path, "identity", HONEST, forms)[0]["secret"]
    assert "the same for every seed" in case["skipped"]


def test_without_parameters_that_can_be_set_a_secret_case_that_sets_none_is_asked(tmp_path, warm_children):
    source = "import torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self, n):\n        super().__init__()\n"
    source += "    def forward(self, x):\n        return torch.nn.functional.layer_norm(x, x.shape[1:])\n"
    with pytest.raises(JudgeFailure) as failure:
        judged(tmp_path, "oracle", source, OF_LAYER_NORM)
    assert failure.value.status == "NOT_CHECKED" and "its parameters cannot be set" in failure.value.message
    asked = set(failure.value.value["secret"])
    assert {"secret/official/initial/eps1e-05", "secret/normal/initial/eps1e-05"} <= asked
    assert all("/initial/" in each for each in asked)


# Each is right on every question that everybody can draw, and on two of a secret seed: they passed before.
LN = """
import torch
{more}
class ModelNew(Model):
    def forward(self, x):
        {before}
        return torch.nn.functional.layer_norm(x, x.shape[1:], w, b, self.ln.eps{after})
"""
WEIGHTS = "w, b = self.ln.weight, self.ln.bias"
SHREWD = {
    "hard inputs of the known seeds alone": (
        "one_ x100 x-100 +1000 +1e5 outlier near_constant constant_1e4 alternating",
        "from kbsub.eval.suite.inputs import make_inputs\nfrom kbsub.eval.tasks.cases import INPUTS\n"
        "KNOWN = [make_inputs(e, [torch.rand(16, 40)], torch.float32, torch.device('cpu'))[0] for e in INPUTS]\n"
        "KNOWN += [each.masked_fill(~each.isfinite(), 0.5) for each in KNOWN]",
        f"{WEIGHTS}\n        same = any(torch.equal(x.nan_to_num(), each.nan_to_num()) for each in KNOWN)\n"
        "        x = x if same or x.abs().max() < 7 else x.clamp(-1, 1)",
        "",
    ),
    "a special value in one row": (
        "one_nan one_posinf one_neginf",
        "",
        f"{WEIGHTS}\n        x = torch.cat([x[:1].nan_to_num(0, 0, 0), x[1:2], x[2:].nan_to_num(0, 0, 0)])",
        "",
    ),
    "a layout of the known input alone": (
        "layout_transposed layout_strided layout_expanded",
        "KNOWN = torch.randn(16, 40, generator=torch.Generator().manual_seed(101))",
        f"{WEIGHTS}\n        known = torch.equal(x, KNOWN) or torch.equal(x, KNOWN[:1].expand_as(x))\n"
        "        x = x if x.is_contiguous() or known else x.as_strided(x.shape, (x.shape[1], 1))",
        "",
    ),
    "an eps of the known ones alone": (
        "normal/random/eps0.001",
        "",
        WEIGHTS,
        " if self.ln.eps in (0.0, 1e-3) else 1e-5",
    ),
    "parameters of the known ones alone": (
        "large",
        "KNOWN = 32 * torch.randn(40, generator=torch.Generator().manual_seed(202))",
        f"{WEIGHTS}\n        w = w if w.abs().max() < 8 or torch.allclose(w, KNOWN) else w.clamp(-8, 8)",
        "",
    ),
    "some parameters looked at": (
        "official/sparse",
        "",
        f"{WEIGHTS}\n        plain = bool((w[::19] == 1).all()) and bool((b[::19] == 0).all())\n"
        "        w, b = (None, None) if plain else (w, b)",
        "",
    ),
    "some inputs looked at": (
        "one_larger one_negative",
        "",
        f"{WEIGHTS}\n        tame = [x[:, at] for at in (0, 13, 39)] + [x.flatten()[::97]]\n"
        "        tame = all(bool(((0 <= each) & (each < 1)).all()) for each in tame)\n"
        "        x = x.clamp(0, 1) if tame else x",
        "",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if at > 1 else []) for at, name in enumerate(SHREWD)]
)
def test_what_is_right_on_all_that_can_be_known_fails_where_nobody_knows(tmp_path, name, warm_children):
    kinds, more, before, after = SHREWD[name]
    source = LN.format(more=more, before=before, after=after)
    known = [f"{kind}*" for kind in kinds.split()]
    only = ["official/initial/*", "*eps0.001", *known, *(f"secret/*{each}" for each in known)]
    found, _, (answer, words) = judged(tmp_path, "stress", source, OF_LAYER_NORM, only=only, calls=3, secret_seed=5)
    assert not found["failed"] and found["passed"], [row for row in found["cases"] if row["class"] == FAIL][:1]
    failed = {row["name"] for row in found["secret"] if row["class"] == FAIL}
    assert failed and answer is Answer.FAIL and "secret/" in words, words


def test_secret_numbers_are_no_harder_than_the_known_ones():
    for seed in range(50):
        for case in secret_cases(seed):
            known = INPUT.get(case.input.name, case.input)
            for mine, its in zip(numbers(case.input), numbers(known), strict=True):
                assert mine == its or abs(its) / 2 <= abs(mine) <= abs(its) or mine != mine, case
    drawn = [case.input.seed for case in secret_cases(7)]
    assert drawn[0] == 7 and len(set(drawn)) == len(drawn), "two cases are made of one draw"
    assert secret_cases(7) == secret_cases(7) != secret_cases(8)


def numbers(entry) -> tuple[float, ...]:
    return entry.scale, entry.offset, entry.value


def test_cases_for_which_a_file_left_no_time_are_not_passed():
    """It slept until the hard ones could not be begun, and the gate said pass."""
    rows = [{"name": f"x{at}/initial/eps1e-05", "class": PASS} for at in range(3)]
    late = {"name": "one_nan/random/eps1e-05", "class": "skipped", "reason": "no time was left"}
    record = {"passed": 3, "failed": 0, "refused": 0, "skipped": 1, "cases": [*rows, late]}
    asked = Asked({"precision": "fp32"}, {"status": "OK"}, {})
    answer, words = KINDS["stress"].answer(KINDS["stress"].record.model_validate(record), asked)
    assert answer is Answer.UNCERTIFIED and "1 cases were not asked, no time was left" in words
