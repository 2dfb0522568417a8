"""The model of PyTorch's reduction order: golden vectors, a literal walk through its threads, its launches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kbsub.eval.operators import reduction_golden as golden
from kbsub.eval.operators import reduction_order as order
from support.paths import TESTS

FALLING_Y, RISING_Y, FALLING_X = (
    order.Trees(falling=True, x_first=False),
    order.Trees(falling=False, x_first=False),
    order.Trees(falling=True, x_first=True),
)
GOLDEN = sorted((TESTS / "golden" / "reductions").glob("*.json"))


# ---- golden vectors ----


def test_there_are_golden_vectors():
    assert GOLDEN, "python -m kbsub.eval.operators.reduction_golden --write tests/golden/reductions/torch_2_11.json"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_model_gives_what_a_gpu_gave(path: Path):
    table = golden.read(path)
    facts = table["environment"]
    device = order.Device(facts["multiprocessors"], facts["threads_per_multiprocessor"])
    trees, cases = order.trees_of(facts["torch"]), {case.name: case for case in golden.CASES}
    assert len(table["cases"]) >= 42 and {row["name"] for row in table["cases"]} <= set(cases), "record it again"
    for row in table["cases"]:
        case = cases[row["name"]]
        values = golden.modelled(case, trees, device)
        assert golden.digest(values) == row["sha256"], (
            f"{case.name}, {case.why}: begins {golden.first(values)}, on the {facts['gpu']} {row['first']}"
        )


# ---- a literal walk: each thread by itself, each meeting by itself ----


def walked(x: np.ndarray, how: order.ReductionLaunch, trees: order.Trees, address: int) -> np.float32:
    """One output of `how` as its threads compute it, in Python numbers; a sum of elements, one block an output."""
    n, width, height = len(x), how.width, how.height if how.along_y else 1
    threads = {}
    for ty in range(height):
        for tx in range(width if how.along_x else 1):
            threads[tx, ty] = _thread(x, tx + (width if how.along_x else 1) * ty, how, address)
    assert n
    lanes = width if how.along_x else 1
    meetings = [("y", d) for d in _falling(height)]
    across = [("x", d) for d in _falling(lanes) if d >= 32]
    inside = _falling(min(lanes, 32))
    across += [("x", d) for d in (inside if trees.falling else inside[::-1])]
    for axis, distance in across + meetings if trees.x_first else meetings + across:
        before = dict(threads)
        for tx, ty in threads:
            other = (tx + distance, ty) if axis == "x" else (tx, ty + distance)
            if other in before:
                threads[tx, ty] = np.float32(before[tx, ty] + before[other])
    return threads[0, 0]


def _falling(n: int) -> list[int]:
    return [n >> level for level in range(1, n.bit_length()) if n >> level]


def _thread(x: np.ndarray, t: int, how: order.ReductionLaunch, address: int) -> np.float32:
    sums = [np.float32(0)] * 4
    step, n = how.sharing, len(x)
    if how.by_vectors:
        size = how.vector
        start = -address % size
        sums = [np.float32(0)] * size
        if t < size and t >= size - start:
            sums[0] = sums[0] + x[t - (size - start)]
        vector = t
        while start + size * (vector + 1) - 1 < n:
            sums = [np.float32(s + x[start + size * vector + i]) for i, s in enumerate(sums)]
            vector += step
        tail = start + (n - start) // size * size + t
        if tail < n:
            sums[0] = sums[0] + x[tail]
    else:
        for place, element in enumerate(range(t, n, step)):
            sums[place % 4] = np.float32(sums[place % 4] + x[element])
    total = sums[0]
    for each in sums[1:]:
        total = np.float32(total + each)
    return total


# (plan of (outputs, inputs, contiguous, plane), address): each way of folding and of meeting
WALKED = (
    ((192, 64, False, 96), 0),
    ((70, 300, False, 35), 0),
    ((8, 200, False, 8), 0),
    ((40, 100, True, 1), 0),
    ((3, 100, True, 1), 0),
    ((16, 8191, True, 1), 0),
    ((16, 8191, True, 1), 3),
    ((3, 20001, True, 1), 2),
    ((1, 4099, True, 1), 1),
    ((600, 20, True, 1), 0),
    ((16, 8191, True, 1, None, 8), 5),
    ((40, 1003, True, 1, None, 8), 3),
)


@pytest.mark.parametrize("trees", [FALLING_Y, RISING_Y, FALLING_X], ids=str)
@pytest.mark.parametrize(("sizes", "address"), WALKED)
def test_the_model_is_the_literal_walk(sizes, address, trees):
    how = order.plan(*sizes)
    x = np.random.default_rng(1).standard_normal((2, sizes[1])).astype(np.float32)
    got = order.reduce(x, how, trees, address=address)
    for row in range(2):
        expected = walked(x[row], how, trees, address + row * sizes[1])
        assert got[row] == expected, f"row {row} of {how}: {got[row]!r}, by hand {expected!r}"


@pytest.mark.parametrize("case", golden.CASES, ids=lambda case: case.name)
def test_every_element_is_added_once(case):
    """Whole numbers whose sums fp32 holds exactly: any order gives the same."""
    rows = case.shape if len(case.shape) == 2 else (case.shape[0] * case.shape[2], case.shape[1])
    x = np.random.default_rng(2).integers(-8, 9, rows).astype(np.float32)
    how = order.plan(*rows, True) if len(case.shape) == 2 else order.plan(*rows, False, case.shape[2])
    assert np.array_equal(order.reduce(x, how, FALLING_X, address=case.shift), x.sum(axis=1))


# ---- launches ----

# (outputs, inputs, contiguous, plane) -> (width, height, along_y, blocks, by_vectors), worked out from setReduceConfig
LAUNCHES = {
    (112 * 512 * 512, 64, False, 512 * 512): (32, 4, True, 1, False),  # level 1 problem 36
    (8192, 65535, True, 1): (32, 16, True, 1, True),  # a part of problems 38 and 39
    (2, 300_007, True, 1): (256, 2, True, 37, True),
    (16, 9000, False, 16): (4, 32, True, 18, False),
    (1, 1, True, 1): (1, 1, False, 1, False),
}


@pytest.mark.parametrize("sizes", LAUNCHES)
def test_launches(sizes):
    how = order.plan(*sizes)
    assert (how.width, how.height, how.along_y, how.blocks, how.by_vectors) == LAUNCHES[sizes]


@pytest.mark.parametrize(
    ("version", "trees"), [("2.6.0", RISING_Y), ("2.11.0+cu130", FALLING_X), ("2.13.0+cpu", FALLING_X)]
)
def test_trees_by_version(version, trees):
    assert order.trees_of(version) == trees


@pytest.mark.parametrize("version", ["2.10.0", "3.0.0", "main"])
def test_an_unknown_version_is_refused_aloud(version):
    with pytest.raises(order.UnknownOrder, match=r"is not known; known are .*2\.11"):
        order.trees_of(version)


def test_without_a_gpu_nothing_is_recorded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert golden.main(["--write", str(tmp_path / "g.json")]) == 3
    assert "no GPU" in capsys.readouterr().err and not (tmp_path / "g.json").exists()


def test_the_recorder_writes_what_it_reads(tmp_path, capsys, monkeypatch):
    """With the model in the GPU's place, once in another tree: written, and said to differ."""
    import torch

    class Facts:
        multi_processor_count, max_threads_per_multi_processor, name = 132, 2048, "none"

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: Facts)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(golden, "CASES", golden.CASES[:3] + golden.CASES[8:10])
    for trees, code in ((FALLING_X, 0), (RISING_Y, 1)):
        monkeypatch.setattr(golden, "recorded", lambda case, t=trees: golden.modelled(case, t, order.Device()))
        assert golden.main(["--write", str(tmp_path / "g.json")]) == code
        assert len(golden.read(tmp_path / "g.json")["cases"]) == len(golden.CASES)
    assert "not as modelled; trees that fit: Trees(falling=False" in capsys.readouterr().out
