"""Compile a candidate's CUDA_SOURCE, unedited, with the machine's C++ compiler; keep the result in the user cache.

Contraction is off (`-ffp-contract=off`), arithmetic IEEE: whatever the kernel wants fused it must write as `__fmaf_rn`.
Of the NVRTC options only -D (and -U) reach the host compiler; those that would change bits are refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

from kbsub.eval.process.isolated import JudgeFailure, Status

HERE = Path(__file__).parent
HEADERS = HERE / "include"
RUNTIME_SOURCES = ("launch.cpp", "blocks.cpp", "device.cpp", "faults.cpp")
CACHE_VARIABLE = "KBSUB_HOST_CACHE"  # another folder for compiled kernels, for tests and read-only homes

MAX_CACHED = 2000  # builds of about 50 KB; a run of all tests uses some 400
COMMON_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fcf-protection=none")
KERNEL_FLAGS = (
    "-fno-strict-aliasing",  # CUDA sources reinterpret float as float4
    "-mtls-dialect=gnu",
    "-ftls-model=global-dynamic",  # every __shared__ access goes through the header's own __tls_get_addr
    "-fno-extern-tls-init",
    "-fsanitize=alignment",  # a misaligned float4 is a fault on the device, and must be one here
    "-fsanitize-undefined-trap-on-error",
    "-fno-exceptions",
    "-w",  # warnings are the compile gate's business (compile_gate.py), with the device's own compiler
)
# Options that ask for other arithmetic than IEEE: the host build could not follow them.
REFUSED_OPTION = re.compile(r"^--?(use_fast_math|ftz=true|prec-div=false|prec-sqrt=false)$")
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)")
DEFINED_NUMBER = re.compile(r"(?:-D|--define-macro=)(\w+)=(\d+)$")
KERNEL_NAME = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(')
MODULE_VARIABLE = re.compile(
    r"^\s*(?:static\s+)?__device__\s+[^(){};]*?(\w+)\s*(?:\[[^\]]*\])?\s*(?:=[^;]*)?;", re.MULTILINE
)


class HostUnavailable(JudgeFailure):
    """This machine cannot run kernels on the host at all; as a judge's failure it is a NOT_RUN row."""

    def __init__(self, message: str) -> None:
        super().__init__(Status.NOT_RUN, message)


class HostBuildError(RuntimeError):
    """The source cannot be built for the host; the text has the compiler's own words, with lines of CUDA_SOURCE."""


@dataclass(frozen=True)
class HostKernel:
    """A kernel of a host library: its entry (taking the addresses of its arguments) and its parameter codes."""

    name: str
    call: Any
    parameters: tuple[str, ...]  # 'p' a pointer; 'i4' 'u4' 'i8' 'u8' 'f4' 'f8' a scalar


@dataclass(frozen=True)
class HostLibrary:
    """A compiled CUDA_SOURCE. `source_path` holds exactly its text."""

    kernels: dict[str, HostKernel]
    static_bytes: int  # static shared memory of all kernels together
    source_path: Path


def compiler() -> str:
    """GCC: $CXX, else g++, else c++. HostUnavailable where there is none."""
    given = os.environ.get("CXX")
    tried = (given,) if given else ("g++", "c++")
    name = " or ".join(tried)
    found = next(filter(None, map(shutil.which, tried)), None)
    if found is not None and "Free Software Foundation" not in _compiler_version(found):
        raise HostUnavailable(f"{found} is not GCC, which the host build needs: install g++ or point CXX at it")
    if found is None:
        raise HostUnavailable(f"no C++ compiler ({name}) on PATH: install g++ (Debian: apt-get install g++) or set CXX")
    return found


def require_host() -> None:
    """HostUnavailable, with the way out, where kernels cannot be built and run on the CPU."""
    compiler()
    _machine_flags()


def cache_folder() -> Path:
    """Where compiled kernels are kept: $KBSUB_HOST_CACHE, else the user cache, else a folder of this process."""
    wanted = os.environ.get(CACHE_VARIABLE)
    folder = Path(wanted) if wanted else Path(platformdirs.user_cache_dir("kbsub")) / "host"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError:
        return _private_folder()
    return folder if os.access(folder, os.W_OK | os.X_OK) else _private_folder()


@functools.lru_cache(maxsize=None)
def _private_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="kbsub-host-"))


@functools.lru_cache(maxsize=None)
def _machine_flags() -> tuple[str, ...]:
    """A hardware fma where the CPU has one: the same bits as the library's, many times faster."""
    if platform.machine() != "x86_64":
        raise HostUnavailable(f"the host executor has x86-64 code and does not run on {platform.machine()}")
    try:
        words = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        words = []
    return ("-mfma",) if "fma" in words else ()


@functools.lru_cache(maxsize=None)
def _compiler_version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout


@functools.lru_cache(maxsize=None)
def _headers_digest() -> str:
    paths = sorted([*HEADERS.glob("*.h"), *(HERE / name for name in (*RUNTIME_SOURCES, "runtime.h"))])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _compile(stem: str, files: dict[str, str], flags: Sequence[str], sources: Sequence[str]) -> Path:
    """The folder that holds `<stem>.so` and the written `files`: from the cache, else compiled there.

    Compiled in a draft folder and renamed when it is whole, so that other processes see all of a build or nothing; the
    one that comes second uses the build of the first, which is the same.
    """
    cxx = compiler()
    command = [cxx, *COMMON_FLAGS, *_machine_flags(), *flags]
    facts = (command[1:], files, _headers_digest(), _compiler_version(cxx))
    cache = cache_folder()
    final = cache / f"{stem}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"
    if _taken(final, stem):
        return final
    with _locked(cache):
        _prune(cache)
    draft = Path(tempfile.mkdtemp(prefix=f"{stem}-draft-", dir=cache))
    try:
        for name, text in files.items():
            (draft / name).write_bytes(text.encode())
        done = subprocess.run(
            [*command, *sources, "-o", f"{stem}.so"], cwd=draft, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise HostBuildError(f"the host build failed ({Path(cxx).name}):\n{done.stderr[:4000]}")
        with _locked(cache):
            if not (final / f"{stem}.so").is_file():
                shutil.rmtree(final, ignore_errors=True)  # half an entry, which somebody's interrupted removal left
                draft.rename(final)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return final


def _locked(cache: Path) -> FileLock:
    """Held while entries of the cache are put in, taken or removed (never while something is compiled).

    It lies in the machine's temporary folder: a home on a network may know no locks.
    """
    name = hashlib.sha256(str(cache.resolve()).encode()).hexdigest()[:24]
    return FileLock(Path(tempfile.gettempdir()) / f"kbsub-host-{name}.lock")


def _taken(final: Path, stem: str) -> bool:
    """Whether a finished build is there; it then counts as used now, so that no other process prunes it."""
    if not (final / f"{stem}.so").is_file():
        return False
    with _locked(final.parent):
        if not (final / f"{stem}.so").is_file():
            return False  # pruned since the line above
        with contextlib.suppress(OSError):
            os.utime(final)
        return True


def _prune(folder: Path) -> None:
    """Keep the cache small: beyond MAX_CACHED builds the longest unused ones go, but none of the last hour.

    Drafts of other processes come, are renamed and go while the folder is read: what has gone is no entry.
    """
    entries: list[tuple[float, Path]] = []
    for entry in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            entries.append((entry.stat().st_mtime, entry))
    for used, entry in sorted(entries)[: max(0, len(entries) - MAX_CACHED)]:
        if used < time.time() - 3600:
            shutil.rmtree(entry, ignore_errors=True)


@functools.lru_cache(maxsize=None)
def runtime() -> ctypes.CDLL:
    """The runtime (fibers, scheduler, fault handling), loaded so that kernels find it."""
    sources = [str(HERE / name) for name in RUNTIME_SOURCES]
    folder = _compile("runtime", {}, (), sources)
    library = ctypes.CDLL(str(folder / "runtime.so"), mode=ctypes.RTLD_GLOBAL)
    library.kbsub_report_bytes.restype = ctypes.c_size_t
    library.kbsub_static_bytes.restype = ctypes.c_size_t
    library.kbsub_static_bytes.argtypes = [ctypes.c_void_p]
    return library


def kernel_names(source: str, options: Sequence[str] | None = None) -> list[str]:
    """Names of the `extern "C" __global__` kernels of a source, in order: all, or those there are under `options`.

    Of conditions only `#if NAME == NUMBER` is decided, by -DNAME=NUMBER or a #define; what any other guards counts.
    """
    if options is not None:
        source = _under(source, options)
    return list(dict.fromkeys(KERNEL_NAME.findall(LAUNCH_BOUNDS.sub(" ", source))))


def _under(source: str, options: Sequence[str]) -> str:
    """The lines of a source that are there under `options`, as far as `kernel_names` decides it."""
    values = {found[1]: found[2] for option in options if (found := DEFINED_NUMBER.match(option))}
    kept: list[str] = []
    decided: list[bool | None] = []  # per open #if: whether its lines are there; None where nobody says
    for line in source.splitlines():
        if default := re.match(r"\s*#\s*define\s+(\w+)\s+(\d+)\b", line):
            if False not in decided:
                values.setdefault(default[1], default[2])
        elif re.match(r"\s*#\s*if", line):
            equal = re.match(r"\s*#\s*if\s+(\w+)\s*==\s*(\d+)\s*(?://.*)?$", line)
            decided.append(values[equal[1]] == equal[2] if equal and equal[1] in values else None)
        elif decided and re.match(r"\s*#\s*elif", line):
            decided[-1] = None
        elif decided and re.match(r"\s*#\s*else\b", line):
            decided[-1] = None if decided[-1] is None else not decided[-1]
        elif decided and re.match(r"\s*#\s*endif\b", line):  # one too many is the compiler's to name
            decided.pop()
        if False not in decided:
            kept.append(line)
    return "\n".join(kept)


def _definitions(options: Sequence[str]) -> tuple[str, ...]:
    for option in options:
        if REFUSED_OPTION.match(option):
            raise HostBuildError(f"NVRTC option {option} changes the arithmetic: the host executor is IEEE only")
    joined = [re.sub(r"^--define-macro=?", "-D", option) for option in options]
    return tuple(option for option in joined if re.match(r"^-[DU]\w", option))


@functools.lru_cache(maxsize=None)
def build(source: str, options: tuple[str, ...] = ()) -> HostLibrary:
    """The host library of `source` under NVRTC `options`. HostBuildError when it cannot be built or has no kernel."""
    names = kernel_names(source, options)
    if not names:
        raise HostBuildError('CUDA_SOURCE has no kernel of the form: extern "C" __global__ void name(...)')
    variable = MODULE_VARIABLE.search(source)
    if variable:
        raise HostBuildError(
            f"module-level __device__ variable {variable[1]}: not supported (each worker would have its own copy); "
            "pass a tensor instead"
        )
    exports = "".join(f"KBSUB_EXPORT({name})\n" for name in names)
    files = {
        "candidate.cu": source,
        "library.cpp": f'#include "candidate.cu"\n#include "kbsub_host_export.h"\n{exports}',
    }
    include = ("-DKBSUB_HOST", f"-I{HEADERS}", "-include", "kbsub_host.h")
    folder = _compile("kernels", files, (*KERNEL_FLAGS, *_definitions(options), *include), ["library.cpp"])
    core = runtime()
    library = ctypes.CDLL(str(folder / "kernels.so"))
    library.kbsub_find_dynamic()
    kernels = {name: HostKernel(name, *_entry(library, name)) for name in names}
    static_bytes = core.kbsub_static_bytes(ctypes.cast(library.kbsub_find_dynamic, ctypes.c_void_p))
    return HostLibrary(kernels, static_bytes, folder / "candidate.cu")


def _entry(library: ctypes.CDLL, name: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    signature = getattr(library, f"kbsub_signature_{name}")
    signature.restype = ctypes.POINTER(ctypes.c_char_p)
    codes = []
    for code in signature():
        if code is None:
            break
        codes.append(code.decode())
    return getattr(library, f"kbsub_call_{name}"), tuple(codes)
