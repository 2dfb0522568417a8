"""What the suite's checks do with a baseline, with parameters of other names, with a changed input, and with memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kbsub.eval.suite import checks
from kbsub.eval.suite.judge import judge_many
from kbsub.eval.suite.models import Workshop, entrant, task_cases
from kbsub.eval.tasks.cases import Parameters, suite
from support.sizes import SMALL_LEVEL1_40, SMALL_TASK

pytestmark = pytest.mark.usefixtures("warm_children")

TASK = SMALL_TASK
CPU = torch.device("cpu")
MEGABYTES = 300  # of a candidate that keeps much
CANDIDATE = """
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.ln = torch.nn.Module()  # with an eps to set, and no parameter of the reference's name
        self.ln.eps = 1e-5
        self.scale = torch.nn.Parameter(torch.ones(shape))
        self.shift = torch.nn.Parameter(torch.zeros(shape))
        {more}
    def forward(self, x):
        {first}
        n = self.scale.dim()
        y = torch.nn.functional.layer_norm(x, x.shape[x.dim() - n:], self.scale, self.shift, self.ln.eps)
        return y {last}
"""


def source(more: str = "pass", first: str = "pass", last: str = "") -> str:
    return CANDIDATE.format(more=more, first=first, last=last)


# ---- baselines, in the judge's process ----


class Stale(torch.nn.Module):
    """Reads its parameters and its input once."""

    def __init__(self, reference: torch.nn.Module) -> None:
        super().__init__()
        self.linear, self.first = reference, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first = self.linear(x) if self.first is None else self.first
        return self.first


def scene(model: torch.nn.Module, reference: torch.nn.Module) -> checks.Scene:
    x = torch.rand(3, 4)
    with torch.no_grad():
        expected = reference(x)
    return checks.Scene(reference, model, [x], expected, expected, strict=False)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> torch.nn.Module:
    monkeypatch.setattr(checks, "_need_cuda", lambda scene: None)
    return torch.nn.Linear(4, 4).requires_grad_(False)


def test_a_baseline_is_asked_after_a_mutation_in_place_and_the_reference_stays(reference: torch.nn.Module) -> None:
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    assert checks.graph_mutation(scene(reference, reference)) is None
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
    problem = checks.graph_mutation(scene(Stale(reference), reference))
    assert problem is not None and problem.startswith("replayed after inputs"), problem


def test_parameters_are_changed_before_a_baseline_is_replayed(reference: torch.nn.Module) -> None:
    """A baseline that froze the parameters gives another answer than the reference with changed ones."""
    weight, bias = reference.weight.clone(), reference.bias.clone()
    frozen = torch.nn.Linear(4, 4).requires_grad_(False)
    frozen.load_state_dict(reference.state_dict())
    frozen.forward = lambda x: torch.nn.functional.linear(x, weight, bias)
    assert checks.graph_mutation(scene(frozen, reference)) is not None


def test_a_baseline_is_asked_on_a_side_stream(reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        checks, "behind_slow_work", lambda model, inputs, side: (seen.append(side), (model(*inputs) + 1, None))[1]
    )
    problem = checks.side_stream(scene(reference, reference))
    assert seen == [True] and problem is not None and "on a side stream" in problem


# ---- a row alone ----


class ByBatch(torch.nn.Module):
    """x / sum(x), each row's sum taken from its other end where there are several: as an order of sums that depends on
    how many rows there are. off: what is added to the answer of a row alone."""

    def __init__(self, falls: bool = True, off: float = 0.0) -> None:
        super().__init__()
        self.falls, self.off = falls, off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.new_zeros(x.shape[0])
        for column in x.T.flip(0) if self.falls and len(x) > 1 else x.T:
            total = total + column
        return x / total[:, None] + (self.off if len(x) == 1 else 0.0)


@pytest.mark.parametrize(
    ("strict", "reference", "model", "says"),
    [
        (True, ByBatch(), ByBatch(), "skipped"),
        (True, ByBatch(), ByBatch(falls=False), "skipped"),
        (True, ByBatch(), ByBatch(off=0.01), "differs"),  # beyond the tolerance: a fault all the same
        (True, ByBatch(falls=False), ByBatch(falls=False), None),
        (True, ByBatch(falls=False), ByBatch(), "not bit-identical"),
        (False, ByBatch(), ByBatch(), None),
        (False, ByBatch(), ByBatch(off=0.01), "differs"),
    ],
)
def test_a_row_alone_keeps_its_bits_where_the_references_own_does(strict, reference, model, says) -> None:
    x = torch.rand(4, 1000, generator=torch.Generator().manual_seed(1))
    asked = checks.Scene(reference, model, [x], reference(x), model(x), strict=strict)
    if says == "skipped":
        with pytest.raises(checks.NotApplicable, match=r"row .* alone has other bits than .* of 4 in the reference"):
            checks.row_alone(asked)
        return
    problem = checks.row_alone(asked)
    assert problem is None if says is None else problem is not None and says in problem, problem


# ---- a candidate in its worker ----


def test_parameters_of_other_names_are_misaligned_where_they_are_the_initial_ones() -> None:
    told = "return x * float(self.scale.data_ptr() % 16 == 0)"
    who = entrant({"stem": "mine", "candidate_source": source(first=told)}, TASK, CPU)
    try:
        shop = Workshop(TASK, CPU)
        case = next(each for each in suite(task_cases(TASK)) if each.layout == "misaligned_parameters")
        case = replace(case, parameters=Parameters("initial", "initial", 0))
        answers = {}
        for layout in ("contiguous", case.layout):
            asked = replace(case, layout=layout)
            model = shop.build(who, shop.reference(asked), asked)
            answers[layout] = bool(model(torch.ones(shop.inputs(asked)[0].shape)).any())
        assert answers == {"contiguous": True, case.layout: False}
    finally:
        who.confined.close()


@pytest.fixture(scope="module")
def records() -> dict:
    candidates = {
        "mutates": source(first="x.add_(1)"),
        "keeps_much": source(more=f"self.much = torch.ones({MEGABYTES << 18})"),
    }
    payload = {"task": "level1_40", "precision": "fp32", "kernelbench": None, "device": "cpu"}
    payload["size"] = SMALL_LEVEL1_40
    entries = [{"stem": stem, "candidate_source": text} for stem, text in candidates.items()]
    found = judge_many({**payload, "candidates": entries, "only": ["normal/initial/eps1e-05"]}, lambda event: None)
    assert not found["failed"], found["failed"]
    return found["stress"]


def test_a_row_of_a_changed_input_keeps_how_far_the_answer_was(records: dict) -> None:
    (row,) = records["mutates"]["cases"]
    assert (row["class"], row["reason"]) == ("fail", "changed its input 0")
    assert row["native"]["allclose"] and row["oracle"]["candidate_allclose"], row


def test_the_memory_of_the_candidates_process_is_said_of_it(records: dict) -> None:
    much, little = (records[stem]["peak_extra_bytes_of"] for stem in ("keeps_much", "mutates"))
    assert much["candidate"] > (MEGABYTES << 20) > little["candidate"] >= 0
    assert much["shared"] > 0 and "judge" not in much, "on a CPU nobody measures the judge"
