"""Child of test_golden: the official shape through the host executor. argv: candidate stem, index into golden.OFFICIAL.

Prints one JSON line: seconds of the forward, peak resident bytes (this process, its workers), mean and rstd bits.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import torch

from kbsub.eval.host_executor import H200_LIMITS, host_namespace
from kbsub.eval.measure import golden
from support.host_run import source_of

stem, case = sys.argv[1], golden.OFFICIAL[int(sys.argv[2])]
torch.set_num_threads(1)
space = host_namespace(source_of(stem), H200_LIMITS)
model = space["ModelNew"]((case.n,))
x, gamma, beta = golden.inputs(case)
model.load_state_dict({"ln.weight": torch.from_numpy(gamma), "ln.bias": torch.from_numpy(beta)})
started = time.monotonic()
with torch.no_grad():
    y, mean, rstd = model.forward_with_stats(torch.from_numpy(x))
seconds = time.monotonic() - started
# Not RUSAGE_SELF: across fork and exec Linux hands down the peak of the process that started this one.
own = next(line for line in Path("/proc/self/status").read_text("ascii").splitlines() if line.startswith("VmHWM:"))
peak = max(int(own.split()[1]), resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
row = y[5].numpy()
print(json.dumps({
    "seconds": seconds, "peak_bytes": peak, "finite": bool(torch.isfinite(y).all()), "row": golden.digest(row, "fp32"),
    "mean": golden.patterns(mean.numpy()), "rstd": golden.patterns(rstd.numpy()),
}))  # fmt: skip
