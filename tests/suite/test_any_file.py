"""A candidate is judged by what its tensors are, whatever it calls them, and by the state that a call leaves."""

from __future__ import annotations

import pytest

from kbsub.eval.suite.judge import judge_many
from kbsub.eval.suite.matching import BY_KEY, BY_ORDER, BY_SHAPE, BY_SUFFIX, BY_VALUE, Form, match_state
from kbsub.eval.suite.records import no_verdict
from kbsub.eval.tasks.cases import FAIL, OFFICIAL_CASE, SKIPPED

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = """
import torch
class Model(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(shape)
    def forward(self, x):
        return self.ln(x)
def get_inputs():
    return [torch.rand(4, 6, 8)]
def get_init_inputs():
    return [(6, 8)]
"""

# parameters as a file may name them -> (constructor, gamma, beta, eps)
NAMINGS = {
    "weight and bias": (
        "self.weight = P(torch.ones(shape)); self.bias = P(torch.zeros(shape)); self.eps = 1e-5",
        "self.weight",
        "self.bias",
        "self.eps",
    ),
    "gamma and beta, beta first": (
        "self.beta = P(torch.zeros(shape)); self.gamma = P(torch.ones(shape)); self.epsilon = 1e-5",
        "self.gamma",
        "self.beta",
        "self.epsilon",
    ),
    "flat, in a list": (
        "self.p = torch.nn.ParameterList([P(torch.ones(1, *shape)), P(torch.zeros(1, *shape))]); self.small = 1e-5",
        "self.p[0]",
        "self.p[1]",
        "self.small",
    ),
    "the reference's own": (
        "self.ln = torch.nn.LayerNorm(shape)",
        "self.ln.weight",
        "self.ln.bias",
        "self.ln.eps",
    ),
}
BODY = """
import torch
P = torch.nn.Parameter
class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        {init}
    def forward(self, x):
        mean = x.mean((1, 2), keepdim=True)
        {variance}
        return (x - mean) / torch.sqrt(variance + {eps}) * {gamma} + {beta}
"""
TWO_PASS = "variance = ((x - mean) ** 2).mean((1, 2), keepdim=True)"
ONE_PASS = "variance = (x * x).mean((1, 2), keepdim=True) - mean * mean"
CASES = ["+1000/random/*", "normal/random/*", "+1e5/initial/eps1e-05", OFFICIAL_CASE, "state/*", "run_twice/*"]


def judged(folder, task, candidates, only=(), **more):
    """{stem: stress record} of candidate sources by stem, in one run."""
    (folder / "task.py").write_text(task)
    payload = {
        "task": str(folder / "task.py"),
        "precision": "fp32",
        "kernelbench": None,
        "device": "cpu",
        "candidates": [{"stem": stem, "candidate_source": source} for stem, source in candidates.items()],
        "only": list(only),
        "calls": 5,
        **more,
    }
    found = judge_many(payload, lambda event: None)
    assert not found["failed"], found["failed"]
    return found["stress"]


def classes(record):
    return {row["name"]: row["class"] for row in record["cases"]}


def test_a_textbook_layer_norm_is_judged_under_every_naming(tmp_path):
    sources = {}
    for name, (init, gamma, beta, eps) in NAMINGS.items():
        for words, variance in (("right", TWO_PASS), ("wrong", ONE_PASS)):
            sources[f"{name}: {words}"] = BODY.format(init=init, gamma=gamma, beta=beta, eps=eps, variance=variance)
    found = judged(tmp_path, TASK, sources, CASES)
    how = {}
    for name in NAMINGS:
        right, wrong = found[f"{name}: right"], found[f"{name}: wrong"]
        assert not right["failed"] and not right["skipped"], (name, right["cases"])
        assert right["passed"] + right["nearer_than_reference"] + right["apart"] == len(right["cases"]) >= 9, name
        failed = [case for case, each in classes(wrong).items() if each == FAIL]
        assert {"+1000/random/eps1e-05", "+1000/random/eps0.001"} <= set(failed), (name, failed)
        how[name] = (right["parameters_set"], right["eps_set"])
    assert how == {
        "weight and bias": (BY_SUFFIX, "by its value"),
        "gamma and beta, beta first": (BY_VALUE, "by its value"),
        "flat, in a list": (BY_ORDER, "by its value"),
        "the reference's own": (BY_KEY, "by its name"),
    }


def test_an_eps_of_its_own_costs_only_the_cases_that_change_it(tmp_path):
    init, gamma, beta, _ = NAMINGS["weight and bias"]
    source = BODY.format(
        init=init.replace("self.eps = 1e-5", "pass"), gamma=gamma, beta=beta, eps="1e-5", variance=TWO_PASS
    )
    found = judged(tmp_path, TASK, {"fixed": source}, CASES)["fixed"]
    skipped = [row for row in found["cases"] if row["class"] == SKIPPED]
    assert {row["name"].partition("/eps")[2] for row in skipped} == {"0", "0.001"} and not found["failed"]
    assert (
        all(row["reason"].startswith("its eps cannot be set") for row in skipped) and found["eps_set"] == "not at all"
    )


def test_an_eps_goes_through_the_constructor_s_arguments(tmp_path):
    task = TASK.replace("shape):", "shape, eps):").replace("LayerNorm(shape)", "LayerNorm(shape, eps)")
    task = task.replace("return [(6, 8)]", "return [(6, 8), 1e-5]")
    init, gamma, beta, _ = NAMINGS["weight and bias"]
    init = init.replace("self.eps = 1e-5", "self.hidden = lambda: eps")
    source = BODY.replace("shape):", "shape, eps):").format(
        init=init, gamma=gamma, beta=beta, eps="self.hidden()", variance=TWO_PASS
    )
    found = judged(tmp_path, task, {"one": source}, ["subnormal/random/*"])["one"]
    assert found["passed"] == 3 and found["eps_set"] == "by the constructor's argument", found


def test_where_no_parameter_can_be_set_the_cases_that_set_none_are_asked(tmp_path):
    source = BODY.format(
        init="self.w = P(torch.ones(3)); self.eps = 1e-5", gamma="1.0", beta="0.0", eps="self.eps", variance=TWO_PASS
    )
    found = judged(tmp_path, TASK, {"one": source})["one"]
    rows = classes(found)
    assert rows["+1000/random/eps1e-05"] == SKIPPED and rows["run_twice/normal/random"] == SKIPPED
    asked = [name for name, each in rows.items() if each != SKIPPED]
    assert (
        "+1000/initial/eps1e-05" in asked
        and "run_twice/normal/initial" in asked
        and "layout_strided/normal/initial" in asked
    )
    assert not found["failed"] and found["parameters_set"] == "not at all"
    # More than half of the cases could be asked; that it uses its parameters is not known all the same.
    for stage in ("stress", "oracle"):
        assert "of them: its parameters cannot be set" in no_verdict(stage, found["cases"])


BATCH_NORM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.bn = torch.nn.BatchNorm1d(n)
    def forward(self, x):
        return self.bn(x)
def get_inputs():
    return [torch.rand(16, 8)]
def get_init_inputs():
    return [8]
"""
NORMALISE = "torch.nn.functional.batch_norm(x, {mean}, {var}, self.bn.weight, self.bn.bias, True, 0.1, self.bn.eps)"
STATES = {
    "right": ("self.bn(x)", ""),
    "never updates": (NORMALISE.format(mean="None", var="None"), "is not updated as"),
    "no count": (NORMALISE.format(mean="self.bn.running_mean", var="self.bn.running_var"), "num_batches_tracked"),
    "another momentum": (
        NORMALISE.format(mean="self.bn.running_mean", var="self.bn.running_var").replace("0.1", "0.5"),
        "running_mean is not updated as",
    ),
}


def test_the_state_that_a_call_leaves_is_the_reference_s(tmp_path):
    candidate = BATCH_NORM.partition("def get_inputs")[0].replace("class Model(", "class ModelNew(")
    sources = {name: candidate.replace("self.bn(x)", body) for name, (body, _) in STATES.items()}
    without = candidate.replace("BatchNorm1d(n)", "BatchNorm1d(n, track_running_stats=False)")
    found = judged(tmp_path, BATCH_NORM, {**sources, "keeps none": without}, ["state/*", "normal/random/eps1e-05"])
    for name, words in {
        **{name: each[1] for name, each in STATES.items()},
        "keeps none": "keeps no such state",
    }.items():
        rows = {row["name"]: row for row in found[name]["cases"]}
        assert rows["normal/random/eps1e-05"]["class"] == "pass", name
        assert rows["state/normal/random"]["class"] == (FAIL if words else "pass"), (name, rows)
        assert words in rows["state/normal/random"].get("reason", ""), (name, rows)


# ---- which tensor is which ----


def forms(buffers=(), **shapes):
    """Key -> form, `__` for a dot; an empty shape is of integers."""
    found = {key.replace("__", "."): shape for key, shape in shapes.items()}
    return {key: Form(shape, key not in buffers, whole=shape == ()) for key, shape in found.items()}


P = forms(a__weight=(4, 3), a__bias=(4,), b__weight=(4,), b__bias=(4,))
MATCHES = {
    "by key, in another order": (forms(b__bias=(4,), b__weight=(4,), a__bias=(4,), a__weight=(4, 3)), BY_KEY, None),
    "wrapped": (
        forms(own=(9,), m__b__weight=(4,), m__b__bias=(4,), m__a__weight=(4, 3), m__a__bias=(4,)),
        BY_SUFFIX,
        "m.a.weight m.a.bias m.b.weight m.b.bias",
    ),
    "by order": (forms(w=(4, 3), c=(4,), g=(4,), h=(4,)), BY_ORDER, "w c g h"),
    "with ones": (forms(w=(4, 3, 1), c=(1, 4), g=(4,), h=(4,)), BY_ORDER, "w c g h"),
    "with buffers among them": (
        forms(("m", "v", "n"), n=(), w=(4, 3), c=(4,), m=(4,), v=(4,), g=(4,), h=(4,)),
        BY_ORDER,
        "w c g h",
    ),
    "as buffers": (forms("wcgh", w=(4, 3), c=(4,), g=(4,), h=(4,)), BY_ORDER, "w c g h"),
    "by shape": (forms(c=(4,), g=(4,), w=(4, 3), h=(4,), cache=(9,)), BY_SHAPE, "w c g h"),
    "by shape, with buffers": (forms("x", c=(4,), g=(4,), w=(4, 3), x=(4,), h=(4,)), BY_SHAPE, "w c g h"),
    "wrapped, of another shape": (
        forms(m__a__weight=(4, 3), m__a__bias=(5,), m__b__weight=(4,), m__b__bias=(4,)),
        None,
        None,
    ),
    "one too few": (forms(w=(4, 3), c=(4,), g=(4,)), None, None),
    "transposed": (forms(w=(3, 4), c=(4,), g=(4,), h=(4,)), None, None),
    "an integer is no parameter": (forms(w=(4, 3), c=(4,), g=(4,)) | {"h": Form((4,), True, True)}, None, None),
}


@pytest.mark.parametrize("name", MATCHES)
def test_the_match_of_two_states(name):
    candidate, how, order = MATCHES[name]
    found = match_state(P, candidate)
    assert (found and found.how) == how
    if order is not None:
        assert found.keys == dict(zip(order.split(), P, strict=True))


def test_a_module_that_the_reference_wraps_is_found_without_it():
    mine = forms(bn__weight=(4,), bn__bias=(4,))
    found = match_state(mine, forms(bias=(4,), weight=(4,)))
    assert found.how == BY_SUFFIX and found.keys == {"weight": "bn.weight", "bias": "bn.bias"}
    found = match_state(mine, forms(net__norm__bias=(4,), net__norm__weight=(4,)))
    assert found.keys == {"net.norm.weight": "bn.weight", "net.norm.bias": "bn.bias"}


def test_of_two_that_a_key_could_mean_the_initial_value_decides_or_none_is_taken():
    two = forms(one__bn__weight=(4,), one__bn__bias=(4,), two__bn__weight=(4,), two__bn__bias=(4,))
    mine = forms(bn__weight=(4,), bn__bias=(4,))
    assert match_state(mine, two) is None
    found = match_state(mine, two, lambda mine, its: its.startswith("two"))
    assert found.how == BY_SUFFIX and set(found.keys) == {"two.bn.weight", "two.bn.bias"}


def test_initial_values_decide_where_shapes_do_not():
    ones = {"b.weight", "g"}
    found = match_state(P, forms(w=(4, 3), c=(4,), h=(4,), g=(4,)), lambda mine, its: (mine in ones) == (its in ones))
    assert found.how == BY_VALUE and found.keys["g"] == "b.weight" and found.keys["w"] == "a.weight"


def test_values_that_agree_decide_though_others_do_not():
    """A bias that is drawn otherwise than the reference's does not hide which is gamma and which is beta."""
    mine = {"c": "a.bias", "h": "b.bias", "g": "b.weight"}
    found = match_state(P, forms(w=(4, 3), c=(4,), h=(4,), g=(4,)), lambda one, its: its in "hg" and mine[its] == one)
    assert found.how == BY_VALUE and found.keys == {"w": "a.weight"} | mine


BUFFERS = ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked")
NORM = forms(
    BUFFERS,
    bn__weight=(4,),
    bn__bias=(4,),
    bn__running_mean=(4,),
    bn__running_var=(4,),
    bn__num_batches_tracked=(),
)


def test_buffers_are_matched_by_their_last_name_and_said_where_they_lack():
    found = match_state(NORM, forms(bn__weight=(4,), bn__bias=(4,), running_var=(4,)))
    assert found.keys["running_var"] == "bn.running_var"
    assert found.lacking == ("bn.running_mean", "bn.num_batches_tracked")
    assert match_state({}, {"cache": Form((3,), False)}).keys == {}


def test_buffers_of_other_names_are_matched_by_form_and_value():
    named = {"v": "bn.running_var", "m": "bn.running_mean", "n": "bn.num_batches_tracked"}
    candidate = forms(tuple(named), n=(), g=(4,), b=(4,), v=(4,), m=(4,))
    found = match_state(NORM, candidate, lambda mine, its: named.get(its, mine) == mine)
    assert found.keys == {"g": "bn.weight", "b": "bn.bias"} | named and not found.lacking
    in_order = match_state(NORM, candidate)
    assert in_order.keys["v"] == "bn.running_mean" and not in_order.lacking


def test_buffers_of_two_norms_are_matched_in_their_order():
    twice = {f"{name}.{key}": form for name in "pq" for key, form in NORM.items()}
    renamed = {key.replace("bn.", "norm.") if key[0] == "q" else "x" + key: form for key, form in twice.items()}
    found = match_state(twice, renamed)
    assert found.how == BY_ORDER and found.keys == dict(zip(renamed, twice, strict=True)) and not found.lacking


# ---- tasks of other forms ----

FORMS = {
    "a tuple": ("return x + 1, x.sum(1)", "return x + 1, x.sum(0)", "return [torch.rand(4, 4)]"),
    "integers": ("return x.argmax(1)", "return x.argmin(1)", "return [torch.rand(4, 8)]"),
    "several inputs": ("return x * y", "return x / y", "return [torch.rand(4, 4), torch.rand(4, 4)]"),
    "a number among them": ("return x * y", "return x * 2", "return [torch.rand(4, 4), 3]"),
    "no input": ("return torch.arange(4.0)", "return torch.arange(4.0) + 1", "return []"),
    "random": (
        "return torch.nn.functional.dropout(x, 0.5)",
        "return torch.nn.functional.dropout(x, 0.4)",
        "return [torch.rand(8, 8)]",
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_tasks_of_other_forms(tmp_path, name):
    body, wrong, draws = FORMS[name]
    arguments = {"several inputs": "x, y", "a number among them": "x, y", "no input": ""}.get(name, "x")
    model = "import torch\nclass {}(torch.nn.Module):\n    def forward(self, {}):\n        {}\n"
    rest = f"def get_inputs():\n    {draws}\ndef get_init_inputs():\n    return []\n"
    sources = {"right": model.format("ModelNew", arguments, body), "wrong": model.format("ModelNew", arguments, wrong)}
    found = judged(tmp_path, model.format("Model", arguments, body) + rest, sources)
    right = found["right"]
    ran = [row for row in right["cases"] if row["class"] != SKIPPED]
    assert ran and not right["failed"], [row for row in right["cases"] if row["class"] == FAIL]
    assert len(ran) >= len(right["cases"]) / 2, [row for row in right["cases"] if row["class"] == SKIPPED]
    assert classes(found["wrong"])[OFFICIAL_CASE] == FAIL
    assert right["left_out"]["the task's model has no eps"] > 50
