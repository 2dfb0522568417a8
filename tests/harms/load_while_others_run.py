"""Leaves two busy processes (45 s, then they end) with an empty environment: the rows after this one are slowed."""

import os
import subprocess
import sys

import torch.nn as nn

BUSY = "import time\nend = time.time() + 45\nwhile time.time() < end: pass # " + os.environ["CASE_MARK"]
nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
for _ in range(2):
    subprocess.Popen([sys.executable, "-c", BUSY], env={}, start_new_session=True, **nothing)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
