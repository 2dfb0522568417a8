"""`kbsub bench` runs its programs in a cell: what they can write, and what the stored run says. A real child."""

from __future__ import annotations

from pathlib import Path

import pytest

from kbsub.adapters.task import load_local_task
from kbsub.eval.bench.parent import run_bench
from kbsub.eval.bench.plan import BenchPlan, CandidateFile, SceneSpec
from kbsub.eval.bench.record import store
from kbsub.eval.bench.timing import TimingProtocol
from kbsub.eval.process.cell import candidate_folder, probe
from kbsub.eval.results.model import read_result
from kbsub.eval.tasks.cell import cell_of
from support.small_reference import REFERENCE

EDITS = """
import torch
for victim in {victims!r}:
    try:
        open(victim, "a").write("changed")
    except OSError:
        pass
class ModelNew(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.ln = torch.nn.LayerNorm(n)
    def forward(self, x):
        return self.ln(x)
"""


def test_a_timed_candidate_writes_nothing_outside_and_the_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a neighbour's file nor the cache of a candidate that is timed without it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "reference.py").write_text(REFERENCE)
    victims = [tmp_path / "neighbour.py", candidate_folder("0" * 64) / "victim"]
    for victim in victims:
        victim.write_text("honest")
    file = CandidateFile("edits", EDITS.format(victims=[str(each) for each in victims]), "tolerance", ("fp32",))
    plan = BenchPlan(
        task=f"local:{tmp_path / 'reference.py'}",
        kernelbench=None,
        device="cpu",
        candidates={"edits": file},
        scenes=[SceneSpec("official", "fp32", None, None, ["edits"], [])],
        methods=["graph_replay"],
        protocol=TimingProtocol(rounds=2),
        budget_s=100.0,
    )
    record = run_bench(plan)
    assert record.rows(plan.scenes[0])["edits"]["status"] == "OK", record.notes
    assert record.confined == probe().record()
    store(tmp_path / "out.json", record, load_local_task(tmp_path / "reference.py"))
    stored = read_result(tmp_path / "out.json").bench
    assert stored is not None and stored.runs[record.run].confined == record.confined
    if probe().level == "unconfined":
        pytest.skip(f"cell: {probe()}")
    assert [victim.read_text() for victim in victims] == ["honest"] * 2


def test_files_that_are_timed_together_have_a_cache_that_none_of_them_has_alone() -> None:
    one, two = "1" * 64, "2" * 64
    alone, both, again = (cell_of(names, "level1_40", None).folder for names in ([one], [one, two], [two, one, one]))
    assert alone == candidate_folder(one) and both == again
    assert both not in (alone, candidate_folder(two))
