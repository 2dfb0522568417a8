"""The candidate as the identity judge sees it: instances in a process of its own, set up and called as a case asks.

No line of the candidate is executed here. What goes wrong on its side is a RemoteError of the transport.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from kbsub.eval.operators.identity import IdentitySuite, Outputs, Question
from kbsub.eval.remote.model import RemoteModel, Reply, Worker
from kbsub.eval.remote.probes import Poison
from kbsub.eval.suite.matching import StateMatch, match_state
from kbsub.eval.suite.one_tensor import as_one
from kbsub.eval.suite.setting import form_of, forms_told
from kbsub.eval.tasks.cases import PARAMETERS_NOT_SET

WITH_STATISTICS = "output_with_stats"  # the output of the method that returns the statistics too


class WrongForm(Exception):
    """The candidate returned something that is not the tensors which were asked for; the message says what."""


class Subject:
    """One candidate and its newest instance. `ends_at`: by time.monotonic, when every answer must have come."""

    def __init__(self, worker: Worker, suite: IdentitySuite | None, ends_at: float) -> None:
        self.worker, self.suite, self.ends_at = worker, suite, ends_at
        self.model: RemoteModel | None = None
        self.has_statistics = False
        self.parameters_set = "not at all"  # or how: see `match`
        self._init: list[Any] | None = None
        self._missing: set[str] = set()

    def hurry(self) -> None:
        """Leave the next request no more time than there is, so that a hang is found out before the judge is ended."""
        self.worker.timeout_s = max(1.0, self.ends_at - time.monotonic())

    def build(self, init_inputs: list[Any]) -> RemoteModel:
        """The instance for `init_inputs`: the same list object as before, the same instance."""
        if self.model is not None and self._init is init_inputs:
            return self.model
        if self.model is not None:
            self.model.drop()
            self.model = None
        self.model = self.worker.construct(init_inputs)
        self._init = init_inputs
        self.has_statistics = bool(self.suite and self.suite.method and self.model.has(self.suite.method))
        return self.model

    def match(self, question: Question) -> StateMatch | None:
        """Which of the instance's tensors are the question's state: by key, by order and shape, or by shape."""
        assert self.model is not None
        wanted = {key: form_of(value) for key, value in question.state.items()}
        found = match_state(wanted, forms_told(self.model.state_forms))
        if found is not None:
            self.parameters_set = found.how
        return found

    def has_state(self, question: Question) -> bool:
        return self.model is not None and self.match(question) is not None

    def refusal(self, question: Question, *, bind: bool = False) -> str | None:
        """Set the instance up; why this cannot be asked of this candidate (it is not ours), or None."""
        model = self.build(question.init_inputs)
        match = self.match(question)
        if match is not None:
            state = {its: question.state[mine].view(match.shapes[its]) for its, mine in match.keys.items()}
            model.load_state(state, bind=bind)
        elif question.needs_state:
            wanted = " and ".join(question.state)
            return f"{PARAMETERS_NOT_SET}: neither names, order nor shapes of its state are those of {wanted}"
        for path, value in question.attributes.items():
            if not model.set_attribute(path, value) and question.needs_attributes:
                return f"it has no {path} to set"
        return None

    def run(self, inputs: Sequence[torch.Tensor], seed: int | None = None) -> Outputs:
        """What the instance gives for `inputs`, after torch.manual_seed(seed). RemoteError, WrongForm.

        NaN was left in freed memory before.
        """
        assert self.model is not None
        got = [self._tensors(self.model.call(inputs, poison=Poison(), seed=seed), 1)]
        if self.has_statistics:
            assert self.suite is not None
            reply = self.model.call(inputs, method=self.suite.method, poison=Poison())
            got.append(self._tensors(reply, 1 + len(self.suite.statistics)))
        return self._named([tensor for each in got for tensor in each])

    def capture(self, inputs: Sequence[torch.Tensor]) -> None:
        """Three calls to warm up, and a graph of the next one; on a CPU no graph."""
        assert self.model is not None
        methods = [None, self.suite.method] if self.suite and self.has_statistics else [None]
        self.model.capture(inputs, methods=methods)

    def replay(self, inputs: Sequence[torch.Tensor]) -> Outputs:
        """What the graph gives after `inputs` were put where the captured ones lie; on a CPU, a call."""
        assert self.model is not None
        many = 2 + len(self.suite.statistics) if self.suite and self.has_statistics else 1
        return self._named(self._tensors(self.model.replay(inputs), many))

    def _tensors(self, reply: Reply, many: int) -> list[torch.Tensor]:
        if many == 1 and self.suite is not None and isinstance(reply.value, (tuple, list)):
            if len(reply.value) == 1:  # upstream can compare no list of one; more are told by their shape
                raise WrongForm(f"it returns a {type(reply.value).__name__} of 1, not one tensor")
        value = as_one(reply.value) if many == 1 else reply.value
        found = list(value) if many > 1 and isinstance(value, (tuple, list)) else [value]
        if len(found) != many or not all(isinstance(each, torch.Tensor) for each in found):
            kind = f"{type(value).__name__} of {len(found)}" if len(found) > 1 else type(value).__name__
            raise WrongForm(f"it returns {kind}, not {'one tensor' if many == 1 else f'{many} tensors'}")
        here = str(self.worker.device)
        elsewhere = [fact.device for fact in reply.tensors if fact.device.split(":")[0] != here.split(":")[0]]
        if elsewhere:
            raise WrongForm(f"its output lies on {elsewhere[0]}, the reference's on {here}")
        return found

    def _named(self, tensors: list[torch.Tensor]) -> Outputs:
        if not self.has_statistics or self.suite is None:
            return {"output": tensors[0]}
        return dict(zip(("output", WITH_STATISTICS, *self.suite.statistics), tensors, strict=True))

    def expected(self, question: Question) -> Outputs:
        """Native's answer, for what this candidate returns. ValueError where native has none."""
        native = question.expected()
        if not self.has_statistics:
            return {"output": native["output"]}
        return {"output": native["output"], WITH_STATISTICS: native["output"]} | native
