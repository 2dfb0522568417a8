"""Makes a worker look as the official verdict's process does, so that a candidate behaves as it does there.

Imports, argv, `__main__` and the modules in sight; the environment is the cell's on both sides. It is no secret where a
candidate is, and frames can be walked: what is meant is that nothing differs which a file may look at in passing.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from pathlib import Path
from typing import Any

from kbsub.adapters.evaluator import EvaluatorError, build_folder, import_upstream
from kbsub.eval.process import isolated

OURS_ALONE = ("kbsub.eval.remote", "kbsub.eval.process.frames")  # the official process has never imported these


def dress(like: dict[str, Any], source: str) -> Path:
    """The folder that upstream names to this source as its build folder.

    like: "modules" that the other process has imported, "kernelbench": the checkout that it imports, or None.
    """
    for name in like["modules"]:
        importlib.import_module(name)
    if like["kernelbench"]:
        with contextlib.suppress(EvaluatorError):  # then the official verdict cannot be had here either
            import_upstream(Path(like["kernelbench"]))
    main = types.ModuleType("__main__")
    main.__dict__.update({**vars(isolated), "__name__": "__main__", "imported_main": isolated.main})
    sys.modules["__main__"] = main
    sys.argv[:] = [str(isolated.__file__), sys.argv[1], "0"]
    for name in list(sys.modules):
        if name.startswith(OURS_ALONE):
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(last, None)
            del sys.modules[name]
    return build_folder(source)
