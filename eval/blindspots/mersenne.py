"""Torch's CPU generator (MT19937) moved ahead, so that one long draw can be made by several threads, bit for bit.

`torch.rand` takes one 32-bit word of the generator an element, and one thread: 2 billion floats are 10 to 18 seconds.
The words obey a linear recurrence of order 19937 over GF(2): with x^N mod P = sum of p_i x^i (P: its characteristic
polynomial), the word N places ahead is the xor of the words i places ahead with p_i = 1 (Haramoto et al. 2008). A
generator for every N-th element costs about 15 ms. That the stream is torch's own is a test.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

WORDS, MIDDLE, DEGREE = 624, 397, 19937
_UPPER, _LOWER, _MATRIX = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
# Torch's CPU generator state (CPUGeneratorImplStateLegacy): seed, left, seeded, next, then 624 words of 64 bits each.
_LEFT, _NEXT, _FIRST = slice(8, 12), slice(16, 24), 24


def _next_block(old: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The 624 words after these 624 (uint32), in three steps: each needs words that an earlier one made."""
    new = np.empty_like(old)
    following = np.append(old[1:], old[0])  # the last word's partner is new[0], mended below
    for begin, end in ((0, WORDS - MIDDLE), (WORDS - MIDDLE, 2 * (WORDS - MIDDLE)), (2 * (WORDS - MIDDLE), WORDS)):
        if end == WORDS:
            following[-1] = new[0]
        mixed = (old[begin:end] & _UPPER) | (following[begin:end] & _LOWER)
        middle = (
            old[begin + MIDDLE : end + MIDDLE] if begin == 0 else new[begin + MIDDLE - WORDS : end + MIDDLE - WORDS]
        )
        new[begin:end] = middle ^ (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), _MATRIX, np.uint32(0))
    return new


def _words_from(block: np.ndarray[Any, Any], position: int, count: int) -> np.ndarray[Any, Any]:
    """`count` words of the sequence that begins at block[position]."""
    blocks = [block]
    while len(blocks) * WORDS < position + count:
        blocks.append(_next_block(blocks[-1]))
    return np.concatenate(blocks)[position : position + count]


@functools.lru_cache(maxsize=1)
def _polynomial() -> int:
    """The characteristic polynomial, bit i its coefficient of x^i: Berlekamp-Massey over 40,000 bits, about 0.3 s."""
    seed = np.arange(1, WORDS + 1, dtype=np.uint32) * np.uint32(2654435761)
    bits = (_words_from(seed, 1, 2 * DEGREE + 64) & np.uint32(1)).tolist()
    current, previous, length, gap, window = 1, 1, 0, 1, 0
    for index, bit in enumerate(bits):
        window = (window << 1) | bit
        if (current & window).bit_count() & 1:
            changed = current ^ (previous << gap)
            if 2 * length <= index:
                length, previous, gap = index + 1 - length, current, 0
            current = changed
        gap += 1
    if length != DEGREE:
        raise AssertionError(f"the recurrence has order {length}, MT19937's is {DEGREE}")
    return int(f"{current:0{DEGREE + 1}b}"[::-1], 2)  # the connection polynomial, reversed


@functools.lru_cache(maxsize=8)
def _ahead(log2_words: int) -> np.ndarray[Any, Any]:
    """The exponents i with p_i = 1 in x^(2^log2_words) mod P."""
    polynomial = _polynomial()
    below = [i for i in range(DEGREE) if polynomial >> i & 1]
    mask, value = (1 << DEGREE) - 1, 2  # x
    for _ in range(log2_words):
        value = int("0".join(f"{value:b}"), 2)  # squaring over GF(2) puts a zero between the bits
        while high := value >> DEGREE:
            value &= mask
            for exponent in below:
                value ^= high << exponent
    return np.flatnonzero(np.frombuffer(f"{value:b}"[::-1].encode(), dtype=np.uint8) == ord("1"))


def _read(state: torch.Tensor) -> tuple[np.ndarray[Any, Any], int]:
    """(the 624 words, how many of them are used up) of torch.get_rng_state()."""
    raw = state.numpy()
    left, following = int(raw[_LEFT].view(np.int32)[0]), int(raw[_NEXT].view(np.int64)[0])
    words = raw[_FIRST : _FIRST + 8 * WORDS].view(np.uint64).astype(np.uint32)
    return words, WORDS if left == 1 else following


def _written(like: torch.Tensor, words: np.ndarray[Any, Any]) -> torch.Tensor:
    """A generator state whose first word is used up, so that words[1] comes next."""
    state = like.clone()
    raw = state.numpy()
    raw[_LEFT] = np.array([WORDS], dtype=np.int32).view(np.uint8)
    raw[_NEXT] = np.array([1], dtype=np.int64).view(np.uint8)
    raw[_FIRST : _FIRST + 8 * WORDS] = words.astype(np.uint64).view(np.uint8)
    return state


def states_ahead(state: torch.Tensor, log2_words: int, count: int) -> Iterator[torch.Tensor]:
    """`state` (torch.get_rng_state()) and then the states 2^log2_words words further on each, `count` in all."""
    yield state
    words, position = _read(state)
    for _ in range(count - 1):
        chosen = _ahead(log2_words)
        sequence = _words_from(words, position - 1, int(chosen[-1]) + WORDS)
        windows = np.lib.stride_tricks.sliding_window_view(sequence, WORDS)
        words, position = np.bitwise_xor.reduce(windows[chosen], axis=0), 1
        yield _written(state, words)
