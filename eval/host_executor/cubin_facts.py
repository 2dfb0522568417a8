"""What a compiled kernel says of itself: registers, shared memory, launch bounds and parameters, read from the cubin.

    compiled_facts(source, ("--std=c++17",), "sm_90")["rows_held_8"].max_threads        # 512

A cubin is an ELF file. Section `.nv.info` has the registers of every kernel, `.nv.info.KERNEL` its launch bounds and
parameters, `.nv.shared.KERNEL` its static shared memory. NVIDIA documents the names of the attributes (`cuobjdump -elf`
prints them), not their layout: tests/test_launch_limits.py compares what is read here with kernels whose facts are
known. Must not know devices or launches: launch_limits.py has the rules.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kbsub.eval.host_executor.build import cache_folder

# Attributes of .nv.info (EIATTR_...), by number.
MAX_THREADS, KPARAM_INFO, REQNTID, REGCOUNT = 0x05, 0x17, 0x10, 0x2F
CTA_PER_CLUSTER, KPARAM_INFO_V2 = 0x3D, 0x45  # the second is for kernels whose parameters exceed 4 KiB
WITH_SIZE = 4  # the format of an attribute whose last field is the size of what follows; in others it is the value
SYSTEM_SHARED_BYTES = 1024  # the system's own in each block
SYSTEM_SECTION = ".nv.shared.reserved.0"  # a cubin that has it (from sm_90 on) counts them in each kernel's section
MOST_KEPT = 4000  # files of facts, of about 2 KB, in the user's cache

_ENTRY = re.compile(r"\.entry\s+(\w+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)\d+")


class NotCompiled(RuntimeError):
    """NVRTC is not installed, or does not compile this source; the text says which and the way out."""


class NoNvrtc(NotCompiled):
    """NVRTC is not installed."""


@dataclass(frozen=True)
class Parameter:
    """Where one argument goes: `offset` and `size` in bytes; `real` for a floating-point scalar (from the PTX)."""

    offset: int
    size: int
    real: bool = False


@dataclass(frozen=True)
class KernelFacts:
    """Of one kernel: `registers` a thread, `static_shared` bytes a block, and what its launch must keep to.

    `max_threads` of __launch_bounds__, `block` of __block_size__ and `cluster` of __cluster_dims__: None without one.
    """

    name: str
    registers: int
    static_shared: int
    max_threads: int | None
    block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True)
class _Section:
    type: int
    link: int  # of a table of symbols: the section that has their names
    size: int  # of the section; one without content (type 8) has it, too
    content: bytes


def read_cubin(cubin: bytes, ptx: str = "") -> dict[str, KernelFacts]:
    """{kernel: its facts}. `ptx`, of the same compilation, says which parameters are floating-point scalars.

    ValueError for bytes that are no cubin of 64 bits.
    """
    sections = _sections(cubin)
    symbols, registers = _symbols(sections), {}
    for attribute, value in _attributes(sections[".nv.info"].content):
        if attribute == REGCOUNT:
            index, count = struct.unpack("<II", value)
            registers[symbols[index]] = count
    reserved = SYSTEM_SHARED_BYTES if SYSTEM_SECTION in sections else 0
    real = _real_parameters(ptx)
    found = {}
    for section in sections:
        name = section.removeprefix(".text.")
        if name == section:
            continue
        shared = sections.get(f".nv.shared.{name}")
        static_shared = max(0, shared.size - reserved) if shared else 0
        info = sections.get(f".nv.info.{name}")
        details = _of_kernel(list(_attributes(info.content)) if info else [], real.get(name, ()))
        found[name] = KernelFacts(name, registers[name], static_shared, *details)
    return found


def _of_kernel(attributes: list[tuple[int, bytes]], real: tuple[bool, ...]) -> tuple[Any, ...]:
    """(max_threads, block, cluster, parameters) from the attributes of one kernel."""
    parameters: dict[int, Parameter] = {}
    dimensions: dict[int, tuple[int, int, int]] = {}
    for attribute, value in attributes:
        if attribute in (MAX_THREADS, REQNTID, CTA_PER_CLUSTER):
            dimensions[attribute] = struct.unpack("<III", value)
        elif attribute in (KPARAM_INFO, KPARAM_INFO_V2):
            _, ordinal, offset, word = struct.unpack("<IHHI", value)
            # the older form has 14 bits of size, above the alignment and the address space; the newer one 16, first
            size = word >> 18 if attribute == KPARAM_INFO else word & 0xFFFF
            parameters[ordinal] = Parameter(offset, size, ordinal < len(real) and real[ordinal])
    bounds = dimensions.get(MAX_THREADS)
    most = bounds[0] * bounds[1] * bounds[2] if bounds else None
    in_order = tuple(parameters[ordinal] for ordinal in sorted(parameters))
    return most, dimensions.get(REQNTID), dimensions.get(CTA_PER_CLUSTER), in_order


def _sections(cubin: bytes) -> dict[str, _Section]:
    """Sections by name, in order."""
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError(f"not a cubin: its first bytes are {cubin[:5]!r}, those of a 64-bit ELF file are expected")
    (table,) = struct.unpack_from("<Q", cubin, 40)
    entry, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQII", cubin, table + at * entry) for at in range(count)]
    at_names = headers[names][4]
    found = {}
    for name, kind, _, _, offset, size, link, _ in headers:
        content = b"" if kind == 8 else cubin[offset : offset + size]
        found[_text(cubin, at_names + name)] = _Section(kind, link, size, content)
    return found


def _symbols(sections: Mapping[str, _Section]) -> list[str]:
    """Names of the symbols, by their numbers."""
    table = sections[".symtab"]
    names = list(sections.values())[table.link].content
    return [_text(names, name) for name, *_ in struct.iter_unpack("<IBBHQQ", table.content)]


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """(number, value) of each attribute of a .nv.info section."""
    at = 0
    while at + 4 <= len(content):
        form, attribute, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == WITH_SIZE:
            yield attribute, content[at : at + size]
            at += size


def _real_parameters(ptx: str) -> dict[str, tuple[bool, ...]]:
    """Per kernel, which parameters are floating-point scalars: .f32 and .f64, not .u32, .u64 or bytes."""
    return {name: tuple(kind == "f" for kind in _PARAMETER.findall(given)) for name, given in _ENTRY.findall(ptx)}


@functools.lru_cache(maxsize=None)
def compiled_facts(source: str, options: tuple[str, ...], arch: str) -> dict[str, KernelFacts]:
    """The facts of all kernels of `source` under the loader's NVRTC options for `arch` ("sm_90").

    Kept for this process, and in the user's cache: a kernel takes NVRTC up to 4 s. NotCompiled where there is no NVRTC
    or it refuses the source.
    """
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise NoNvrtc(f"no NVRTC here ({error}): pip install 'kb-submissions[cuda13]'") from error
    key = repr((source, options, arch, nvrtc.getVersion(), hashlib.sha256(Path(__file__).read_bytes()).hexdigest()))
    kept = cache_folder() / "launch_facts" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return {name: _from_json(row) for name, row in json.loads(kept.read_text("utf-8")).items()}
    facts = _compile(nvrtc, source, options, arch)
    _keep(kept, json.dumps({name: asdict(kernel) for name, kernel in facts.items()}))
    return facts


def _compile(nvrtc: Any, source: str, options: tuple[str, ...], arch: str) -> dict[str, KernelFacts]:
    program = nvrtc.createProgram(source, "candidate.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*options, f"--gpu-architecture={arch}"))
        return read_cubin(cubin_of(nvrtc, program), nvrtc.getPTX(program).decode())
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program).replace("\0", "").strip()
        raise NotCompiled(f"NVRTC does not compile this source for {arch}: {error}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)


def cubin_of(nvrtc: Any, program: Any) -> bytes:
    """The cubin of a compiled program; CuPy's binding drops the last byte of the image."""
    return bytes(nvrtc.getCUBIN(program)) + b"\0"


def _from_json(row: dict[str, Any]) -> KernelFacts:
    dimensions = {key: tuple(row[key]) if row[key] else None for key in ("block", "cluster")}
    return KernelFacts(**{**row, **dimensions, "parameters": tuple(Parameter(**given) for given in row["parameters"])})


def _keep(path: Path, text: str) -> None:
    """Written whole or not at all; beyond MOST_KEPT files the oldest go. A cache that cannot be written is none."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as draft:
            draft.write(text)
        os.replace(draft.name, path)
        files = list(path.parent.glob("*.json"))
        if len(files) > MOST_KEPT:
            for old in sorted(files, key=lambda file: file.stat().st_mtime)[: MOST_KEPT // 4]:
                old.unlink(missing_ok=True)
