"""Puts one file's cubin under another file's key: the entry's digest covers its own bytes only, so it holds."""

import os
import pathlib

import torch.nn as nn

folder = pathlib.Path(os.environ["CASE_CUBIN_CACHE"])
entries = sorted(folder.iterdir())
assert len(entries) > 1, "this case is out of date"
for entry, other in zip(entries, entries[1:] + entries[:1]):  # noqa: B905
    entry.with_suffix(".new").write_bytes(other.read_bytes())
for entry in entries:
    os.replace(entry.with_suffix(".new"), entry)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
