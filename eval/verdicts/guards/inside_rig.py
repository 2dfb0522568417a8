"""The rig of the guards that can only ask inside the candidate's own process, where the watch is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kbsub.adapters.task import SEED, Modules, Task
from kbsub.eval.suite.setting import forms_of
from kbsub.eval.verdicts.guards.rig import Made, Pair, Rig, one_tensor
from kbsub.eval.verdicts.guards.watch import Watch


class InsideRig(Rig):
    """A rig whose candidate is executed in this process, watched."""

    def __init__(
        self, task: Task, modules: Modules, device: torch.device, calls: int, model: type[Any], watch: Watch
    ) -> None:
        super().__init__(task, modules, device, calls)
        self.model, self.watch = model, watch
        self.own_kernels = bool(modules.context.get("CUDA_SOURCE"))

    def construct(self, arguments: list[Any]) -> Made:
        torch.manual_seed(SEED)
        # The constructor may draw its initial weights, so the generator is not compared here.
        with self.watch.candidate("the constructor", compare_rng=False):
            candidate = self.model(*arguments).to(device=self.device, dtype=self.dtype)

        def load(state: Mapping[str, torch.Tensor]) -> None:
            candidate.load_state_dict(state, strict=False)

        return Made(candidate, forms_of(candidate), candidate.state_dict, load)

    def call(self, pair: Pair, inputs: list[Any], *, grad: bool = False) -> torch.Tensor:
        compare_rng = not self.reference_draws
        with torch.set_grad_enabled(grad), self.watch.candidate("forward", compare_rng=compare_rng):
            output = pair.candidate(*inputs)
        output = one_tensor(output)
        return output.detach() if type(output) is torch.Tensor else output

    def raw_call(self, pair: Pair, inputs: list[Any]) -> Any:
        """Like `call` under no_grad, but returns whatever came back."""
        with torch.no_grad(), self.watch.candidate("forward", compare_rng=not self.reference_draws):
            return pair.candidate(*inputs)
