"""One candidate before the referee: trials as upstream's, then rounds of batches whose every answer is compared.

It knows the reference and what the candidate was given, and executes no line of the candidate.
"""

from __future__ import annotations

import contextlib
import copy
import random
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch

from kbsub.eval.operators.compare.predicate import OFFICIAL_TOLERANCE
from kbsub.eval.remote.model import CandidateRaised, RemoteModel
from kbsub.eval.remote.ring import CallBatch, CallRing, NotStill
from kbsub.eval.suite.matching import BY_KEY, BY_SUFFIX, StateMatch
from kbsub.eval.suite.setting import forms_told, match_of, state_for
from kbsub.eval.verdicts.referee.agree import difference, spread
from kbsub.eval.verdicts.referee.contents import Contents, Nudge

MOST_PROBLEMS = 5
TRIES_TO_HOLD = 3  # a thread that is slow to leave its core is no cheat: contents are drawn anew each time
FLUSH_OF_L2 = 4  # times its size, written before a cold batch


@dataclass
class Tally:
    """What was compared, and what was wrong, in words (each kind once)."""

    outputs: int = 0
    wrong: int = 0
    problems: list[str] = field(default_factory=list)
    late_samples: int = 0
    unheld: int = 0
    spoiled_batches: int = 0

    def note(self, problem: str) -> None:
        kind = problem.split(" by up to ")[0]
        if not any(each.startswith(kind) for each in self.problems) and len(self.problems) < MOST_PROBLEMS:
            self.problems.append(problem)


class Match:
    """A candidate's instance against the reference. `reference` is called once for every call of the candidate, in its
    order, so that a state that calls change is the same on both sides."""

    def __init__(self, reference: torch.nn.Module, model: RemoteModel, contents: Contents, l2_bytes: int) -> None:
        self.reference, self.model, self.contents = reference, model, contents
        self.device, self.tolerance = contents.device, OFFICIAL_TOLERANCE[contents.task.dtype]
        self.tally = Tally()
        self.ring: CallRing | None = None
        self.looked_ms = 0.0  # of the last batch: from "done" until its answers had been sampled
        self.slots = 0  # how many of the ring's are in use: as many as the largest batch has calls
        self.flusher = torch.empty(FLUSH_OF_L2 * l2_bytes, dtype=torch.uint8, device=self.device)
        self._own = self._state()  # the candidate's own, before its first call
        self._mine = _copied(reference)
        self._match = self._matched()

    # ---- calls ----

    def trial(self, *, grad: bool) -> float:
        """One call alone, with contents of its own; its answer is compared. Seconds from asking to the answer."""
        inputs = self.contents.draw(secrets.randbits(31))
        own = [each.clone() if isinstance(each, torch.Tensor) else each for each in inputs]
        reply = self.model.call(inputs, grad=grad)
        self.tally.outputs += 1
        expected = self._expected(own)
        if reply.mutated and not _differ(inputs, own):  # the reference, given them, leaves them as they are
            self._wrong("changed its inputs")
        elif why := self._why(expected, reply.value, [each.device for each in reply.tensors]):
            self._wrong(why)
        return reply.seconds

    def batch(self, calls: int, *, warm: bool = False) -> float:
        """ms of one batch of `calls` calls; all its answers are compared."""
        before = self.tally.wrong
        for left in reversed(range(1 if self.tally.unheld else TRIES_TO_HOLD)):
            with contextlib.suppress(NotStill):
                return self._batch(calls, before, warm=warm, only_still=left > 0)
        raise AssertionError("the last try does not ask for it")

    def flush(self) -> None:
        """Put L2 out of what it holds; the device has then just worked for this process."""
        if self.flusher.numel():
            self.flusher.fill_(secrets.randbelow(256))

    def _batch(self, calls: int, before: int, *, warm: bool, only_still: bool) -> float:
        assert self.ring is not None
        self.ring.hold()
        order = random.SystemRandom().sample(range(max(calls, self.slots)), calls)
        seeds = {slot: secrets.randbits(31) for slot in order}
        for slot in order:
            self.ring.write(slot, self.contents.draw(seeds[slot]))
        nudge = self.contents.nudge()
        if not warm:
            self.flush()
        columns = self.ring.columns
        batch = self.ring.run(order, last=lambda: nudge.apply(columns), only_still=only_still)
        self.tally.unheld += not batch.still
        if not batch.at_once and self.ring.on_gpu:
            self.tally.late_samples += 1
        self._check(self.ring, batch, seeds, nudge)
        self.ring.forget(batch)
        self.tally.spoiled_batches += self.tally.wrong > before
        self.looked_ms = batch.looked_s * 1e3
        return batch.seconds * 1e3

    def _check(self, ring: CallRing, batch: CallBatch, seeds: dict[int, int], nudge: Nudge) -> None:
        self.tally.outputs += len(batch.order)
        per_call = max(1, len(batch.devices) // len(batch.order))
        shared = "answers share memory with earlier ones; " if len(set(batch.at)) < len(batch.at) else ""
        for place, slot in enumerate(batch.order):
            devices = batch.devices[place * per_call :][:per_call]
            inputs = self.contents.nudged(seeds[slot], nudge)
            expected = self._expected(inputs)
            if _differ(ring.slots[slot], inputs):
                self._wrong("changed its inputs")
                continue
            value, same = ring.taken(batch, place)
            if not same:
                self._wrong("an answer was not there yet when it was said to be done")
            elif why := self._why(expected, value, devices):
                self._wrong(shared + why)

    def _why(self, expected: Any, value: Any, devices: list[str]) -> str | None:
        elsewhere = [each for each in devices if each.split(":")[0] != self.device.type]
        return f"lies on {elsewhere[0]}" if elsewhere else difference(expected, value, self.tolerance)

    def _expected(self, inputs: list[Any]) -> Any:
        with torch.no_grad():
            return self.reference(*inputs)

    def _wrong(self, why: str) -> None:
        self.tally.wrong += 1
        self.tally.note(why)

    # ---- state ----

    def _state(self) -> dict[str, torch.Tensor]:
        """The candidate's; {} where it has none that can be told."""
        try:
            return self.model.state()
        except CandidateRaised:
            return {}

    def _matched(self) -> StateMatch | None:
        """Which of its tensors are the reference's, whatever their names; None where that is not sure."""
        found = None
        if self._own:
            told = forms_told(self.model.state_forms)
            found = match_of(told, lambda: self._own, self.reference, self._mine)
        named = dict(self.reference.named_parameters())
        if found is not None and found.how not in (BY_KEY, BY_SUFFIX):
            pairs = [(self._mine[mine], self._own[its]) for its, mine in found.keys.items() if mine in named]
            if not all(a.numel() == b.numel() and torch.equal(a.reshape(-1), b.reshape(-1).to(a)) for a, b in pairs):
                return None
        return found

    def state_problem(self) -> str | None:
        """What the calls made of the candidate's state that they did not make of the reference's, or None."""
        now, mine = self._state(), _copied(self.reference)
        for its, key in (self._match.keys if self._match is not None else {}).items():
            value, held = mine[key], now.get(its)
            if held is None or held.numel() != value.numel() or held.dtype != value.dtype:
                continue  # its own names: nothing is known of them
            if torch.equal(value, self._mine[key]):
                if not torch.equal(held, self._own[its]):
                    return f"changed its state {its!r}"
            elif difference(value, held.reshape(value.shape), self.tolerance):
                return f"its state {its!r} is not what the calls make of the reference's"
        return None

    def change_parameters(self) -> bool | None:
        """Give both sides new parameters; None where there are none, False where it is not known which of the
        candidate's are which, or one is of another dtype."""
        trained, match = dict(self.reference.named_parameters()), self._match
        if not any(value.is_floating_point() for value in trained.values()):
            return None
        dtypes = {key: str(value.dtype).removeprefix("torch.") for key, value in self._mine.items()}
        if match is None or any(self.model.state_forms[its].dtype != dtypes[key] for its, key in match.keys.items()):
            return False
        with torch.no_grad():
            for value in trained.values():
                if value.is_floating_point():
                    size = float(value.double().square().mean().sqrt()) if value.numel() else 0.0
                    factor = torch.rand(value.shape, device=value.device).add_(0.5).to(value.dtype)
                    # One that begins as zeros (a bias) gets numbers of order 1: with it an answer can be small where
                    # its parts are not, which is where an imprecise one shows.
                    shift = torch.randn(value.shape, device=value.device).mul_(0.1 * size or 1.0).to(value.dtype)
                    value.mul_(factor).add_(shift)
        self.model.load_state(state_for(match, self.reference.state_dict()))
        self._own, self._mine = self._state(), _copied(self.reference)
        return True


def of_itself(reference: torch.nn.Module, contents: Contents, tolerance: float) -> tuple[str | None, float, bool]:
    """(why the reference does not agree with itself, how far two of its answers to one input are apart, whether the
    predicate refuses its answer to another input); on copies, so that its state stays."""
    one, two = copy.deepcopy(reference), copy.deepcopy(reference)
    with torch.no_grad():
        answers = []
        for each in (one, two):
            inputs = contents.draw(11)
            torch.manual_seed(secrets.randbits(31))  # nobody seeds a call of a batch either
            answers.append(each(*inputs))
        first, second = answers
        why = difference(first, second, tolerance)
        apart = _apart(first, two(*contents.draw(12)), tolerance)
    return why, spread(first, second) if why is None else 0.0, apart


def _apart(first: Any, other: Any, tolerance: float) -> bool:
    """Whether the predicate refuses every tensor of one answer for that of another, but for those that are the same:
    one that it takes need not be computed at all, however well the others tell."""
    if isinstance(first, (tuple, list)):
        parts = [(a, b) for a, b in zip(first, other, strict=True) if spread(a, b)]
        return bool(parts) and all(_apart(a, b, tolerance) for a, b in parts)
    return difference(first, other, tolerance) is not None


def _copied(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def _differ(held: list[Any], inputs: list[Any]) -> bool:
    pairs = [(a, b) for a, b in zip(held, inputs, strict=True) if isinstance(a, torch.Tensor)]
    return any(not _equal(a, b) for a, b in pairs)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if torch.equal(a, b):
        return True
    return a.is_floating_point() and bool(a.isnan().any()) and torch.equal(a.nan_to_num(), b.nan_to_num())
