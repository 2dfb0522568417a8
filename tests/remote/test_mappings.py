"""The judge's mappings of a worker's device memory: kept while the allocation is the same, bounded, never stale."""

from __future__ import annotations

import pytest
import torch

from kbsub.eval.remote import reading
from kbsub.eval.remote.memory import same_bytes

HANDLE = "ab" * reading.HANDLE_BYTES


class Mapped:
    opened: list[Mapped] = []

    def __init__(self, handle: bytes, device: torch.device) -> None:
        self.handle, self.closed, self.nbytes = handle.hex(), False, 1 << 30
        self.bytes = torch.full((64,), len(Mapped.opened), dtype=torch.uint8)
        Mapped.opened.append(self)

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> reading.OutputReader:
    Mapped.opened = []
    monkeypatch.setattr(reading, "Mapped", Mapped)
    return reading.OutputReader(torch.device("cpu"))


def told(number: int | None, handle: str = HANDLE) -> list[dict[str, object]]:
    return [{"handle": handle, "number": number, "dtype": "uint8", "shape": [4], "strides": [1], "offset": 0}]


def closed() -> list[bool]:
    return [each.closed for each in Mapped.opened]


def test_one_allocation_is_mapped_once(reader: reading.OutputReader) -> None:
    assert [int(reader._read_device(told(7))[0][0]) for _ in range(3)] == [0, 0, 0]
    assert closed() == [False]
    reader.close()
    assert closed() == [True]


def test_another_allocation_at_the_same_place_is_mapped_anew(reader: reading.OutputReader) -> None:
    assert [int(reader._read_device(told(number))[0][0]) for number in (7, 8, 7)] == [0, 1, 2]
    assert closed() == [True, True, False]


def test_without_a_number_nothing_is_kept(reader: reading.OutputReader) -> None:
    two = told(None) + told(None)
    assert [int(each[0]) for each in reader._read_device(two)] == [0, 0]
    assert [int(each[0]) for each in reader._read_device(two)] == [1, 1]
    assert closed() == [True, True]


def test_what_is_kept_is_bounded(reader: reading.OutputReader) -> None:
    for number in range(6):  # of 1 GiB each
        reader._read_device(told(number, f"{number:02x}" * reading.HANDLE_BYTES))
    assert closed() == [True, True, False, False, False, False]


@pytest.mark.parametrize("size", [0, 7, 8, 65])
@pytest.mark.parametrize("shift", [(0, 0), (8, 16), (1, 1), (0, 4)])
def test_bytes_are_the_same_or_differ_in_any_one(size: int, shift: tuple[int, int]) -> None:
    whole = torch.arange(256, dtype=torch.uint8)
    one, other = (torch.empty(128, dtype=torch.uint8)[at : at + size] for at in shift)
    one.copy_(whole[:size])
    other.copy_(whole[:size])
    assert same_bytes(one, other)
    for at in range(size):
        other[at] += 1
        assert not same_bytes(one, other)
        other[at] -= 1
