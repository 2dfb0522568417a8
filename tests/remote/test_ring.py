"""Batches on a CPU: the order that was asked for, contents of their own, a worker that looks as upstream's process."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from kbsub.adapters.task import load_task
from kbsub.eval.process.cell import Cell
from kbsub.eval.process.isolated import run_isolated
from kbsub.eval.remote.model import Worker, WorkerFailure
from kbsub.eval.remote.ring import CallRing, NotStill
from support.paths import TESTS

SHAPE = (8,)
COUNT = 6
SOURCE = """
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        return x * 2, torch.full((2,), float(self.calls), requires_grad=torch.is_grad_enabled())
"""


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    cell = Cell(tmp_path_factory.mktemp("cells") / "cell")
    with Worker.start(SOURCE, load_task(1, 40, kernelbench=None), cell=cell, timeout_s=120) as worker:
        made = CallRing(worker.construct([SHAPE]), [torch.zeros(3, 8)], COUNT, [96, 8])
        yield made
        made.close()


def test_the_slots_are_called_in_the_order_that_was_asked_for(ring):
    for slot in range(COUNT):
        ring.write(slot, [torch.full((3, 8), float(slot))])
    batch = ring.run([4, 0, 5])
    values = [ring.taken(batch, call)[0] for call in range(3)]
    assert [float(y[0, 0]) for y, _ in values] == [8.0, 0.0, 10.0]
    assert [float(calls[0]) for _, calls in values] == [1.0, 2.0, 3.0]
    assert batch.seconds > 0 and len(batch.at) == 6
    ring.forget(batch)


def test_columns_are_the_slots_themselves(ring):
    ring.columns[0][:, 3] = 7.0
    assert all(float(slot[0].view(-1)[3]) == 7.0 for slot in ring.slots)


def test_a_worker_that_did_not_stand_still_is_asked_nothing_where_that_is_wanted(ring, monkeypatch):
    monkeypatch.setattr("kbsub.eval.remote.ring.stood_still", lambda pid, before: False)
    monkeypatch.setattr(ring, "_ask", lambda *words, **more: pytest.fail("it was asked"))
    assert ring.hold()
    with pytest.raises(NotStill):
        ring.run([0], only_still=True)
    assert not ring._held


def test_a_held_worker_begins_when_the_clock_runs(ring):
    order = []
    assert ring.hold()
    batch = ring.run([1], last=lambda: order.append("last"))
    assert order == ["last"] and not ring._held and len(batch.values) == 1
    ring.forget(batch)


NONSENSE = {  # what its frames are made to say: the words of the failure
    "an address that is no number": ('{"at": ["x"]}', "is str, not int"),
    "a pickle": ('{"at": [], "pickle": "gASVBwAAAAAAAABLAS4="}', "a key too many"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NONSENSE)
def test_a_reply_that_is_none_ends_the_worker(name, tmp_path):
    told, words = NONSENSE[name]
    source = SOURCE.replace(
        "self.calls += 1", f"import gc, json\n        for s in gc.get_objects():\n"
        f"            if type(s).__name__ == 'Session': type(s).batch = lambda *a: json.loads({told!r})\n"
        "        self.calls += 1"
    )  # fmt: skip
    task = load_task(1, 40, kernelbench=None)
    with Worker.start(source, task, cell=Cell(tmp_path / "cell"), timeout_s=120) as worker:
        made = CallRing(worker.construct([SHAPE]), [torch.zeros(3, 8)], COUNT, [96, 8])
        made.run([0])
        with pytest.raises(WorkerFailure, match=words):
            made.run([0])


# ---- likeness ----

ON_A_CPU = ("kbsub.eval.verdicts.official.cpu_check", "kbsub.eval.tasks", "kbsub.eval.operators")

LOOKS = """
import json, os, sys
looked = {
    "modules": sorted(name for name in sys.modules if name.split(".")[0] in ("kbsub", "kernelbench", "__main__")),
    "main": sorted(name for name in vars(sys.modules["__main__"]) if not name.startswith("__")),
    "file": sys.modules["__main__"].__file__,
    "argv": [sys.argv[0], len(sys.argv)],
    "environment": sorted(os.environ.items()),
}
with open(os.path.join(os.environ["HOME"], "%s" % os.environ.get("seen", "seen")), "a") as file:
    file.write(json.dumps(looked) + "\\n")
import torch
class ModelNew(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.ln = torch.nn.LayerNorm(shape)
    def forward(self, x):
        return self.ln(x)
"""


@pytest.mark.slow
def test_a_refereed_candidate_sees_what_it_sees_under_the_official_judge(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    task = TESTS / "support" / "small_layer_norm_task" / "reference.py"
    payload = {"candidate_source": LOOKS, "task": str(task), "precision": "fp32", "kernelbench": None}
    payload |= {"device": "cpu", "host_executor": False, "full": True, "timeout_s": 100.0}
    cell = Cell(tmp_path / hashlib.sha256(LOOKS.encode()).hexdigest())
    official = run_isolated("kbsub.eval.verdicts.official.judge:judge", payload, timeout_s=120, cell=cell)
    assert official.value is not None, official.message
    from kbsub.adapters.task import load_local_task

    like = {"modules": ["kbsub.eval.verdicts.official.judge"], "kernelbench": None}
    with Worker.start(LOOKS, load_local_task(task), cell=cell, timeout_s=120, like=like):
        pass
    first, second = map(json.loads, (cell.cache / "home" / "seen").read_text().splitlines())
    # The local check of a CPU imports more than upstream's evaluation, and names another build folder.
    assert {name for name in first["modules"] if not name.startswith(ON_A_CPU)} == set(second["modules"])
    for looked in (first, second):
        looked["environment"] = [pair for pair in looked["environment"] if pair[0] != "TORCH_EXTENSIONS_DIR"]
        del looked["modules"]
    assert second == first
