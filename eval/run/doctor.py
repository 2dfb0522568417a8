"""What this machine can certify, and what is missing: findings, and the abilities that follow from them.

Every probe that imports a big package runs in a child process, because a broken installation may crash on import.
Must not judge a candidate and must not change anything; only the commands it prints do.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kbsub.adapters.checkout import CheckoutError, find_checkout
from kbsub.eval.process.cell import CELLS, WAY_OUT, Confinement, each_level
from kbsub.eval.process.isolated import Status, run_isolated

PROBE_TIMEOUT_S = 120.0
# A kernel of one line: that NVRTC compiles it for a GPU that is not here is what the compile gate needs.
PROBE_KERNEL = 'extern "C" __global__ void probe(float* y, float x) { y[threadIdx.x] = x; }'
PROBE_ARCH = "sm_90"
COMPILERS = ("g++", "c++")  # as eval/host_executor/build.py, which needs GCC


@dataclass(frozen=True)
class Finding:
    """One fact about the machine: what was found, and the command that mends it where it is not good."""

    name: str
    good: bool
    found: str
    mend: str = ""


@dataclass(frozen=True)
class Ability:
    """Something the project certifies, and the findings it needs; `missing` is filled in from them."""

    name: str
    needs: tuple[str, ...]
    missing: tuple[str, ...] = ()


# The order is the order of the report.
ABILITIES = (
    Ability("official verdict (KernelBench's own evaluator)", ("torch", "GPU", "checkout", "git")),
    Ability("CUDA candidates on the GPU", ("torch", "GPU", "CuPy", "NVRTC")),
    Ability("bit identity with native LayerNorm", ("torch", "GPU", "CuPy", "NVRTC")),
    Ability("timing, comparison, baselines", ("torch", "GPU", "checkout", "git")),
    Ability("stress, oracle and guards on the GPU", ("torch", "GPU", "CuPy", "NVRTC")),
    Ability("stress and oracle on the CPU", ("torch",)),
    Ability("CUDA candidates on the CPU (host executor)", ("torch", "C++20 compiler")),
    Ability("compile gate for every architecture", ("CuPy", "NVRTC")),
    Ability("plots", ("matplotlib",)),
    Ability("batches on several GPUs or machines", ("dask.distributed",)),
    Ability("a cell for other people's files (SECURITY.md)", ("cell namespaces",)),
)


def examine(kernelbench: Path | None = None) -> list[Finding]:
    """Every finding, in the order of the report. Raises nothing: what cannot be found out is a finding."""
    return [
        *probe_packages(),
        probe_checkout(kernelbench),
        probe_git(),
        probe_compiler(),
        probe_module("matplotlib", "matplotlib", "pip install 'kb-submissions[plots]'"),
        probe_module("dask.distributed", "distributed", "pip install 'kb-submissions[cluster]'"),
        *cell_findings(each_level()),
        probe_cache(),
    ]


def abilities(findings: Iterable[Finding], table: Iterable[Ability] = ABILITIES) -> list[Ability]:
    """`table` with what each ability lacks; a finding that was never made counts as missing."""
    good = {finding.name for finding in findings if finding.good}
    return [replace(row, missing=tuple(need for need in row.needs if need not in good)) for row in table]


def probe_packages() -> list[Finding]:
    """torch, GPU, CuPy and NVRTC, each from a child process."""
    torch_value, torch_error = _ask("kbsub.eval.run.doctor:torch_facts")
    cupy_value, cupy_error = _ask("kbsub.eval.run.doctor:cupy_facts")
    return [*torch_findings(torch_value, torch_error, nvidia_driver()), *cupy_findings(cupy_value, cupy_error)]


def _ask(target: str) -> tuple[Mapping[str, Any], str]:
    outcome = run_isolated(target, {}, timeout_s=PROBE_TIMEOUT_S)
    if outcome.status is Status.OK and outcome.value is not None:
        return outcome.value, ""
    return {}, outcome.message or outcome.status.value


def torch_facts(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Target of the torch probe: version, the CUDA it was built for, and the GPUs it sees."""
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    works = ""
    if names:
        try:
            torch.ones(1, device="cuda").add_(1).item()
        except Exception as error:  # any failure of the first launch is the finding
            works = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {"version": torch.__version__, "cuda": torch.version.cuda, "gpus": names, "error": works}


def torch_findings(facts: Mapping[str, Any], error: str, driver: str) -> list[Finding]:
    """The findings "torch" and "GPU"; `driver` is the CUDA version of the NVIDIA driver, "" without one."""
    if not facts:
        mend = "pip install torch"
        return [Finding("torch", False, error, mend), Finding("GPU", False, "unknown without torch", mend)]
    built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
    torch = Finding("torch", True, f"{facts['version']}, {built}")
    if facts["gpus"] and not facts["error"]:
        return [torch, Finding("GPU", True, f"{', '.join(facts['gpus'])}; driver for CUDA {driver or '?'}")]
    if facts["gpus"]:
        return [torch, Finding("GPU", False, f"{facts['gpus'][0]}: {facts['error']}", "install a torch for this GPU")]
    if not driver:
        return [torch, Finding("GPU", False, "no NVIDIA driver", "run on a machine with an NVIDIA GPU and its driver")]
    found = f"driver for CUDA {driver}, but torch ({built}) sees no GPU"
    return [torch, Finding("GPU", False, found, "rm -rf .venv && make setup, which chooses the torch for this driver")]


def nvidia_driver() -> str:
    """The CUDA version of the NVIDIA driver, as nvidia-smi prints it ("13.0"), or ""."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run([program], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    _, mark, after = done.stdout.partition("CUDA Version:")
    return after.split()[0] if mark and after.split() else ""


def cupy_facts(payload: dict[str, Any], progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Target of the CuPy probe: CuPy's version, NVRTC's, and whether NVRTC compiles for a GPU that is not here."""
    import cupy
    from cupy_backends.cuda.libs import nvrtc

    facts: dict[str, Any] = {"cupy": cupy.__version__, "nvrtc": None, "error": ""}
    try:
        facts["nvrtc"] = list(nvrtc.getVersion())
        program = nvrtc.createProgram(PROBE_KERNEL, "probe.cu", [], [])
        nvrtc.compileProgram(program, ["--gpu-architecture=" + PROBE_ARCH])
        facts["error"] = "" if nvrtc.getCUBIN(program) else "no cubin came out"
    except Exception as error:  # the binding raises its own types, and RuntimeError where no library is found
        facts["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return facts


def cupy_findings(facts: Mapping[str, Any], error: str) -> list[Finding]:
    """The findings "CuPy" and "NVRTC"."""
    mend = "pip install 'kb-submissions[cuda13]', or [cuda12] for a driver of CUDA 12"
    if not facts:
        if "PermissionError" in error or "Read-only file system" in error:  # it is there, and makes ~/.cupy on import
            mend = "set CUPY_CACHE_DIR to a folder that you can write to"
        return [Finding("CuPy", False, error, mend), Finding("NVRTC", False, "unknown without CuPy", mend)]
    cupy = Finding("CuPy", True, facts["cupy"])
    version = ".".join(map(str, facts["nvrtc"] or ["?"]))
    if facts["error"]:
        return [cupy, Finding("NVRTC", False, f"{version}: {facts['error']}", mend)]
    if tuple(facts["nvrtc"]) < (12, 8):
        return [cupy, Finding("NVRTC", False, f"{version} does not know sm_100 and sm_120", mend)]
    return [cupy, Finding("NVRTC", True, f"{version}, compiles for {PROBE_ARCH}")]


def probe_checkout(kernelbench: Path | None) -> Finding:
    """Whether the pinned checkout is there and verified."""
    try:
        found = find_checkout(kernelbench)
    except CheckoutError as error:
        return Finding("checkout", False, *_split_mend(str(error)))
    return Finding("checkout", True, f"{found.commit[:12]} in {found.path}, verified")


def _split_mend(text: str) -> tuple[str, str]:
    for mark in (". Mend it with: ", ". Get it with: "):
        if mark in text:
            why, mend = text.split(mark, 1)
            return why, mend
    return text, "kbsub fetch"


def probe_git() -> Finding:
    """Whether git, which verifies the checkout, is on PATH."""
    program = shutil.which("git")
    return Finding("git", program is not None, program or "not on PATH", "" if program else "install git")


def probe_compiler() -> Finding:
    """GCC that takes -std=c++20: $CXX, else the first of g++ and c++ on PATH."""
    name = "C++20 compiler"
    tried = [os.environ["CXX"]] if os.environ.get("CXX") else list(COMPILERS)
    program = next(filter(None, map(shutil.which, tried)), None)
    if program is None:
        return Finding(name, False, f"none of {', '.join(tried)} on PATH", "install g++ (10 or later)")
    source = "#if !defined(__GNUC__) || defined(__clang__)\n#error not GCC\n#endif\n"
    source += "#include <bit>\nint main() { return std::bit_cast<int>(1.0f) == 0; }\n"
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "-std=c++20", "-x", "c++", "-", "-o", str(Path(folder, "probe"))]
        try:
            done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(name, False, f"{program}: {error}", "install g++ (10 or later)")
    if done.returncode:
        first = (done.stderr.strip().splitlines() or ["failed"])[0]
        return Finding(name, False, f"{program}: {first}", "install g++ (11 or later), or set CXX")
    return Finding(name, True, program)


def probe_module(name: str, module: str, mend: str) -> Finding:
    """Whether a Python module is installed, without importing it."""
    there = importlib.util.find_spec(module) is not None
    return Finding(name, there, "installed" if there else "not installed", "" if there else mend)


def cell_findings(found: Mapping[str, Confinement | str]) -> list[Finding]:
    """One finding a level of confinement: what it lacks, or the reason why this machine refuses it."""
    findings = []
    for level, what in found.items():
        if isinstance(what, str):
            findings.append(Finding(f"cell {level}", False, what, WAY_OUT[level]))
        else:
            lacks = f"; does not protect: {', '.join(what.lacks)}" if what.lacks else ""
            findings.append(Finding(f"cell {level}", True, f"can be entered{lacks}"))
    return findings


def probe_cache() -> Finding:
    """Whether the user cache can be written, and what lies there: candidates' own caches (cells), builds, checkouts."""
    import platformdirs

    folder = platformdirs.user_cache_path("kbsub")
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    good = os.access(nearest, os.W_OK)
    parts = []
    for part in sorted(folder.iterdir()) if folder.is_dir() and os.access(folder, os.R_OK | os.X_OK) else []:
        size, many = folder_size(part)
        parts.append(f"{part.name} {size / 1e6:.1f} MB" + (f" of {many} candidates" if part.name == CELLS else ""))
    found = f"{folder}: {', '.join(parts) or 'empty'}"
    return Finding("user cache", good, found, "" if good else f"make {nearest} writable or set XDG_CACHE_HOME")


def clear_caches(names: Sequence[str]) -> dict[str, int]:
    """Delete parts of the user cache: name -> bytes that it had. "all": every part.

    Raises ValueError for a name that is no part, before anything is deleted. A link is removed, never followed.
    """
    import platformdirs

    folder = platformdirs.user_cache_path("kbsub")
    there = {part.name: part for part in sorted(folder.iterdir())} if folder.is_dir() else {}
    if unknown := [name for name in names if name not in there and name != "all"]:
        raise ValueError(f"{unknown[0]}: no such part of {folder}; there are {', '.join(there) or 'none'}, or all")
    found = {}
    for name in there if "all" in names else dict.fromkeys(names):
        part = there[name]
        whole = part.is_dir() and not part.is_symlink()
        found[name] = folder_size(part)[0] if whole else part.lstat().st_size
        if whole:
            shutil.rmtree(part)
        else:
            part.unlink()
    return found


def folder_size(folder: Path) -> tuple[int, int]:
    """(bytes of all files below it, its entries). Follows no link; what cannot be read counts nothing."""
    size, entries = 0, 0
    for place, folders, files in os.walk(folder):
        entries = entries or len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(place, name)).st_size
    return size, entries


def python_line() -> str:
    """The interpreter that everything above was found with."""
    return f"Python {sys.version.split()[0]} at {sys.executable}"
