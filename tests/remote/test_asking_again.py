"""What a judge can ask of a worker beyond one answer: an output again, the same tensors, memory that is not fresh."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kbsub.adapters.task import load_task
from kbsub.eval.process.cell import Cell
from kbsub.eval.remote.model import RemoteModel, Worker
from kbsub.eval.remote.probes import Poison
from kbsub.eval.remote.values import ValueProblem

ROWS, WIDTH = 3, 64
MEGABYTES = 200
CANDIDATE = f"""
import torch

class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(shape))
        self.tied = self.scale
        self.objects, self.buffer = [], torch.zeros({ROWS}, {WIDTH})

    def forward(self, x):
        return x * self.scale

    def alias(self, x):
        return x[1:]

    def ring(self, x):
        return self.buffer.copy_(x)

    def which(self, x):
        known = [each for each, _ in self.objects]
        found = next((i for i, each in enumerate(known) if each is x), len(known))
        moved = found < len(known) and self.objects[found][1] != x._version
        if found == len(known):
            self.objects.append((x, x._version))
        self.objects[found] = (x, x._version)
        return torch.tensor([float(found), float(moved)])

    def unwritten(self, x):
        return torch.empty_like(x)

    def moves(self, x):
        self.scale.data.mul_(2)
        return x

    def hog(self, x):
        return torch.ones({MEGABYTES << 18}).sum().reshape(1) + x.sum() * 0
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory):
    cell = Cell(Path(tmp_path_factory.mktemp("cells")) / "cell")
    with Worker.start(CANDIDATE, load_task(1, 40, kernelbench=None), cell=cell, timeout_s=120) as started:
        yield started


@pytest.fixture
def model(worker: Worker):
    made = worker.construct([(WIDTH,)])
    yield made
    made.drop()


def x(value: float) -> torch.Tensor:
    return torch.full((ROWS, WIDTH), float(value))


@pytest.mark.parametrize(
    ("method", "again"),
    [(None, 2.0), ("alias", 5.0), ("ring", 3.0)],
    ids=["own memory", "the input's", "a later call's"],
)
def test_an_output_is_read_again_as_it_is_then(model: RemoteModel, method: str | None, again: float) -> None:
    """First the input's memory gets other contents; for a ring a second call writes the memory of the first output."""
    first = model.call([x(2)], method=method, keep=1)
    if method == "ring":
        model.call([x(3)], method=method, keep=2)
    assert bool((first.value == 2).all()) and first.tensors[0].aliases_input is (method == "alias")
    assert bool((model.read(1, [x(5)]).value == again).all())


def test_an_output_is_not_read_again_behind_inputs_of_another_form(model: RemoteModel) -> None:
    model.call([x(2)], keep=1)
    with pytest.raises(ValueProblem, match="must have the shapes"):
        model.read(1, [torch.ones(2)])


def test_the_same_tensors_come_again_where_it_is_said(model: RemoteModel) -> None:
    """(the number of the tensor object, whether its version has moved since)."""
    asked = [{}, {}, {"same": True}, {"same": True}, {"same": True, "touch": True}, {"same": True}, {}]
    held = x(0)
    told = [tuple(model.call([held.add_(1)], method="which", **words).value.tolist()) for words in asked]
    assert told == [(0, 0), (1, 0), (2, 0), (2, 0), (2, 1), (2, 0), (3, 0)]


def test_memory_that_is_not_fresh_shows_what_is_not_written(model: RemoteModel) -> None:
    form = {"shape": (ROWS, WIDTH), "dtype": torch.float32, "blocks": 8}
    spoiled = model.call([x(1)], method="unwritten", poison=Poison(**form, everywhere=True)).value
    assert bool(spoiled.isnan().all())
    assert bool((model.call([x(1)], poison=Poison(**form, everywhere=True)).value == 1).all())


def test_bound_parameters_that_change_are_seen_in_the_judges_memory(model: RemoteModel) -> None:
    """Tied ones too: one parameter under two names."""
    model.load_state({"scale": torch.full((WIDTH,), 3.0), "tied": torch.full((WIDTH,), 3.0)}, bind=True)
    assert bool((model(x(1)) == 3).all()) and not model.bound_state_changed()
    model.call([x(1)], method="moves")
    assert model.bound_state_changed()


def test_the_most_memory_that_a_process_took_is_its_own_word(worker: Worker, model: RemoteModel) -> None:
    before = worker.peak_bytes()
    model.call([x(1)], method="hog")
    assert worker.peak_bytes() > max(before, MEGABYTES << 20)
    assert worker.shared_bytes >= ROWS * WIDTH * 4
