"""Notices what a candidate does outside its tensors: global state, patched functions, files, threads, live objects.

Three means. Snapshots of process-wide state, compared and put back after every stretch of candidate code. An audit
hook (PEP 578), which no Python code can remove, active only while candidate code runs. Recording wrappers for the few
calls that raise no audit event. It shares a process with the candidate, so it stops known tricks, not a determined
attacker who patches this module's own memory; the parent process, which owns the result, is out of such code's reach.
"""

from __future__ import annotations

import _thread
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy
import torch

from kbsub.eval.verdicts.guards.rig import cuda_is_up

# Functions of torch.nn.functional, and parts of the names of the dispatcher's operators: no candidate may replace them,
# and one with kernels of its own may not call them.
NORMALISATIONS = ("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm")

# (owner, attribute): what the clocks, the barriers, the comparison and the reference of an evaluator are made of.
WATCHED_FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((time, name) for name in ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")),
    *((time, name) for name in ("process_time", "process_time_ns", "sleep")),
    *((torch.cuda, name) for name in ("synchronize", "Event", "Stream", "current_stream", "empty_cache")),
    *((torch.cuda.Event, name) for name in ("record", "synchronize", "elapsed_time", "query", "wait")),
    *((torch.cuda.Stream, name) for name in ("synchronize", "record_event", "wait_stream")),
    *((torch, name) for name in ("allclose", "equal", "isclose", "manual_seed", "rand", "randn", "empty", "no_grad")),
    *((torch.Tensor, name) for name in ("allclose", "equal", "isclose", "clone", "__eq__", "to", "shape")),
    *((torch.nn.Module, name) for name in ("__call__", "to", "load_state_dict")),
    *((torch.nn.functional, name) for name in NORMALISATIONS),
)

# (owner, attribute) of the process-wide switches that decide which kernel runs and how it rounds.
BACKEND_FLAGS: tuple[tuple[Any, str], ...] = (
    *((torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
    *(
        (torch.backends.cuda.matmul, name)
        for name in (
            "allow_tf32",
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
        )
    ),
    (torch.backends.mkldnn, "enabled"),
)

# Audit event: (which argument is the path, which one the descriptor of the folder it is relative to).
_WRITE_EVENTS = {
    "os.rename": (1, 3),
    "os.remove": (0, 1),
    "os.truncate": (0, None),
    "os.link": (1, 3),
    "os.symlink": (1, 2),
    "os.chmod": (0, 2),
}
_SEARCH_EVENTS = ("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames")
_PROCESS_EVENTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec", "pty.spawn")
# Standard modules that only carry a call on; whoever called them is the one who asked.
_CARRIERS = {"threading", "_threading_local", "subprocess", "os", "inspect", "gc", "traceback", "contextlib"}
_CARRIER_PACKAGES = ("multiprocessing", "concurrent")


def writable_folders() -> tuple[Path, ...]:
    """Folders a candidate may write to: the temporary folder and the build caches."""
    home = Path.home()
    places = [Path(tempfile.gettempdir()), home / ".cache", home / ".triton", home / ".cupy", home / ".nv"]
    variables = (
        "XDG_CACHE_HOME",
        "CUPY_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TORCH_EXTENSIONS_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "PYTHONPYCACHEPREFIX",
    )
    places += [Path(os.environ[name]) for name in variables if os.environ.get(name)]
    return tuple(Path(os.path.realpath(place)) for place in places)


def _asker(frame: FrameType | None) -> FrameType | None:
    """The nearest frame that is not a carrier."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module not in _CARRIERS and not module.startswith(_CARRIER_PACKAGES) and module != __name__:
            return frame
        frame = frame.f_back
    return None


class Watch:
    """Collects (guard, message) pairs in `events` while candidate code runs inside `with watch.candidate(where):`.

    `context` is the dict the candidate's text was executed in: a frame with these globals, or without a real file,
    is the candidate's own; library code that it calls is not.
    """

    def __init__(self, context: dict[str, Any], protected: tuple[Path, ...] = ()) -> None:
        self.context = context
        self.events: list[tuple[str, str]] = []
        self.protected = tuple(Path(os.path.realpath(path)) for path in (*protected, Path.cwd()))
        self.allowed = writable_folders()
        self.armed = False
        self.where = ""
        self.descriptors = _open_descriptors()
        self._functions = [(owner, name, _raw(owner, name)) for owner, name in WATCHED_FUNCTIONS]
        self._install()

    # ---- running candidate code ----

    @contextmanager
    def candidate(self, where: str, *, compare_rng: bool = True) -> Iterator[None]:
        """Run candidate code: the hook is on, and afterwards global state is compared with before and put back."""
        before = self._state()
        self.armed, self.where = True, where
        try:
            yield
        finally:
            self.armed = False
            self._compare(before, compare_rng)

    def report(self, guard: str, message: str) -> None:
        """Add an event once."""
        if (guard, message) not in self.events:
            self.events.append((guard, message))

    def messages(self, guard: str) -> list[str]:
        return [message for name, message in self.events if name == guard]

    # ---- snapshots ----

    def _state(self) -> dict[str, Any]:
        return {
            "rng": _rng_state(),
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "flags": [_flag(owner, name) for owner, name in BACKEND_FLAGS],
            "matmul": torch.get_float32_matmul_precision(),
            "deterministic": (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            "threads": torch.get_num_threads(),
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cuda"),
            "stream": torch.cuda.current_stream() if cuda_is_up() else None,
        }

    def _compare(self, before: dict[str, Any], compare_rng: bool) -> None:
        now = self._state()
        for source, state in before["rng"].items():
            if not _same(state, now["rng"].get(source)):
                if compare_rng:
                    self.report("rng_changed", f"{self.where} moved the global generator of {source}")
        _restore_rng(before["rng"])
        for kind in ("dtype", "device"):
            if now[kind] != before[kind]:
                self.report("default_dtype_changed", f"{self.where} set the default {kind} to {now[kind]}")
                (torch.set_default_dtype if kind == "dtype" else torch.set_default_device)(before[kind])
        for (owner, name), old, new in zip(BACKEND_FLAGS, before["flags"], now["flags"], strict=True):
            if old != new:
                label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
                self.report("backend_flags_changed", f"{self.where} set {label} from {old} to {new}")
                if not isinstance(old, str):
                    setattr(owner, name, old)
        if now["matmul"] != before["matmul"]:
            self.report("backend_flags_changed", f"{self.where} set the fp32 matmul precision to {now['matmul']}")
            torch.set_float32_matmul_precision(before["matmul"])
        if now["deterministic"] != before["deterministic"]:
            self.report("backend_flags_changed", f"{self.where} switched deterministic algorithms")
            torch.use_deterministic_algorithms(before["deterministic"][0], warn_only=before["deterministic"][1])
        if now["threads"] != before["threads"]:
            self.report("backend_flags_changed", f"{self.where} set torch's thread count to {now['threads']}")
            torch.set_num_threads(before["threads"])
        for kind in ("grad", "inference", "autocast"):
            if now[kind] != before[kind]:
                self.report("grad_mode_changed", f"{self.where} left {kind} mode at {now[kind]}")
        torch.set_grad_enabled(before["grad"])
        if now["autocast"] != before["autocast"]:
            torch.set_autocast_enabled("cuda", before["autocast"])
        if now["stream"] != before["stream"]:
            self.report("side_stream_not_joined", f"{self.where} left another CUDA stream current")
            torch.cuda.set_stream(before["stream"])
        for owner, name, old in self._functions:
            if self._replaced(_raw(owner, name), old):
                label = f"{getattr(owner, '__name__', owner)}.{name}"
                self.report("timers_patched", f"{self.where} replaced {label}")
                setattr(owner, name, old)

    def _replaced(self, now: Any, old: Any) -> bool:
        """Whether a watched function is another one. Importing torch._dynamo wraps some of torch's own; a function
        with the globals of a torch module is torch's."""
        if now is old:
            return False
        home = getattr(now, "__globals__", {}).get("__spec__")
        return not str(getattr(home, "name", "")).startswith("torch")

    # ---- the audit hook and the wrappers ----

    def _install(self) -> None:
        sys.addaudithook(self._audit)

        def record(function: Callable[..., Any], what: str) -> Callable[..., Any]:
            def wrapper(*arguments: Any, **keywords: Any) -> Any:
                if self.armed:
                    self._started(what)
                return function(*arguments, **keywords)

            return wrapper

        # Python raises no audit event for threads before 3.12; the private names are what `threading` bound at import.
        for owner, name in (
            (_thread, "start_new_thread"),
            (_thread, "start_new"),
            (_thread, "start_joinable_thread"),
            (threading, "_start_new_thread"),
            (threading, "_start_joinable_thread"),
        ):
            if hasattr(owner, name):
                setattr(owner, name, record(getattr(owner, name), "a thread"))
        threading.Thread.start = record(threading.Thread.start, "a thread")  # type: ignore[method-assign]
        for name in ("write", "pwrite", "writev", "pwritev", "sendfile", "dup", "dup2", "splice"):
            if hasattr(os, name):
                setattr(os, name, self._descriptor_call(name, getattr(os, name)))

    def _descriptor_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **keywords: Any) -> Any:
            if self.armed and arguments:
                self._descriptor(arguments[1] if name == "splice" else arguments[0], f"os.{name}")
            return function(*arguments, **keywords)

        return wrapper

    def _descriptor(self, number: Any, how: str) -> None:
        if isinstance(number, int) and number in self.descriptors and _opened_on(number) == self.descriptors[number]:
            self.report("result_written", f"{self.where} used file descriptor {number}, which it did not open ({how})")

    def _started(self, what: str) -> None:
        if self._asked_by_candidate():
            self.report("thread_started", f"{self.where} started {what}")

    def _asked_by_candidate(self) -> bool:
        """Whether the nearest frame that is not a carrier is the candidate's own code."""
        self.armed = False  # looking at a frame raises an audit event itself
        frame = sys._getframe(1)
        self.armed = True
        asker = _asker(frame)
        return asker is not None and (asker.f_globals is self.context or "__spec__" not in asker.f_globals)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & _WRITING)
            if isinstance(path, int):
                if writes:
                    self._descriptor(path, "open")
            elif writes and isinstance(path, (str, bytes, os.PathLike)):
                self._path(path, "opened for writing")
        elif event in _WRITE_EVENTS:
            at, folder_at = _WRITE_EVENTS[event]
            path = arguments[at] if len(arguments) > at else None
            folder = arguments[folder_at] if folder_at is not None and len(arguments) > folder_at else -1
            if isinstance(path, (str, bytes, os.PathLike)):
                self._path(_below(folder, path), event)
        elif event in _SEARCH_EVENTS:
            if self._asked_by_candidate():
                self.report(
                    "live_objects_searched", f"{self.where} called {event}: the expected output can be found so"
                )
        elif event in _PROCESS_EVENTS:
            self._started("a process")

    def _path(self, path: Any, how: str) -> None:
        text = os.fsdecode(path)
        if text == os.devnull:
            return
        if text.startswith(("/proc/", "/dev/fd")):
            self.report("result_written", f"{self.where}: {text} {how}")
            return
        real = Path(os.path.realpath(text))
        if real.parent.name == "__pycache__":
            return  # an import that the candidate caused
        inside = [folder for folder in self.protected if real == folder or folder in real.parents]
        caches = [folder for folder in self.allowed if folder in real.parents]
        # The nearer folder decides: a working directory inside the temporary folder is still protected.
        deepest = max((len(folder.parts) for folder in caches), default=0)
        if not caches or any(len(folder.parts) > deepest for folder in inside):
            name = next((real.relative_to(folder) for folder in inside if real != folder), real.name)
            self.report("result_written", f"{self.where}: {name} {how}; a candidate writes to the caches only")


def _below(folder: Any, path: Any) -> str:
    """`path`, which shutil.rmtree gives relative to an open folder; as it is where that folder cannot be told."""
    text = os.fsdecode(path)
    if not isinstance(folder, int) or folder < 0:
        return text
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    except OSError:
        return text


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _raw(owner: Any, name: str) -> Any:
    """The attribute as it is stored, not what a lookup makes of it (a method newly bound at each look)."""
    for place in owner.__mro__ if isinstance(owner, type) else (owner,):
        if name in vars(place):
            return vars(place)[name]
    return getattr(owner, name, None)


def _open_descriptors() -> dict[int, tuple[int, int]]:
    """Descriptors above stderr that are open now, with what they are open on: a number is used again after a close."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = list(range(256))
    found = {number: _opened_on(number) for number in numbers if number > 2}
    return {number: what for number, what in found.items() if what is not None}


def _opened_on(number: int) -> tuple[int, int] | None:
    try:
        facts = os.fstat(number)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
    }
    if cuda_is_up():
        state["CUDA"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["random"])
    numpy.random.set_state(state["numpy"])
    if "CUDA" in state:
        torch.cuda.set_rng_state(state["CUDA"])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, numpy.ndarray):
        return isinstance(other, numpy.ndarray) and bool(numpy.array_equal(one, other))
    return bool(one == other)


def _flag(owner: Any, name: str) -> Any:
    """A switch's value. torch refuses to read the old TF32 names once the new ones were used: that is a value, too."""
    try:
        return getattr(owner, name)
    except (AttributeError, RuntimeError) as error:
        return f"unreadable ({type(error).__name__})"
