"""NVRTC's answers about a source, kept in the user's cache: a source that did not change is not compiled again.

What is kept is named by everything that the answer depends on: source, options, architecture, NVRTC's version, and the
text of the modules that read it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kbsub.eval.host_executor import compile_gate, cubin_facts
from kbsub.eval.host_executor.build import cache_folder
from kbsub.eval.host_executor.compile_gate import Compiled, Resources

compile_now = compile_gate.compile_source
KEPT_S = 30 * 86400.0  # an answer that no run has asked for longer goes


@functools.cache
def readers() -> str:
    return hashlib.sha256(b"\0".join(Path(m.__file__).read_bytes() for m in (compile_gate, cubin_facts))).hexdigest()


def compile_source(source: str, options: Sequence[str], arch: str) -> Compiled:
    """In the place of compile_gate.compile_source."""
    from cupy_backends.cuda.libs import nvrtc

    key = repr((source, tuple(options), arch, nvrtc.getVersion(), readers()))
    file = cache_folder() / "nvrtc_answers" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        found = from_json(file.read_text("utf-8"))
        os.utime(file)
        return found
    made = compile_now(source, options, arch)
    keep(file, json.dumps(asdict(made)))
    return made


def from_json(text: str) -> Compiled:
    row = json.loads(text)
    resources = {name: Resources(**each) for name, each in row["resources"].items()}
    facts = {name: cubin_facts._from_json(each) for name, each in row["facts"].items()}
    return Compiled(**{**row, "resources": resources, "facts": facts})


def keep(file: Path, text: str) -> None:
    """Written whole or not at all."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as draft:
            draft.write(text)
        os.replace(draft.name, file)
        for other in file.parent.iterdir():
            if other.stat().st_mtime < time.time() - KEPT_S:
                other.unlink(missing_ok=True)
