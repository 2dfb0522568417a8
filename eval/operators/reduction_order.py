"""The order in which PyTorch's generic CUDA reduction adds, as a NumPy model: who adds what, and in which tree.

Sum, mean and vector norm over one dimension go through `gpu_reduce_kernel` of `Reduce.cuh`. `plan` says how it would
be launched (its `setReduceConfig`), `reduce` gives its bits. Written from the order alone; knows no torch, no kernel
and no GPU. Not modelled: more than one reduced dimension, and one so long that TensorIterator cuts it (2^31 bytes).

Credit: the order is that of `Reduce.cuh` of PyTorch, (c) the PyTorch contributors, BSD-style licence
(licenses/PYTORCH_251_LICENSE.txt).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbsub.eval.operators.layer_norm.order import Float32, fma

THREADS = 512  # of a block, divided by the outputs a thread
WARP = 32
ACCUMULATORS = 4  # of a thread, along the inputs
VECTOR = 4  # elements of its vectorised loads, each with an accumulator; 8 for sums and means of 16-bit elements (2.11)
VECTORISED_FROM = 128  # inputs: from here on a contiguous dimension is loaded by vectors
MOST_VALUES, LEAST_VALUES = 256, 16  # a thread: above the first a sum is spread over blocks, each keeping the second

Term = Callable[[Float32, Float32], Float32]


class UnknownOrder(ValueError):
    """The order of this torch version or of this reduction is not known; the message says which and what is."""


@dataclass(frozen=True)
class Trees:
    """How the threads of a block meet. falling: lanes pair at distance 16, 8, ... (else 1, 2, ...); x_first: the
    threads along x meet before those along y."""

    falling: bool
    x_first: bool


# By (major, minor). Warp direction: pytorch pull request 164790; x before y: 165178, both of October 2025. 2.10 was
# neither read nor measured.
TREES: dict[tuple[int, int], Trees] = {
    **{(2, minor): Trees(falling=False, x_first=False) for minor in range(5, 10)},
    **{(2, minor): Trees(falling=True, x_first=True) for minor in range(11, 14)},
}


def trees_of(version: str) -> Trees:
    """The trees of a torch version ("2.11.0+cu130"). Raises UnknownOrder."""
    found = re.match(r"(\d+)\.(\d+)", version)
    key = (int(found[1]), int(found[2])) if found else (0, 0)
    if key not in TREES:
        known = ", ".join(f"{a}.{b}" for a, b in sorted(TREES))
        raise UnknownOrder(f"torch {version}: the order of its reductions is not known; known are {known}")
    return TREES[key]


@dataclass(frozen=True)
class Device:
    """What the launch depends on; an H200's."""

    multiprocessors: int = 132
    threads_per_multiprocessor: int = 2048


@dataclass(frozen=True)
class ReductionLaunch:
    """One launch. width, height: of the block. along_x, along_y: whether those threads share an output; blocks: how
    many share one. by_vectors: the inputs are loaded `vector` at a time from aligned addresses."""

    width: int
    height: int
    along_x: bool
    along_y: bool
    blocks: int = 1
    by_vectors: bool = False
    vector: int = VECTOR

    @property
    def sharing(self) -> int:
        """Threads that share an output: element e goes to thread e mod this."""
        return (self.width if self.along_x else 1) * (self.height if self.along_y else 1) * self.blocks


def power_of_two(n: int, most: int) -> int:
    """The largest power of two that is at most n, and at most `most`, which is one."""
    return min(1 << (max(n, 1).bit_length() - 1), most)


def plan(
    outputs: int,
    inputs: int,
    contiguous: bool,
    plane: int = 1,
    device: Device | None = None,
    vector: int = VECTOR,
) -> ReductionLaunch:
    """The launch of a reduction of `inputs` elements to each of `outputs`.

    contiguous: the reduced dimension is the fastest one. Otherwise `plane` is the length of the fastest dimension, in
    which outputs are adjacent, and the other strides are multiples of it (a contiguous (batch, channels, plane)).
    vector: elements of a vectorised load.
    """
    device = device or Device()
    outputs_a_thread, by_vectors = 1, False
    if contiguous:
        by_vectors = inputs >= VECTORISED_FROM
        across, down = inputs // (vector if by_vectors else 1), outputs
    else:
        outputs_a_thread = 4 if plane % 4 == 0 else 2 if plane % 2 == 0 else 1
        across, down = outputs // outputs_a_thread, inputs
    threads = THREADS // outputs_a_thread
    across, down = power_of_two(across, threads), power_of_two(down, threads)
    height = min(down, threads // min(across, WARP))
    width = min(across, threads // height)
    values = -(-inputs // width) if contiguous else inputs
    along_y = values >= min(height * 16, MOST_VALUES)
    if along_y:
        values = -(-inputs // ((width if contiguous else 1) * height))
    step = (1 if contiguous else width) * (1 if along_y else height)
    grid = -(-(outputs // outputs_a_thread) // step)
    room = device.multiprocessors * (device.threads_per_multiprocessor // (width * height))
    blocks = 1
    if along_y and values >= MOST_VALUES and grid <= room:
        blocks = max(min(-(-room // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return ReductionLaunch(width, height, contiguous, along_y, blocks, by_vectors, vector)


def add(a: Float32, b: Float32) -> Float32:
    """A sum or a mean: the next element is added."""
    return a + b


def add_square(a: Float32, b: Float32) -> Float32:
    """The 2-norm: compiled as one fused multiply-add."""
    return fma(b, b, a)


def reduce(x: Float32, how: ReductionLaunch, trees: Trees, term: Term = add, address: int = 0) -> Float32:
    """The sum of each row of x (outputs, inputs) fp32 in PyTorch's order -> (outputs,) fp32.

    term: what a thread does with its next element; partial sums are always added. address: of x[0, 0] in elements; row
    r begins r * inputs further (it matters where `how` loads by vectors).
    """
    outputs, inputs = x.shape
    with np.errstate(all="ignore"):
        if not how.by_vectors:
            partial = _fold_strided(x, how.sharing, term)
        else:
            partial = np.empty((outputs, how.sharing), np.float32)
            shifts = (address + np.arange(outputs) * inputs) % how.vector
            for shift in np.unique(shifts):
                partial[shifts == shift] = _fold_vectors(x[shifts == shift], how, int(shift), term)
        height, width = how.height if how.along_y else 1, how.width if how.along_x else 1
        blocks = _meet(partial.reshape(outputs, how.blocks, height, width), trees.x_first, trees.falling)
        if how.blocks == 1:
            return blocks[:, 0]
        # The last block folds the others' sums, each thread every (height * width)-th, and meets along y first.
        waiting = height * width
        rounds = -(-how.blocks // waiting)
        staged = np.zeros((outputs, rounds * waiting), np.float32)
        staged[:, : how.blocks] = blocks
        last = np.zeros((outputs, waiting), np.float32)
        for turn in range(rounds):
            present = np.arange(waiting) + turn * waiting < how.blocks
            last = np.where(present, last + staged[:, turn * waiting : (turn + 1) * waiting], last)
        return _meet(last.reshape(outputs, 1, height, width), False, trees.falling)[:, 0]


def _fold_strided(x: Float32, sharing: int, term: Term) -> Float32:
    """(outputs, sharing): thread t folds elements t, t + sharing, ... in turn into four accumulators."""
    outputs, inputs = x.shape
    turns = -(-inputs // (sharing * ACCUMULATORS))
    padded = np.zeros((outputs, turns * ACCUMULATORS * sharing), np.float32)
    padded[:, :inputs] = x
    present = (np.arange(padded.shape[1]) < inputs).reshape(turns, ACCUMULATORS, sharing)
    elements = padded.reshape(outputs, turns, ACCUMULATORS, sharing)
    sums = np.zeros((outputs, ACCUMULATORS, sharing), np.float32)
    for turn in range(turns):
        sums = np.where(present[turn], term(sums, np.ascontiguousarray(elements[:, turn])), sums)
    return _one_by_one(sums)


def _fold_vectors(x: Float32, how: ReductionLaunch, shift: int, term: Term) -> Float32:
    """(outputs, sharing) for rows that begin `shift` elements behind an aligned address.

    Elements before the first aligned address go to threads shift.. of the first row of threads, those behind the last
    whole vector to its threads 0, 1, ..., always into accumulator 0: the former before the vectors, the latter after.
    """
    outputs, inputs = x.shape
    sharing, size = how.sharing, how.vector
    head = -shift % size
    vectors, tail = divmod(inputs - head, size)
    sums = np.zeros((outputs, size, sharing), np.float32)
    if head:
        sums[:, 0, shift : shift + head] = term(sums[:, 0, shift : shift + head], x[:, :head])
    turns = -(-vectors // sharing)
    padded = np.zeros((outputs, turns * sharing, size), np.float32)
    padded[:, :vectors] = x[:, head : head + vectors * size].reshape(outputs, vectors, size)
    for turn in range(turns):
        mine = slice(turn * sharing, (turn + 1) * sharing)
        present = np.arange(mine.start, mine.stop) < vectors
        sums = np.where(present, term(sums, np.ascontiguousarray(padded[:, mine].transpose(0, 2, 1))), sums)
    if tail:
        sums[:, 0, :tail] = term(sums[:, 0, :tail], x[:, inputs - tail :])
    return _one_by_one(sums)


def _one_by_one(sums: Float32) -> Float32:
    total: Float32 = sums[:, 0]
    for i in range(1, sums.shape[1]):
        total = total + sums[:, i]
    return total


def _meet(values: Float32, x_first: bool, falling: bool) -> Float32:
    """(outputs, blocks, height, width) -> (outputs, blocks)."""
    if x_first:
        return _halves(_lanes(values, falling))
    return _lanes(_halves(np.moveaxis(values, 2, 3)), falling)


def _halves(values: NDArray[Any]) -> Float32:
    """The last dimension, a power of two: i and i + half, until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    total: Float32 = values[..., 0]
    return total


def _lanes(values: Float32, falling: bool) -> Float32:
    """The last dimension, threads along x: halves down to a warp, then the warp's own tree."""
    while values.shape[-1] > WARP:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    if falling:
        return _halves(values)
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    total: Float32 = values[..., 0]
    return total
