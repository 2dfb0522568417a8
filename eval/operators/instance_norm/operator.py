"""What is known of an InstanceNorm2d without parameters: group_norm has all of it."""

from __future__ import annotations

from typing import ClassVar

import torch

from kbsub.eval.operators.group_norm.operator import GroupNormOperator


class InstanceNormOperator(GroupNormOperator):
    name: ClassVar[str] = "instance_norm"
    kind: ClassVar[type[torch.nn.Module]] = torch.nn.InstanceNorm2d


OPERATOR = InstanceNormOperator()
