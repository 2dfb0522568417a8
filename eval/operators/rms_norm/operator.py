"""What is known of this norm: unit_norm has all of it."""

from __future__ import annotations

from typing import ClassVar

from kbsub.eval.operators.unit_norm.formula import Norm
from kbsub.eval.operators.unit_norm.unit_norm import UnitNorm


class RmsNormOperator(UnitNorm):
    name: ClassVar[str] = "rms_norm"
    norm = Norm.RMS


OPERATOR = RmsNormOperator()
