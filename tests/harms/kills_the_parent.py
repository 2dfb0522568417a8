"""Ends the run, not its own row: SIGKILL to the parent process, and to the run's own, whose number it knows."""

import os
import signal

import torch.nn as nn

RUN = int(open(os.environ["CASE_PID_FILE"]).read())
refused = []
for pid in (RUN, os.getppid()):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        refused.append(error.strerror)
assert not refused, refused


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
