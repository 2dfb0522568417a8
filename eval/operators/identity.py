"""What the identity judge asks of an operator: cases as data, and native's answer to each.

An operator that can pose such cases returns an IdentitySuite. Nothing here, and nothing that implements it, knows a
candidate or runs one: the judge does, in a process of the candidate's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

Outputs: TypeAlias = "dict[str, torch.Tensor]"
FULL_SIZE = "full size"  # the group of cases at the task's own shape
SECRET = "secret"  # the group of those with a secret seed
SECRET_INPUTS = ("normal", "x100", "+1000")  # kinds of full size that are drawn, beside the task's own


@dataclass(frozen=True)
class Setting:
    """What the cases of one run share. full: the declared shapes, else small ones. contract: of candidates.toml.

    hosted: the candidate's kernels are executed on the CPU; native's answer is then a model of its order on CUDA.
    """

    device: torch.device
    dtype: torch.dtype
    contract: str
    full: bool
    hosted: bool


@dataclass(frozen=True)
class Question:
    """One case: what is set up, what is called, and what native gives for it.

    label: name, group, shape, seed, input and the like, as they stand in the record. init_inputs: of ModelNew; the same
    list object as in the question before means the same instance. state: every tensor of the state dict by key, to be
    loaded; needs_state: the case means nothing to a candidate with other keys. attributes: by path, to be set;
    needs_attributes: it means nothing to a candidate without them. expected: the outputs of native, "output" first,
    then the statistics; ValueError where it has none.
    """

    label: dict[str, Any]
    init_inputs: list[Any]
    state: Mapping[str, torch.Tensor]
    needs_state: bool
    attributes: Mapping[str, Any]
    needs_attributes: bool
    inputs: list[torch.Tensor]
    expected: Callable[[], Outputs]


class IdentitySuite:
    """The identity cases of one task, in the order in which their random numbers must be drawn.

    method, statistics: a candidate that has this method returns from it (output, *statistics), and they are judged too.
    """

    method: str = ""
    statistics: tuple[str, ...] = ()

    def count(self, setting: Setting) -> int:
        """How many `questions` there are."""
        raise NotImplementedError

    def questions(self, setting: Setting) -> Iterator[Question]:
        """Each case, drawn when it is asked for: tensors of a question may be overwritten by the next."""
        raise NotImplementedError

    def secret(self, setting: Setting, seed: int) -> Iterator[Question]:
        """A few of the task's own shape, drawn from a seed that no candidate knows: in group SECRET, in no count."""
        raise NotImplementedError

    def timed(self, setting: Setting, with_state: bool) -> Question:
        """The timed input of upstream, for repeated runs and for the change in place; random state, or none."""
        raise NotImplementedError

    def change(self, setting: Setting, question: Question) -> dict[str, Any]:
        """Change the inputs and the state of `question` in place (addresses stay); what was done, for the record."""
        raise NotImplementedError
