"""Calls upstream's own static checker, from the verified checkout. Must not judge: its words go back as they are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_FILE = Path("src") / "kernelbench" / "kernel_static_checker.py"


def check(kernelbench: Path, candidate: str, precision: str) -> dict[str, Any]:
    """{valid, errors, warnings, backend} of upstream's `validate_kernel_static` on the file's text.

    backend: "cuda" where the text builds an extension, "triton" where it imports triton, else "cupy", of which upstream
    checks no implementation. Raises whatever the checkout's file raises.
    """
    backend = "cuda" if "load_inline" in candidate or "cpp_extension" in candidate else "cupy"
    backend = "triton" if backend == "cupy" and "import triton" in candidate else backend
    spec = importlib.util.spec_from_file_location("kbsub_static_checker", Path(kernelbench) / _FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    valid, errors, warnings = module.validate_kernel_static(candidate, backend=backend, precision=precision)
    return {"valid": bool(valid), "errors": sorted(errors), "warnings": sorted(warnings), "backend": backend}
