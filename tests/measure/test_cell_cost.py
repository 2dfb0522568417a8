"""The measurement of the cell's cost without a GPU: order, what is compared, what holds; and its programs' kernels."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kbsub.eval.host_executor import H200_LIMITS, HostExecutor
from kbsub.eval.host_executor.executor import HostModule
from kbsub.eval.measure import cell as cost
from kbsub.eval.process.cell import Cell, probe
from kbsub.eval.process.isolated import Outcome, Status
from support.paths import TESTS

PROGRAMS = TESTS / "cell_programs"


def run_of(ms: float, correct: bool = True) -> dict[str, Any]:
    return {"correct": correct, "ms": ms, "reference_ms": 8.0, "status": "OK", "trials": "(5 / 5)", "message": ""}


def programs(inside: list[float], outside: list[float], order: list[str], correct: bool = True) -> dict[str, cost.Run]:
    left = {"inside": iter([1.0, *inside]), "outside": iter([1.0, *outside])}

    def run(side: str) -> dict[str, Any]:
        order.append(side)
        return run_of(next(left[side]), correct)

    return {"one": run}


def test_both_sides_run_in_turn_after_one_uncounted_run_each_and_every_round_is_kept() -> None:
    order: list[str] = []
    kept: list[str] = []
    cost.in_turn(programs([1.0] * 3, [1.0] * 3, order), 3, lambda rows: kept.append(json.dumps(rows)))
    assert sorted(order[:2]) == ["inside", "outside"]  # at a time
    assert order[2:] == ["inside", "outside"] + ["outside", "inside"] + ["inside", "outside"]
    assert [len(json.loads(text)["one"]["runs"]["inside"]) for text in kept] == [0, 1, 2, 3]


# inside, outside in ms, every verdict correct: the ratio, whether the aim is met, whether the interval is within it
CLAIMS = [
    ([0.288, 0.290] * 4, [0.289, 0.289] * 4, True, 1.0, True, True),
    ([0.315] * 8, [0.288] * 8, True, 1.09375, False, False),
    ([0.288] * 3, [0.288] * 3, True, 1.0, True, False),  # too few rounds for an interval
    ([0.28] * 8, [0.288] * 8, True, 0.97222, False, False),  # faster inside is no pass: something differs
    ([0.288] * 8, [0.288] * 8, False, None, False, False),
]


@pytest.mark.parametrize(("inside", "outside", "correct", "ratio", "holds", "certain"), CLAIMS)
def test_the_claim(
    inside: list[float], outside: list[float], correct: bool, ratio: float | None, holds: bool, certain: bool
) -> None:
    found = cost.in_turn(programs(inside, outside, [], correct), len(inside), lambda rows: None)["one"]
    assert (found.get("ratio"), found["holds"], found["certain"]) == (pytest.approx(ratio, abs=2e-3), holds, certain)
    assert len(found["runs"]["inside"]) == (len(inside) if correct else 0)
    assert ("ratio" if correct else "not correct 5/5") in cost.in_words("one", found)


def test_a_run_counts_as_correct_by_upstreams_words_alone() -> None:
    official = {
        "compiled": True,
        "correctness": True,
        "trials": "(5 / 5)",
        "runtime": 0.3,
        "runtime_stats": {"min": 0.2},
    }
    value = {"official": {**official, "ref_runtime": 8.0}, "verdict": {"status": "OK"}}
    confined = {"level": "namespaces", "lacks": []}
    row = cost.row_of(Outcome(Status.OK, value, "", "log", 5.0, confined))
    assert (row["correct"], row["ms"], row["min_ms"], row["reference_ms"]) == (True, 0.3, 0.2, 8.0)
    assert row["confined"] == confined and "log" not in row
    for change in ({"trials": "(4 / 5)"}, {"correctness": False}, {"compiled": None}):
        assert not cost.row_of(Outcome(Status.OK, {"official": {**official, **change}}, "", "", 5.0))["correct"]
    assert not cost.row_of(Outcome(Status.TIMEOUT, None, "TIMEOUT after 9 s", "log", 9.0))["correct"]


def test_rows_of_another_machine_or_cell_are_not_kept() -> None:
    machine = {"gpu": "H200", "driver": "580", "torch": "2.11", "date": "today"}
    text = json.dumps({"environment": machine, "cell": "namespaces", "programs": {"a": {}, "b": {}}})
    assert cost.kept(text, {**machine, "date": "tomorrow"}, ["b"], "namespaces") == {"a": {}}
    assert cost.kept(text, {**machine, "torch": "2.12"}, [], "namespaces") == {}
    assert cost.kept(text, machine, [], "landlock") == {}


def test_a_cell_grants_a_process_what_it_has_outside(tmp_path: Path) -> None:
    """Priority, cores, memory policy, timers and mitigations are the caller's: nothing of them may slow a program."""
    if probe().level == "unconfined":
        pytest.skip(f"cell: {probe()}")
    found = cost.process_facts(Cell(tmp_path / "cell"))
    assert set(found["differs"]) <= {"CapEff", "NoNewPrivs", "RLIMIT_CORE", "RLIMIT_NPROC"}, found["differs"]
    assert {"nice", "cores", "memory policy", "timer slack ns", "Seccomp"} <= set(found["same"])
    assert found["variables_only_outside"] == []
    assert all(us > 0 for side in found["host_us"].values() for us in side.values())


def cuda_source(name: str) -> str:
    tree = ast.parse((PROGRAMS / f"{name}.py").read_text())
    values = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CUDA_SOURCE"
    ]
    return str(ast.literal_eval(values[0]))


def test_the_kernels_are_layer_norm() -> None:
    """On the CPU, from the unedited text; nvcc's program holds the same kernels."""
    source = cuda_source("cupy_kernels")
    kernels = source.replace('extern "C" ', "").strip()
    assert kernels in cuda_source("nvcc_load_inline")
    executor = HostExecutor()
    module = HostModule(executor, source, (), H200_LIMITS)
    rows, width, slices = 2, 4096, 256
    drawn = [torch.rand(rows, width), torch.rand(width), torch.rand(width), torch.empty(rows, width)]
    sums = torch.zeros(rows, slices, 2, dtype=torch.float64)
    x, gamma, beta, y, sums = (executor.memory.copy(each) for each in (*drawn, sums))
    grid, block, vectors = (slices, rows), (slices,), np.int32(width // 4)
    module.launch("slice_sums", grid, block, (x.data_ptr(), sums.data_ptr(), vectors))
    pointers = (each.data_ptr() for each in (x, gamma, beta, sums, y))
    module.launch("normalise", grid, block, (*pointers, vectors, np.float32(1e-5)))
    assert torch.allclose(y, torch.nn.functional.layer_norm(x, (width,), gamma, beta), atol=1e-5)
