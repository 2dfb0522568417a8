"""Does a recorded program compute, or does it only see to it that its answer is still there?

Between two replays the same inputs stay at the same addresses, and the last answer stays in the output. A program that
looks whether its output holds a NaN and whether x is another one may then return at once: right, and measured at a
fraction of its time (one of five replays between two events computes). So a recorded program is also replayed with one
element of its input changed and its old answer left in place. Knows torch; nothing of scenes, clocks or candidates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def one_element_changed(values: list[Any], seed: int) -> Iterator[None]:
    """Within, one element of every floating tensor, elsewhere for each seed, holds another value of that tensor: the
    largest or the smallest, whichever is farther. In place; the very bits are put back afterwards."""
    chosen = random.Random(seed)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for value in values:
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                element = _element(value, chosen.randrange(value.numel()))
                low, high = value.min(), value.max()
                before.append((element, element.clone()))
                element.copy_(torch.where(high - element > element - low, high, low))
        try:
            yield
        finally:
            for element, old in before:
                element.copy_(old)


def _element(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """One element as a view, whatever the strides."""
    index = []
    for size in reversed(tensor.shape):
        number, at = divmod(number, size)
        index.append(at)
    return tensor[tuple(reversed(index))]


class StaleCheck:
    """Asks the question of one scene's programs; what the reference gives is kept while the question is the same."""

    def __init__(self, reference: Callable[..., Any], tolerance: float) -> None:
        self.reference, self.tolerance = reference, tolerance
        self._key: tuple[int, int] | None = None
        self._answer: torch.Tensor | None = None

    def complaint(self, program: Any, values: list[Any], expected: torch.Tensor, seed: int, copies: bool) -> str | None:
        """Replay `program`, recorded on `values`, with one element changed; what is wrong with its answer, or None.

        expected: the right answer to `values` as they are. copies: its answer is its first input, not the reference's.
        Wrong is only the old answer where another one is due; an answer that the tolerance cannot tell says nothing.
        """
        with torch.no_grad(), one_element_changed(values, seed):
            first = next(value for value in values if isinstance(value, torch.Tensor))
            due = first.clone() if copies else self._due(values, seed)
            if due is None or due.shape != expected.shape or self._close(due, expected):
                return None
            program.replay()
            output = program.output()
            if not isinstance(output, torch.Tensor) or output.shape != due.shape or output.dtype != due.dtype:
                return None  # not this question's to say
            if self._close(due, output) or not self._close(expected, output):
                return None
        return "it gave its old answer again when one element of its input had changed: it does not always compute"

    def _due(self, values: list[Any], seed: int) -> torch.Tensor | None:
        """The reference's answer; None where it does not give one (no memory left, a value it refuses)."""
        key = (id(values), seed)
        if key != self._key:
            self._key, self._answer = None, None
            try:
                answer = self.reference(*[v.clone() if isinstance(v, torch.Tensor) else v for v in values])
            except (RuntimeError, ValueError, IndexError):
                return None
            self._key, self._answer = key, answer if isinstance(answer, torch.Tensor) else None
        return self._answer

    def _close(self, expected: torch.Tensor, output: torch.Tensor) -> bool:
        return torch.allclose(expected, output, atol=self.tolerance, rtol=self.tolerance)
