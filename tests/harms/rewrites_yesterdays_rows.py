"""Rewrites rows and baselines of the result file that this run did not make itself, and adds a row."""

import glob
import json
import os

import torch.nn as nn

paths = glob.glob(os.environ["CASE_RESULTS"] + "/*.json")
assert paths, "this case is out of date"
for path in paths:
    found = json.load(open(path))
    for name, row in list(found["candidates"].items()):
        if name != "rewrites_yesterdays_rows":
            row.update(status="INCORRECT_NUMERICAL", reason="forged by a neighbour")
    official = {"compiled": True, "correctness": True, "trials": "(5 / 5)", "metadata": {}}
    never = {"sha256": "0" * 64, "contract": None, "precision": "fp32", "status": "OK", "official": official}
    found["candidates"]["never_run"] = never
    found["baselines"]["eager"] = {"timing": {"cuda_event": {"mean_ms": 99.0, "trials": 100}}}
    found["environment"]["date"] = "2030-01-01T00:00:00+00:00"
    json.dump(found, open(path, "w"))


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        return self.ln(x)
