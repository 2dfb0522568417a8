"""The rig of the guards that compare values: the candidate is in a worker, and no line of it runs here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from kbsub.adapters.task import Modules, Task
from kbsub.eval.process.isolated import JudgeFailure, Status
from kbsub.eval.remote.model import RemoteModel, Reply
from kbsub.eval.remote.probes import Poison
from kbsub.eval.suite.confined import Confined, Lost, sent
from kbsub.eval.suite.setting import forms_told
from kbsub.eval.verdicts.guards.applicability import NotApplicable
from kbsub.eval.verdicts.guards.rig import Made, Pair, Rig, one_tensor

T = TypeVar("T")


class RemoteRig(Rig):
    """A rig whose candidate is asked through the transport. `last`: what is known of the last call.

    What goes wrong on the candidate's side is a RemoteError; its ValueError (CandidateRefused) is a refusal.
    """

    last: Reply

    def __init__(self, task: Task, modules: Modules, device: torch.device, calls: int, confined: Confined) -> None:
        super().__init__(task, modules, device, calls)
        self.confined = confined
        self._model: RemoteModel | None = None

    def construct(self, arguments: list[Any]) -> Made:
        if self._model is not None:
            self._model.drop()  # one instance at a time: memory
            self._model = None
        try:
            worker = self.confined.start()
        except Lost as why:
            raise JudgeFailure(Status.CRASHED, str(why)) from why
        model = self._model = _sent(lambda: worker.construct(arguments))

        def load(state: Mapping[str, torch.Tensor]) -> None:
            if state:
                _sent(lambda: model.load_state(state))

        return Made(model, forms_told(model.state_forms), lambda: _sent(model.state), load)

    def first(self) -> Pair:
        """A pair whose candidate is the first instance of a fresh process, as it is under upstream's evaluator."""
        self._model = None
        self.confined.close()
        return self.build()

    def call(
        self,
        pair: Pair,
        inputs: list[Any],
        *,
        grad: bool = False,
        same: bool = False,
        touch: bool = False,
        poison: Poison | None = None,
        keep: int | None = None,
    ) -> torch.Tensor:
        """See Rig.call; the others are those of RemoteModel.call. The same tensors come at the same addresses."""
        self.last = _sent(
            lambda: pair.candidate.call(inputs, grad=grad, same=same, touch=touch, poison=poison, keep=keep)
        )
        return one_tensor(self.last.value)

    def read(self, pair: Pair, keep: int, inputs: list[Any]) -> torch.Tensor:
        """What the call that said `keep` returned, as it is after `inputs` were put where the last call's lie."""
        return one_tensor(_sent(lambda: pair.candidate.read(keep, inputs)).value)

    def on_current_stream(self, pair: Pair, inputs: list[Any], poison: Poison) -> tuple[torch.Tensor, torch.Tensor]:
        """The output behind slow work on the worker's current stream (CUDA): as read there at once, and at last."""
        value = _sent(lambda: pair.candidate.on_current_stream(inputs, poison)).value
        seen, finished = value if isinstance(value, list) and len(value) == 2 else (value, value)
        return one_tensor(seen), one_tensor(finished)


def _sent(ask: Callable[[], T]) -> T:
    return sent(ask, NotApplicable)
