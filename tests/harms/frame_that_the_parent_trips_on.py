"""A frame with the right token and digest, whose JSON is not what the parent expects."""

import hashlib
import os
import sys

import torch.nn as nn

body = b"{}"
line = b"\n" + os.environ["KBSUB_RUN"].encode() + b" " + hashlib.sha256(body).hexdigest()[:16].encode()
os.write(int(sys.argv[1]), line + b" " + body + b"\n")


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
