"""Preloaded into a worker of the local cluster: Ctrl-C is for the one who asked, which ends it.

A handler of Python's own, not SIG_IGN: what a worker starts must not inherit it.
"""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Called by dask in the worker's main thread."""
    signal.signal(signal.SIGINT, lambda number, frame: None)
