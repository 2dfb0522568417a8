"""What a task folder says of the calls it can be asked with: [[grid]], cases, benchmarks, the task's own program."""

from __future__ import annotations

import pytest

from kbsub.adapters.task import load_local_task
from kbsub.eval.tasks.grid import GridShape, folder_shapes, named, own_shape, to_json
from kbsub.eval.tasks.task_file import read_task_file, task_text
from kbsub.eval.tasks.toml_file import TaskFolderError

ROWS = {"inputs": [["rows", "width"], ["rows", 3, "width"]], "init": [["width"], "width", 5, ["width", 2]]}


def test_both_words_stand_for_their_numbers():
    shape = GridShape.model_validate(ROWS).at(7, 40)
    assert shape.name == "7x40" and shape.inputs == ((7, 40), (7, 3, 40)) and shape.init == ((40,), 40, 5, (40, 2))
    assert named(**to_json(shape)) == shape


@pytest.mark.parametrize("inputs", ['[["width", "rows"]]', '[["rows", 5]]', "[[]]", "[]", '[["rows", "height"]]'])
def test_a_grid_that_makes_no_calls_is_refused_with_its_file(tmp_path, inputs):
    (tmp_path / "task.toml").write_text(f"[[grid]]\ninputs = {inputs}\n")
    with pytest.raises(TaskFolderError, match=r"task\.toml: grid\.0\.inputs"):
        read_task_file(tmp_path)


def test_a_folder_knows_its_grid_its_cases_and_its_benchmarks_each_shape_once(tmp_path):
    (tmp_path / "task.toml").write_text('[[grid]]\ninputs = [["rows", "width", 2]]\ninit = ["width"]\n')
    (tmp_path / "cases.toml").write_text(
        '[[shape]]\nname = "a"\ninputs = [[3, 4, 2]]\ninit = [4]\n'
        '\n[[shape]]\nname = "none"\ninputs = [[0, 4]]\ninit = [4]\n'
        '\n[[case]]\nname = "own"\n'
    )
    (tmp_path / "bench.toml").write_text("[[shapes]]\ninputs = [[5, 6]]\ninit = [[6]]\nseed = 1\n")
    found = folder_shapes(tmp_path, read_task_file(tmp_path).grid, [(1, 8), (3, 4)])
    assert [(each.inputs, each.init) for each in found] == [
        (((1, 8, 2),), (8,)),
        (((3, 4, 2),), (4,)),
        (((5, 6),), ((6,),)),
    ]


PROGRAM = """
import torch
class Model(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
def get_inputs():
    return [{x}]
def get_init_inputs():
    return [9]
"""


@pytest.mark.parametrize(
    ("x", "inputs"),
    [
        ("torch.rand(1 << 30, 9)", ((1 << 30, 9),)),  # without contents: 39 GB else
        ("torch.from_numpy(torch.rand(3, 9, device='cpu').numpy())", ((3, 9),)),  # needs its values
        ("torch.zeros(3, 9, dtype=torch.int64)", None),
    ],
)
def test_the_programs_own_shape_is_read_off_it(tmp_path, x, inputs):
    (tmp_path / "reference.py").write_text(PROGRAM.format(x=x))
    (tmp_path / "task.toml").write_text('reference = "reference.py"\n')
    shape = own_shape(load_local_task(tmp_path / "reference.py"))
    assert (shape and shape.inputs) == inputs and (shape is None or shape.init == (9,))
    assert task_text(tmp_path) == f"local:{tmp_path / 'reference.py'}"
