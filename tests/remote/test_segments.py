"""Answers in somebody's memory: found by address, sampled, held to what they were. Host memory stands for a GPU's."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from kbsub.eval.remote import segments
from kbsub.eval.remote.segments import Mappings
from kbsub.eval.remote.values import ValueProblem, byte_span, lay

SIZE, SAMPLES = 4096, 64
HANDLE = {"first": "aa" * 64, "second": "bb" * 64}
FACTS = {"device": "cuda:0"}


class Memory:
    """An allocation of the worker's: 4096 floats there at `base`, and what is mapped of it here."""

    def __init__(self, name: str, base: int, number: int = 1) -> None:
        self.handle, self.base, self.number = HANDLE[name], base, number
        self.floats = torch.zeros(SIZE)

    def told(self, start: int, count: int) -> dict[str, Any]:
        slot = lay([torch.empty(count)])[0][0].record() | {"offset": 4 * start}
        return {**slot, "handle": self.handle, "number": self.number, "copied": False, "facts": FACTS}


@pytest.fixture
def world(monkeypatch):
    """(mappings, the worker's allocations by handle)."""
    there: dict[str, Memory] = {}

    class Mapped:
        def __init__(self, handle: bytes, device: torch.device) -> None:
            self.bytes = there[handle.hex()].floats.view(torch.uint8)
            self.address, self.nbytes, self.closed = self.bytes.data_ptr(), self.bytes.numel(), False

        def close(self) -> None:
            self.closed = True

    def host_bytes(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)

    monkeypatch.setattr(segments, "Mapped", Mapped)
    monkeypatch.setattr(segments, "device_bytes", host_bytes)
    made = Mappings(torch.device("cpu"))
    made.shared = True
    return made, there


def read(mappings: Mappings, told: list[dict[str, Any]], at: list[int]) -> list[torch.Tensor]:
    tree = {"list": [{"tensor": index} for index in range(len(told))]}
    value, devices = mappings.read({"tensors": told, "value": tree}, None, at)  # type: ignore[arg-type]
    assert devices == ["cuda:0"] * len(told)
    return value


def places(answers: int) -> torch.Tensor:
    return torch.rand((answers, SAMPLES), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_an_answer_is_sampled_without_a_word_once_its_memory_was_told(world):
    mappings, there = world
    memory = there[HANDLE["first"]] = Memory("first", 1 << 40)
    at = [memory.base + 4 * 100, memory.base + 4 * 600]
    assert mappings.sample(at, places(2), [400]) is None, "nothing was mapped yet"
    read(mappings, [memory.told(100, 100), memory.told(600, 100)], at)
    memory.floats[100:200], memory.floats[600:700] = 1.0, 2.0
    sample = mappings.sample(at, places(2), [400])
    found = read(mappings, [memory.told(100, 100), memory.told(600, 100)], at)
    assert sample.lies == [each.data_ptr() for each in found]
    assert [float(each[0]) for each in found] == [1.0, 2.0]
    assert all(sample.same(index, byte_span(each)) for index, each in enumerate(found))


def test_an_answer_that_is_filled_in_later_is_not_what_was_seen(world):
    mappings, there = world
    memory = there[HANDLE["first"]] = Memory("first", 1 << 40)
    read(mappings, [memory.told(0, 1000)], [memory.base])
    sample = mappings.sample([memory.base], places(1), [4000])
    memory.floats[:1000] = torch.rand(1000)
    assert not sample.same(0, byte_span(read(mappings, [memory.told(0, 1000)], [memory.base])[0]))


def test_memory_that_was_given_again_is_mapped_anew(world):
    mappings, there = world
    old = there[HANDLE["first"]] = Memory("first", 1 << 40)
    read(mappings, [old.told(0, 100)], [old.base])
    new = there[HANDLE["first"]] = Memory("first", 1 << 40, number=2)
    new.floats[:] = 3.0
    assert float(read(mappings, [new.told(0, 100)], [new.base])[0][0]) == 3.0
    other = there[HANDLE["second"]] = Memory("second", (1 << 40) + 64, number=3)  # overlaps: the first is gone
    other.floats[:] = 4.0
    found = read(mappings, [other.told(0, 100)], [other.base])
    sample = mappings.sample([other.base], places(1), [400])
    assert sample.lies == [found[0].data_ptr()], "an address was looked up in memory that is no more"


def test_what_the_worker_has_let_go_does_not_stay_mapped_for_ever(world):
    mappings, there = world
    for number in range(100):
        memory = there[f"{number:02x}" * 64] = Memory("first", (1 << 40) + (number << 20), number)
        memory.handle = f"{number:02x}" * 64
        read(mappings, [memory.told(0, 100)], [memory.base])
    assert len(mappings._of) <= segments.SPARE_MAPPINGS + 2
    assert mappings.sample([memory.base], places(1), [400]) is not None


def test_what_does_not_lie_in_mapped_memory_is_not_looked_at(world):
    mappings, there = world
    memory = there[HANDLE["first"]] = Memory("first", 1 << 40)
    read(mappings, [memory.told(0, 100)], [memory.base])
    for address, size in ((memory.base - 4, 400), (memory.base + 4 * SIZE - 4, 400), (0, 400), (-(1 << 62), 400)):
        assert mappings.sample([address], places(1), [size]) is None
    with pytest.raises(ValueProblem, match="ends at byte"):
        read(mappings, [memory.told(SIZE - 10, 100)], [memory.base])
    with pytest.raises(ValueProblem, match="without a handle"):
        read(mappings, [{**memory.told(0, 10), "handle": "aa"}], [memory.base])
