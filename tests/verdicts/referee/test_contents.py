"""What the slots hold: contents of their own, made again from their seed, changed once more before the clock starts."""

from __future__ import annotations

import hashlib

import pytest
import torch

from kbsub.adapters.task import Task
from kbsub.eval.verdicts.referee.contents import NUDGE_STRIDE, Contents
from kbsub.eval.verdicts.referee.rounds import of_itself

MODEL = """
import itertools
import torch
import numpy as np
class Model(torch.nn.Module):
    def forward(self, x, *rest):
        return x {answer}
count = itertools.count()
def get_inputs():
    return {inputs}
def get_init_inputs():
    return []
"""


def contents(inputs: str, answer: str = "* 2.0") -> Contents:
    source = MODEL.format(inputs=inputs, answer=answer)
    task = Task(0, 0, "drawn.py", source, hashlib.sha256(source.encode()).hexdigest(), "local")
    return Contents(task, task.modules(), torch.device("cpu"))


# get_inputs: whether it can be drawn again from a seed
DRAWN = {
    "[torch.rand(300, 100)]": True,
    "[torch.randn(4, 8, device='cpu'), 3]": True,
    "[torch.from_numpy(np.random.rand(40, 8).astype('float32'))]": True,
    "[torch.rand(40, 8) + next(count)]": False,
}


@pytest.mark.parametrize("inputs", DRAWN)
def test_a_seed_gives_its_content_again_and_another_seed_another(inputs):
    made = contents(inputs)
    assert ("draws" not in made.way) == DRAWN[inputs]
    first, again, other = made.draw(7), made.draw(7), made.draw(8)
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert first[0].data_ptr() != again[0].data_ptr()


def test_a_nudge_changes_one_element_of_every_stretch_and_can_be_made_again():
    made = contents("[torch.rand(300, 100)]")
    nudge = made.nudge()
    rows = torch.stack([made.draw(1)[0].view(-1), made.draw(2)[0].view(-1)])
    nudge.apply([rows])
    changed = (rows[0] != made.draw(1)[0].view(-1)).nonzero().view(-1).tolist()
    stride = min(NUDGE_STRIDE, 300 * 100 // 64)
    assert len(changed) == 300 * 100 // stride >= 64 and [at // stride for at in changed] == list(range(len(changed)))
    assert len({at % stride for at in changed}) > 10, "the places follow from one another"
    assert torch.equal(made.nudged(2, nudge)[0].view(-1), rows[1])


def test_a_symmetric_matrix_stays_symmetric():
    made = contents("[(lambda a: a + a.T)(torch.rand(40, 40))]")
    found = made.nudged(3, made.nudge())[0]
    assert torch.equal(found, found.T)


def test_contents_are_scaled_where_answers_to_two_draws_would_pass_for_each_other():
    made = contents("[torch.rand(1 << 22)]", answer=".mean()")
    model = made.modules.Model()
    assert of_itself(model, made, 1e-2)[2] is False
    made.scaled = True
    assert of_itself(model, made, 1e-2)[2] is True
    assert float(made.draw(5)[0].min()) >= 0 and float(made.draw(5)[0].max()) < 1
    assert torch.equal(made.draw(5)[0], made.draw(5)[0])


def test_every_tensor_of_an_answer_must_tell_draws_apart():
    inputs = "[torch.rand(1 << 16)]"
    apart = {
        ", x + 1.0": True,  # (x, x + 1)
        ", torch.softmax(x, 0)": False,  # zeros would pass for it
        ", torch.ones(3)": True,  # the same whatever is drawn
        ", (x * 2, x.mean() * 1e-6)": False,
    }
    for answer, expected in apart.items():
        made = contents(inputs, answer=answer)
        assert of_itself(made.modules.Model(), made, 1e-4)[2] is expected, answer


def test_what_is_mixed_from_a_few_draws_has_no_few_values_an_element():
    made = contents("[torch.rand(40, 8) + next(count)]")
    at_one_place = {float(made.draw(seed)[0][3, 4]) for seed in range(20)}
    assert len(at_one_place) == 20
