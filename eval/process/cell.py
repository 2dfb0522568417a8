"""The cell: how far this machine can confine a child process, and how a child is started in it.

Three levels. "namespaces": every mount read-only but a private /tmp, /dev/shm and the cell's own folders, no
capability, no network, no process outside to be seen, no survivor. "landlock": no writing outside the cell's folders,
no TCP, no signal to anybody outside, no survivor. "unconfined": no survivor, a clean environment, nothing else.
`probe` tries them; launcher.py enters them. Must not know what runs in a cell, nor anything else of kbsub.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import platformdirs

LEVELS = ("namespaces", "landlock", "unconfined")  # from the best to none
LEVEL_VARIABLE = "KBSUB_CELL"  # asks for a weaker level, in this process and what it starts; the record says so
LAUNCHER = Path(__file__).with_name("launcher.py")
_PROBE_TIMEOUT_S = 30.0
_OLD_SCRATCH_S = 86400.0

# Of the caller's environment a cell has these and no others: what compilers, CUDA and thread pools read.
KEPT_VARIABLES = frozenset(
    """PATH LANG LC_ALL LC_CTYPE TZ LD_LIBRARY_PATH LIBRARY_PATH CPATH C_INCLUDE_PATH CPLUS_INCLUDE_PATH CC CXX NVCC
    CUDA_HOME CUDA_PATH CUDA_ROOT CUDACXX CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING
    CUDA_MODULE_LOADING NVIDIA_VISIBLE_DEVICES NVIDIA_DRIVER_CAPABILITIES TORCH_CUDA_ARCH_LIST
    CUBLAS_WORKSPACE_CONFIG NCCL_NVLS_ENABLE TORCH_SYMM_MEM_DISABLE_MULTICAST NVSHMEM_DISABLE_NVLS MAX_JOBS
    OMP_NUM_THREADS OMP_PROC_BIND OMP_PLACES MKL_NUM_THREADS OPENBLAS_NUM_THREADS NUMEXPR_NUM_THREADS
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
    """What a child on this machine is confined by: the best level that works, what it lacks, and why none is better."""

    level: str
    lacks: tuple[str, ...]
    why: Mapping[str, str] = field(default_factory=dict)  # a better level -> what stopped it

    def record(self) -> dict[str, Any]:
        """As it stands in a result: {"level", "lacks"}."""
        return {"level": self.level, "lacks": list(self.lacks)}


@dataclass(frozen=True)
class Cell:
    """A place to start children in. `folder` is its own, `folder/cache` what the children may write and is kept.

    Nobody outside reads, writes or removes anything by a name within `folder/cache`: whatever lies there may be a
    link to somewhere else.
    readable: paths below /tmp, /run or /dev that must be seen inside (elsewhere everything is seen); the
    interpreter's own are always. writable: more folders that may be written. level: no better than this one; by
    default what `probe` found. variables: added to the environment. data_limit: bytes of private writable memory.
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
    ) -> subprocess.Popen[bytes]:
        """Start `command` (an absolute path first) inside, in a session of its own; `env` adds to the environment.

        The process ends as the command did, by its signal too, or with launcher.CANNOT_ENTER: it is never weaker
        than `confinement` says. It dies with the thread that started it, and is ended with `end`.
        """
        level = self.confinement().level
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
            "refuse": list(self.refuse),
            "data_limit": self.data_limit,
        }
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(LAUNCHER), json.dumps(specification)],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=self.environment(env or {}, scratch),
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )

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
    folder = Path(platformdirs.user_cache_dir("kbsub")) / "cells" / sha256
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return Path(tempfile.mkdtemp(prefix=f"kbsub-cell-{sha256[:12]}-"))
    return folder if os.access(folder, os.W_OK | os.X_OK) else Path(tempfile.mkdtemp(prefix="kbsub-cell-"))


def probe(level: str | None = None) -> Confinement:
    """What works here, found out by entering it; `level` (or $KBSUB_CELL) asks for no better than that one.

    A level that was asked for is a word in `why`. Kept for the life of this process. ValueError for an unknown level.
    """
    asked = [name for name in (level, os.environ.get(LEVEL_VARIABLE)) if name]
    for name in asked:
        if name not in LEVELS:
            raise ValueError(f"there is no cell called {name!r}; there are: {', '.join(LEVELS)}")
    return _probe(max((LEVELS.index(name) for name in asked), default=0))


@functools.lru_cache(maxsize=None)
def _probe(best: int) -> Confinement:
    why = dict.fromkeys(LEVELS[:best], "a weaker level was asked for")
    for name in LEVELS[best:]:
        lacks, problem = _attempt(name)
        if lacks is not None:
            weaker = () if best == 0 else (f"not asked for more than {LEVELS[best]}",)
            return Confinement(name, (*lacks, *weaker), why)
        why[name] = problem
    return Confinement("unconfined", ("children cannot be started through the launcher",), why)


def _attempt(level: str, refuse: Sequence[str] = ()) -> tuple[list[str] | None, str]:
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
    return None, (words[-1] if words else f"exit code {done.returncode}")[:300]


def _interpreter_paths() -> list[Path]:
    """Where Python, its packages and this one lie: they must be seen inside, wherever they are."""
    places = [sys.prefix, sys.base_prefix, *sys.path, str(Path(__file__).resolve().parents[2])]
    for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        places += [entry, *_links_of(entry)]
    return [Path(place) for place in dict.fromkeys(places) if place and os.path.isdir(place)]


def _links_of(folder: str) -> list[str]:
    """Targets of the links below an import root: of `kbsub`'s three folders, in a checkout under build/types."""
    return [os.path.realpath(path) for path in Path(folder or ".").glob("kbsub/*") if path.is_symlink()]
