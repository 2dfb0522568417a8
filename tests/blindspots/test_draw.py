"""Upstream's draws made in pieces: torch's own stream, bit for bit, and its generator where it would stand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kbsub.eval.blindspots import draw as drawing
from kbsub.eval.blindspots import mersenne


@pytest.mark.parametrize("used", [0, 1, 623, 624, 625, 1000])
def test_a_generator_moved_ahead_gives_the_words_that_come_there(used):
    torch.manual_seed(7)
    torch.rand(max(used, 1) if used else 0)
    states = list(mersenne.states_ahead(torch.get_rng_state(), 12, 4))
    torch.manual_seed(7)
    torch.rand(max(used, 1) if used else 0)
    serial = torch.rand(4 << 12).view(4, -1)
    for state, expected in zip(states, serial, strict=True):
        generator = torch.Generator()
        generator.set_state(state)
        assert torch.equal(torch.rand(1 << 12, generator=generator), expected)


def test_a_jump_of_the_length_that_is_used_is_the_jump_of_its_halves():
    """2^26 words ahead in one jump and in two: no test draws that far, the polynomial's arithmetic must hold."""
    torch.manual_seed(11)
    start = torch.get_rng_state()
    twice = list(mersenne.states_ahead(start, 25, 3))[2]
    once = list(mersenne.states_ahead(start, 26, 2))[1]
    assert torch.equal(once, twice)


def test_blocks_are_numpys_too():
    seeded = np.random.MT19937()
    seeded._legacy_seeding(5)
    key = seeded.state["state"]["key"].astype(np.uint32)
    seeded.random_raw(1)  # makes the next block
    assert np.array_equal(mersenne._next_block(key), seeded.state["state"]["key"].astype(np.uint32))


def get_inputs():
    scale = torch.rand(())
    uniform = torch.rand(7, 3001) * scale
    return [uniform, torch.randint(0, 5, (20011,)), torch.randn(400, 50), torch.rand(3), torch.randn(7)]


def test_get_inputs_in_pieces_is_get_inputs(monkeypatch):
    monkeypatch.setattr(drawing, "LARGE", 1 << 10)
    monkeypatch.setattr(drawing, "LOG2_SEGMENT", 12)
    monkeypatch.setattr(drawing, "CHUNK", 1 << 10)
    pieces, how = drawing.draw(get_inputs, 42, "cpu")
    stands = torch.get_rng_state()
    torch.manual_seed(42)
    whole = get_inputs()
    assert how == "in pieces: 3 large draw(s)"
    assert all(torch.equal(a, b) for a, b in zip(pieces, whole, strict=True))
    torch.rand(5)
    after = torch.rand(5)
    torch.set_rng_state(stands)
    torch.rand(5)
    assert torch.equal(torch.rand(5), after)


def test_what_a_gpu_may_round_differently_is_drawn_on_the_host(monkeypatch):
    monkeypatch.setattr(drawing, "LARGE", 1 << 10)
    monkeypatch.setattr(drawing, "_is_there", lambda value: isinstance(value, torch.Tensor) and value.numel() > 1000)
    monkeypatch.setattr(drawing, "in_pieces", lambda size, dtype, fill, device: torch.zeros(size))  # not what is drawn
    given, how = drawing.draw(lambda: [torch.rand(4, 1000).softmax(-1)], 42, "meta")
    torch.manual_seed(42)
    assert torch.equal(given[0], torch.rand(4, 1000).softmax(-1))
    assert how.startswith("on the host, as a whole: softmax")


@pytest.mark.gpu
def test_large_draws_on_a_gpu_are_the_hosts():
    def large():
        return [torch.rand(5, 1 << 24) * 2, torch.randint(0, 2, (1 << 26,)).float() * 2 - 1]

    pieces, how = drawing.draw(large, 42, "cuda")
    torch.manual_seed(42)
    assert how == "in pieces: 2 large draw(s)"
    assert all(each.is_cuda for each in pieces)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(pieces, large(), strict=True))
