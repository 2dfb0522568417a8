"""What may be known of a task's operator, and the default that knows nothing but the task's own Model.

A task declares its operator in task.toml (`operator = "layer_norm"`); nothing is guessed from a Model. A judge asks the
operator and takes None or an empty answer for "not known": then the generic question is asked instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import torch

    from kbsub.adapters.task import Modules
    from kbsub.eval.operators.compare.oracle import Truth
    from kbsub.eval.operators.faults import Faults
    from kbsub.eval.operators.identity import IdentitySuite


class Operator:
    """The default operator. Subclasses stand in packages beside this file, one an operator, as OPERATOR."""

    name: ClassVar[str] = "default"

    def truth(self, model: torch.nn.Module, inputs: Sequence[Any]) -> Truth:
        """The float64 answer of `model` on `inputs`: here the Model itself in float64. Raises OracleError."""
        from kbsub.eval.operators.compare.oracle import model_in_float64

        return model_in_float64(model, inputs)

    def in_cuda_order(self, model: torch.nn.Module) -> Callable[..., torch.Tensor] | None:
        """A forward for CPU tensors that adds in the order of PyTorch's CUDA kernel; None: no such order is known."""
        return None

    def of_constant_rows(self, model: torch.nn.Module, output: torch.Tensor) -> torch.Tensor | None:
        """What rows of one constant must give, exactly, in the shape of `output`; None: nothing is known."""
        return None

    def identity(self, modules: Modules) -> IdentitySuite | None:
        """The bit-identity cases of the task that defines `modules`; None: it is compared with its own Model.

        Raises OracleError for a Model that is not what the operator says, and whatever the task's own program raises.
        """
        return None

    def faults(self, modules: Modules, init_inputs: list[Any]) -> Faults | None:
        """The faults to look for in a candidate of the task that defines `modules`; None: nothing is known.

        Raises what `identity` raises.
        """
        return None
