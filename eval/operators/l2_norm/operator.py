"""What is known of this norm: unit_norm has all of it."""

from __future__ import annotations

from typing import ClassVar

from kbsub.eval.operators.unit_norm.formula import Norm
from kbsub.eval.operators.unit_norm.unit_norm import UnitNorm


class L2NormOperator(UnitNorm):
    name: ClassVar[str] = "l2_norm"
    norm = Norm.L2


OPERATOR = L2NormOperator()
