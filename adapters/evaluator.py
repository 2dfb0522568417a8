"""Calls upstream's own evaluator, unmodified, from the verified checkout. Runs in a child process only.

Knows how upstream's package is imported and how its scripts call it. Must not judge: whatever the evaluator returns,
None included, goes back as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kbsub.adapters.task import CORRECTNESS_TRIALS, PERFORMANCE_TRIALS, Task

TIMING_METHOD = "cuda_event"
# A name that upstream does not know, so that it takes the plain path: exec in the reference's dict.
BACKEND = "cupy"
# Clients that upstream's `utils` imports and its evaluator never calls, with the names it takes from each.
CLIENTS = {"openai": "OpenAI", "litellm": "completion", "dotenv": "load_dotenv"}

_STAND_IN = "Inert stand-in of kb-submissions: the package is not installed, and the evaluator does not use it."


class EvaluatorError(Exception):
    """Upstream's package cannot be imported; the message says what is missing and how to mend it."""


@dataclass(frozen=True)
class Upstream:
    """The imported `kernelbench.eval`, and the names of the client modules that were stood in for."""

    module: types.ModuleType
    stand_ins: tuple[str, ...]


def stand_in_for_missing_clients() -> tuple[str, ...]:
    """Put an inert module where one of upstream's client packages is not installed; returns the stand-ins' names."""
    for name in _missing_clients():
        if name not in sys.modules:
            module = types.ModuleType(name, _STAND_IN)
            setattr(module, CLIENTS[name], _inert(name))
            sys.modules[name] = module
    return _missing_clients()


def write_stand_ins(folder: Path) -> Path:
    """`folder`, made if need be, for the PYTHONPATH of upstream's scripts, with an inert module for each client package
    that is not installed: a local run only loads the (absent) .env with one of them."""
    folder.mkdir(exist_ok=True)
    for name in _missing_clients():
        (folder / f"{name}.py").write_text(f"def {CLIENTS[name]}(*arguments, **options):\n    return False\n")
    return folder


def _missing_clients() -> tuple[str, ...]:
    """Those that are not installed; a stand-in in this process does not count (nor has it a spec to be found by)."""

    def is_missing(name: str) -> bool:
        if name in sys.modules:
            return sys.modules[name].__doc__ == _STAND_IN
        return importlib.util.find_spec(name) is None

    return tuple(name for name in sorted(CLIENTS) if is_missing(name))


def _inert(name: str) -> Callable[..., bool]:
    def client(*arguments: Any, **options: Any) -> bool:
        if name == "dotenv":  # called while upstream's utils are imported: there is no .env to load
            return False
        raise RuntimeError(f"{name} is not installed; this is the inert stand-in of kb-submissions")

    return client


def import_upstream(kernelbench: Path) -> Upstream:
    """Import `kernelbench.eval` from the root of a verified checkout. Raises EvaluatorError when it cannot be."""
    source = Path(kernelbench) / "src"
    if str(source) not in sys.path:
        sys.path.insert(0, str(source))
    stand_ins = stand_in_for_missing_clients()
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode  # the checkout stays as it was fetched
    try:
        module = importlib.import_module("kernelbench.eval")
    except ImportError as error:
        raise EvaluatorError(f"upstream's evaluator needs {error.name or error}: pip install {error.name}") from error
    finally:
        sys.dont_write_bytecode = before
    origin = Path(module.__file__ or "").resolve()
    if not origin.is_relative_to(source.resolve()):
        raise EvaluatorError(f"kernelbench was imported from {origin.parent}, not from the checkout {source}")
    return Upstream(module, stand_ins)


def evaluate(
    upstream: Upstream,
    task: Task,
    candidate: str,
    device: str,
    progress: Callable[[dict[str, Any]], None],
    *,
    build_of: str | None = None,
) -> Any:
    """What upstream's `eval_kernel_against_ref` returns for `candidate` (source text), called as its scripts do.

    5 correctness trials, 100 timed, measured, `cuda_event`, with a build folder of the candidate's own. Verbose only
    prints, between trials: those lines become progress events. build_of: another text whose build folder is used, so
    that what was built for it is not built again. Whatever escapes the evaluator is raised here.
    """
    import torch

    listener = _Listener(sys.stdout, progress)
    with ExitStack() as stack:
        stack.callback(listener.release)
        stack.enter_context(redirect_stdout(listener))
        return upstream.module.eval_kernel_against_ref(
            original_model_src=task.source,
            custom_model_src=candidate,
            num_correct_trials=CORRECTNESS_TRIALS,
            num_perf_trials=PERFORMANCE_TRIALS,
            measure_performance=True,
            timing_method=TIMING_METHOD,
            verbose=True,
            build_dir=str(build_folder(build_of or candidate)),
            device=torch.device(device if ":" in device else f"{device}:0"),
            backend=BACKEND,
            precision=task.dtype,
        )


def serialisable(upstream: Upstream, metadata: dict[str, Any]) -> dict[str, Any]:
    """Upstream's own conversion: metadata may hold exception objects."""
    return dict(upstream.module.check_metadata_serializable_all_types(metadata))


def verbatim(upstream: Upstream, returned: Any) -> dict[str, Any]:
    """Upstream's object as JSON: {official, timing, reference}; nulls when it returned None.

    Its `runtime` and `ref_runtime` are ms (its comments say us), rounded by upstream to 3 significant digits.
    """
    if returned is None:
        return {"official": {"compiled": None, "correctness": None, "trials": None, "metadata": {}}}
    metadata = serialisable(upstream, returned.metadata)
    official = {
        "compiled": returned.compiled,
        "correctness": returned.correctness,
        "trials": metadata.get("correctness_trials"),
        "metadata": metadata,
        "runtime": returned.runtime,
        "runtime_stats": returned.runtime_stats,
        "ref_runtime": returned.ref_runtime,
        "ref_runtime_stats": returned.ref_runtime_stats,
    }
    block: dict[str, Any] = {"official": official}
    if returned.runtime_stats:
        block["timing"] = {TIMING_METHOD: timing_of(returned.runtime_stats)}
    if returned.ref_runtime_stats:
        block["reference"] = {TIMING_METHOD: timing_of(returned.ref_runtime_stats)}
    return block


def timing_of(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Upstream's get_timing_stats (ms, 3 significant digits) under the keys that a result file uses."""
    return {
        "mean_ms": stats["mean"],
        "std_ms": stats["std"],
        "min_ms": stats["min"],
        "max_ms": stats["max"],
        "trials": stats["num_trials"],
    }


def build_folder(candidate: str) -> Path:
    """Where extensions of this very source are built: in the user cache, or else a temporary folder."""
    import platformdirs

    folder = platformdirs.user_cache_path("kbsub") / "extensions" / hashlib.sha256(candidate.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="kbsub-"))
    return folder


class _Listener:
    """stdout that passes upstream's verbose lines on and says where it is: which trial, which seed.

    The lines of timed trials wait in memory until something else is printed. Writes between two timed trials leave the
    host's caches cold: with them a 0.290 ms kernel (upstream's silent scripts, H200) read 0.309 ms.
    """

    def __init__(self, stream: Any, progress: Callable[[dict[str, Any]], None]) -> None:
        self.stream, self.progress = stream, progress
        self.line, self.trial, self.held = "", 0, list[str]()

    def write(self, text: str) -> int:
        if text.startswith("Trial ") or (self.held and text == "\n"):
            self.held.append(text)
            return len(text)
        self.release()
        self.stream.write(text)
        *lines, self.line = (self.line + text).split("\n")
        for line in lines:
            self._read(line)
        return len(text)

    def release(self) -> None:
        """Passes on what waited."""
        self.stream.write("".join(self.held))
        self.held.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)  # `buffer`, `encoding`, `fileno` ...: a candidate finds the real stdout's

    def _read(self, line: str) -> None:
        if line.startswith("[Eval] Loading Original Model"):
            self.progress({"stage": "reference"})
        elif line.startswith("[Eval] Loading and Compiling New Model"):
            self.progress({"stage": "loading"})
        elif match := re.match(r"\[Eval\] Generating Random Input with seed (\d+)", line):
            self.trial += 1
            self.progress({"stage": "trial", "index": self.trial, "of": CORRECTNESS_TRIALS, "seed": int(match[1])})
        elif line.startswith("[Eval] Measuring Performance"):
            self.progress({"stage": "timing"})
        elif line.startswith("[Eval] Additional checks to flag excessive speedup"):
            self.progress({"stage": "reference timing"})
