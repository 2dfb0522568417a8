"""Puts another library where the host executor keeps a neighbour's kernels, and into a neighbour's own cache."""

import glob
import os

import torch.nn as nn

files = glob.glob(os.environ["CASE_HOST_CACHE"] + "/kernels-*/kernels.so")
files += glob.glob(os.environ["CASE_CELLS"] + "/*/cache/host/kernels-*/kernels.so")
refused = []
for file in files:
    try:
        with open(file + ".new", "wb") as new:
            new.write(b"other arithmetic")
        os.replace(file + ".new", file)
    except OSError as error:
        refused.append(error.strerror)
assert len(files) == 2 and not refused, (files, refused)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
