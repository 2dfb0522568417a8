"""The cell: how far this machine can confine a child process, and how a child is started in it.

Three levels. "namespaces": every mount read-only but a private /tmp, /dev/shm and the cell's own folders, no
capability, no network, no process outside to be seen, no survivor. "landlock": no writing outside the cell's folders,
no TCP, no signal to anybody outside, no survivor. "unconfined": no survivor, a clean environment, nothing else.
`probe` tries them; launcher.py enters them, and says which one it entered before the command begins. Must not know
what runs in a cell, nor anything else of kbsub.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import select
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import platformdirs

LEVELS = ("namespaces", "landlock", "unconfined")  # from the best to none
AUTO = "auto"  # the best that works; a level that is named is entered or nothing is run
LEVEL_VARIABLE = "KBSUB_CELL"  # names a level, or auto, for this process and what it starts; the record says so
REFUSE_VARIABLE = "KBSUB_CELL_REFUSE"  # for tests, by comma: what counts as refused here, as Cell.refuse
WAY_OUT = {  # what a person can do about a level that is refused
    "namespaces": "allow user namespaces: sysctl kernel.unprivileged_userns_clone=1 user.max_user_namespaces=9999 (on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0); in a container, a seccomp profile that lets unshare pass",
    "landlock": "a kernel (5.13 or later) with Landlock among its security modules (lsm=landlock,...), not masked by "
    "the container's seccomp profile",
    "unconfined": "Linux, where a child can be started through the launcher",
}
LAUNCHER = Path(__file__).with_name("launcher.py")
CELLS = "cells"  # below the user's cache: a folder a candidate
_PROBE_TIMEOUT_S = 30.0
_ENTER_TIMEOUT_S = 60.0
_REPORT_LIMIT = 1 << 16
_PROBING = threading.Lock()
_OLD_SCRATCH_S = 86400.0

# Of the caller's environment a cell has these and no others: what compilers, CUDA, torch's allocator and thread pools
# read. What changes how fast or how exactly a program computes must be here, or it computes otherwise than outside.
KEPT_VARIABLES = frozenset(
    """PATH LANG LC_ALL LC_CTYPE TZ LD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CC CXX NVCC
    CUDA_HOME CUDA_PATH CUDA_ROOT CUDACXX CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_MODULE_LOADING NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES TORCH_CUDA_ARCH_LIST
    CUBLAS_WORKSPACE_CONFIG NCCL_NVLS_ENABLE TORCH_SYMM_MEM_DISABLE_MULTICAST NVSHMEM_DISABLE_NVLS MAX_JOBS
    OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS
    CUDA_MODULE_DATA_LOADING CUDA_DEVICE_MAX_CONNECTIONS CUDA_CACHE_DISABLE CUDA_FORCE_PTX_JIT
    NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
    PYTORCH_NO_CUDA_MEMORY_CACHING OMP_WAIT_POLICY GOMP_CPU_AFFINITY KMP_AFFINITY KMP_BLOCKTIME MALLOC_ARENA_MAX
    PYTHONPATH PYTHONSAFEPATH PYTHONUTF8 PYTHONWARNINGS PYTHONDONTWRITEBYTECODE PYTHONNOUSERSITE
    KBSUB_MEMORY_LIMIT_BYTES""".split()
)
# Every cache that a candidate's packages keep, as folders of its own cache.
CACHE_VARIABLES = {
    "HOME": "home",
    "XDG_CACHE_HOME": "home/.cache",
    "XDG_CONFIG_HOME": "home/.config",
    "XDG_DATA_HOME": "home/.local/share",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TRITON_HOME": "home",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "CUPY_CACHE_DIR": "cupy",
    "CUDA_CACHE_PATH": "nv",
    "KBSUB_HOST_CACHE": "host",
    "MPLCONFIGDIR": "home/.config/matplotlib",
}


@dataclass(frozen=True)
class Confinement:
    """What a child on this machine is confined by: the level, what it lacks, and why it is none that is better."""

    level: str
    lacks: tuple[str, ...]
    why: Mapping[str, str] = field(default_factory=dict)  # a better level -> what stopped it

    def record(self) -> dict[str, Any]:
        """As it stands in a result: {"level", "lacks"}, and "why" in words where there is a better level."""
        reasons = "; ".join(dict.fromkeys(f"{level}: {words}" for level, words in self.why.items()))
        return {"level": self.level, "lacks": list(self.lacks), **({"why": reasons} if reasons else {})}

    def __str__(self) -> str:
        return in_words(self.record())


def in_words(record: Mapping[str, Any] | None) -> str:
    """The `confined` of a result in a few words: "namespaces", "unconfined: <why>"."""
    if not record:
        return "not recorded"
    return ": ".join(str(record[key]) for key in ("level", "why") if record.get(key))


class CellProcess(subprocess.Popen[bytes]):
    """A child in a cell. `why`: of each better level, what stopped it. `refusal`: why it could not be entered."""

    report: IO[bytes] | None = None  # the launcher's, which closes its end before the command begins
    why: Mapping[str, str] = {}
    refusal = ""
    _entered: Confinement | None = None

    def entered(self, timeout_s: float = _ENTER_TIMEOUT_S) -> Confinement | None:
        """What the child is confined by, in the words of the launcher, said before the command began. None: it never
        began, and `refusal` says why."""
        if self.report is not None:
            with self.report as report:
                self.report = None
                said = _read_report(report.fileno(), time.monotonic() + timeout_s)
            self.refusal = str(said.get("refused", ""))
            if "level" in said:
                self._entered = Confinement(said["level"], tuple(said["lacks"]), self.why)
        return self._entered


def _read_report(descriptor: int, deadline: float) -> dict[str, Any]:
    """One line of JSON of the launcher's; what is missing of it is a refusal."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _REPORT_LIMIT:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return {"refused": "it was not entered in time"}
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return {"refused": "the launcher ended before it was entered"}
        text += chunk
    said: dict[str, Any] = json.loads(text)
    return said


@dataclass(frozen=True)
class Cell:
    """A place to start children in. `folder` is its own, `folder/cache` what the children may write and is kept.

    Nobody outside reads, writes or removes anything by a name within `folder/cache`: whatever lies there may be a
    link to somewhere else.
    readable: paths below /tmp, /run or /dev that must be seen inside (elsewhere everything is seen); the
    interpreter's own are always. writable: more folders that may be written. level: this one and no other; by
    default $KBSUB_CELL, else what `probe` found. variables: added to the environment. data_limit: bytes of private
    writable memory.
    refuse: for tests, what the launcher takes as refused here ("unshare", "proc", "mount_setattr", "landlock").
    """

    folder: Path
    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    level: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    data_limit: int | None = None
    refuse: tuple[str, ...] = ()

    @property
    def cache(self) -> Path:
        return self.folder.absolute() / "cache"

    def confinement(self) -> Confinement:
        """What is to be expected; what a child is really confined by, `CellProcess.entered` says."""
        return probe(self.level)

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        stderr: Any = None,
    ) -> CellProcess:
        """Start `command` (an absolute path first) inside, in a session of its own; `env` adds to the environment.

        The process ends as the command did, by its signal too, or with launcher.CANNOT_ENTER: it is never weaker
        than `confinement` says, nor than a level that was asked for. It dies with the thread that started it, and is
        ended with `end`.
        """
        found = self.confinement()
        level = asked_for(self.level) or found.level
        self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = self._scratch() if level != "namespaces" else None
        specification = {
            "level": level,
            "parent": os.getpid(),
            "command": list(command),
            "readable": [str(path) for path in (*_interpreter_paths(), *self.readable) if path.exists()],
            "writable": [str(path) for path in (self.cache, *((scratch,) if scratch else ()), *self.writable)],
            "scratch": [str(scratch)] if scratch else [],
            "folders": [str(self.cache / name) for name in CACHE_VARIABLES.values()],
            "cwd": os.getcwd(),
            "refuse": [*self.refuse, *_refused()],
            "data_limit": self.data_limit,
        }
        receive, send = os.pipe()
        report = os.fdopen(receive, "rb", buffering=0)
        try:
            child = CellProcess(
                [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps({**specification, "report": send})],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=self.environment(env or {}, scratch),
                pass_fds=(*pass_fds, send),
                start_new_session=True,
            )
        except BaseException:
            report.close()
            raise
        finally:
            os.close(send)
        child.report, child.why = report, {name: found.why.get(name, "") for name in LEVELS[: LEVELS.index(level)]}
        return child

    def end(self, child: subprocess.Popen[bytes], grace_s: float = 6.0) -> None:
        """End a process that `popen` started and everything it started; its exit code stays that of its own end."""
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)  # the launcher kills all, which SIGKILL would not let it do
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    def environment(self, added: Mapping[str, str], scratch: Path | None = None) -> dict[str, str]:
        """The child's environment, made anew: no variable of the caller's but KEPT_VARIABLES."""
        kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
        caches = {name: str(self.cache / folder) for name, folder in CACHE_VARIABLES.items()}
        temporary = str(scratch or "/tmp")
        own = {"TMPDIR": temporary, "USER": "kbsub", "LOGNAME": "kbsub", "PATH": kept.get("PATH", os.defpath)}
        own["PYTHONUSERBASE"] = site.getuserbase()  # HOME is another one inside, the packages are not
        return {**kept, **caches, **own, **self.variables, **added}

    def _scratch(self) -> Path:
        """A private temporary folder; the launcher removes it, and here go those it could not."""
        folder = self.folder.absolute() / "scratch"
        folder.mkdir(exist_ok=True, mode=0o700)
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                if entry.lstat().st_mtime < time.time() - _OLD_SCRATCH_S:
                    shutil.rmtree(entry, ignore_errors=True)
        scratch = folder / secrets.token_hex(8)
        scratch.mkdir(mode=0o700)
        return scratch


def candidate_folder(sha256: str) -> Path:
    """The folder of one candidate's cells, with its cache: below the user's cache, else a fresh temporary one.

    ValueError for anything but 64 hexadecimal digits, which could name a place elsewhere.
    """
    if re.fullmatch(r"[0-9a-f]{64}", sha256) is None:
        raise ValueError(f"{sha256!r} is no sha256: a candidate's cache is named by the 64 digits of its file's")
    folder = Path(platformdirs.user_cache_dir("kbsub")) / CELLS / sha256
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"kbsub-cell-{sha256[:12]}-"))
    return folder if os.access(folder, os.W_OK | os.X_OK) else Path(tempfile.mkdtemp(prefix="kbsub-cell-"))


def asked_for(level: str | None = None) -> str | None:
    """The level that a Cell's `level` and $KBSUB_CELL name, the weaker of two; None: the best that works.

    ValueError for an unknown one.
    """
    names = [name for name in (level, os.environ.get(LEVEL_VARIABLE)) if name and name != AUTO]
    for name in names:
        if name not in LEVELS:
            raise ValueError(f"there is no cell called {name!r}; there are: {', '.join((*LEVELS, AUTO))}")
    return max(names, key=LEVELS.index, default=None)


def probe(level: str | None = None) -> Confinement:
    """What works here, found out by entering it; `level` (or $KBSUB_CELL) asks for no better than that one.

    Kept for the life of this process. ValueError for an unknown level.
    """
    asked = asked_for(level)
    with _PROBING:  # whoever asks meanwhile waits for the answer, and does not find it out a second time
        return _probe(LEVELS.index(asked) if asked else 0, _refused())


def _refused() -> tuple[str, ...]:
    return tuple(filter(None, os.environ.get(REFUSE_VARIABLE, "").split(",")))


@functools.lru_cache(maxsize=None)
def _probe(best: int, refused: tuple[str, ...]) -> Confinement:
    why = dict.fromkeys(LEVELS[:best], "a weaker level was asked for")
    for name in LEVELS[best:]:
        lacks, problem = attempt(name, refused)
        if lacks is not None:
            return Confinement(name, tuple(lacks), why)
        why[name] = problem
    return Confinement("unconfined", ("children cannot be started through the launcher",), why)


def each_level() -> dict[str, Confinement | str]:
    """Every level with what it lacks here, or the reason why it cannot be entered."""
    found: dict[str, Confinement | str] = {}
    for name in LEVELS:
        lacks, problem = attempt(name, _refused())
        found[name] = problem if lacks is None else Confinement(name, tuple(lacks))
    return found


def attempt(level: str, refuse: Sequence[str] = ()) -> tuple[list[str] | None, str]:
    """Enter `level` with no command: (what it lacks, "") or (None, why it cannot be entered)."""
    with tempfile.TemporaryDirectory(prefix="kbsub-cell-probe-") as folder:
        specification = {
            "level": level,
            "parent": os.getpid(),
            "command": None,
            "readable": [str(path) for path in _interpreter_paths()],
            "writable": [folder],
            "scratch": [],
            "cwd": "/",
            "refuse": list(refuse),
        }
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(specification)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{type(error).__name__}: {error}"
    if done.returncode == 0:
        return json.loads(done.stdout), ""
    words = done.stderr.decode("utf-8", "replace").strip().splitlines()
    last = words[-1].removeprefix("the cell cannot be entered: ") if words else f"exit code {done.returncode}"
    return None, last[:300]


def _interpreter_paths() -> list[Path]:
    """Where Python, its packages and this one lie: they must be seen inside, wherever they are."""
    places = [sys.prefix, sys.base_prefix, *sys.path, str(Path(__file__).resolve().parents[2])]
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        places += [entry, *_links_of(entry)]
    return [Path(place) for place in dict.fromkeys(places) if place and os.path.isdir(place)]


def _links_of(folder: str) -> list[str]:
    """Targets of the links below an import root: of `kbsub`'s three folders, in a checkout under build/types."""
    return [os.path.realpath(path) for path in Path(folder or ".").glob("kbsub/*") if path.is_symlink()]
