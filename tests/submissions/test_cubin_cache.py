"""The loader's cubin cache: keyed by what was compiled, never by inputs; checked, atomic, and usable without a home.

Runs NVRTC itself, which needs no GPU. The loader is the same text in every CUDA file (test_candidate_rules.py).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from support.paths import ROOT

nvrtc = pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="no CuPy here: the loader cannot be run")
FILE = ROOT / "submissions" / "level1_40" / "reference_order.py"
SOURCE = 'extern "C" __global__ void one(int* out) { out[threadIdx.x] = 1; }'
OPTIONS, ARCH = ("--ftz=false",), "sm_90"
ELF = b"\x7fELF"


@pytest.fixture
def cached_cubin(tmp_path, monkeypatch):
    """The loader's function, with an empty cache folder of its own and a count of compilations in `.compiled`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    space: dict = {}
    exec(compile(FILE.read_text("utf-8"), FILE.name, "exec"), space)
    compile_program, compiled = nvrtc.compileProgram, []
    monkeypatch.setattr(nvrtc, "compileProgram", lambda *a: compiled.append(1) or compile_program(*a))
    function = space["cached_cubin"]
    function.compiled = compiled
    return function


def entries(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def test_a_second_call_does_not_compile(cached_cubin, tmp_path):
    first = cached_cubin(SOURCE, OPTIONS, ARCH)
    assert first.startswith(ELF)
    assert cached_cubin(SOURCE, OPTIONS, ARCH) == first
    assert len(cached_cubin.compiled) == 1
    assert [entry.parent.relative_to(tmp_path) for entry in entries(tmp_path)] == [Path("kbsub/cubin")]


KEYS = {
    "source": (SOURCE.replace("= 1", "= 2"), OPTIONS, ARCH),
    "options": (SOURCE, ("--ftz=false", "--fmad=false"), ARCH),
    "architecture": (SOURCE, OPTIONS, "sm_80"),
}


@pytest.mark.parametrize("changed", KEYS)
def test_what_was_compiled_is_the_key(cached_cubin, tmp_path, changed):
    cached_cubin(SOURCE, OPTIONS, ARCH)
    cached_cubin(*KEYS[changed])
    assert len(cached_cubin.compiled) == len(entries(tmp_path)) == 2, f"another {changed} found the old cubin"


def test_the_nvrtc_version_is_in_the_key(cached_cubin, tmp_path, monkeypatch):
    cached_cubin(SOURCE, OPTIONS, ARCH)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (99, 0))
    cached_cubin(SOURCE, OPTIONS, ARCH)
    assert len(cached_cubin.compiled) == len(entries(tmp_path)) == 2


DAMAGE = {
    "empty": lambda data: b"",
    "digest only": lambda data: data[:32],
    "truncated": lambda data: data[:-7],
    "half": lambda data: data[: len(data) // 2],
    "one bit altered": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
    "digest altered": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "appended": lambda data: data + b"x",
    "another file": lambda data: b"not a cubin" * 100,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_rebuilt(cached_cubin, tmp_path, damage):
    cubin = cached_cubin(SOURCE, OPTIONS, ARCH)
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    entry.write_bytes(DAMAGE[damage](whole))
    assert cached_cubin(SOURCE, OPTIONS, ARCH) == cubin
    assert len(cached_cubin.compiled) == 2, "the damaged entry was believed"
    assert entry.read_bytes() == whole, "the entry was not mended"


def test_an_entry_appears_whole_or_not_at_all(cached_cubin, tmp_path, monkeypatch):
    replace, seen = os.replace, []

    def watched(draft, entry):
        data = Path(draft).read_bytes()
        seen.append((Path(entry).exists(), hashlib.sha256(data[32:]).digest() == data[:32]))
        assert Path(draft).parent == Path(entry).parent, "a rename across file systems is a copy"
        replace(draft, entry)

    monkeypatch.setattr(os, "replace", watched)
    cached_cubin(SOURCE, OPTIONS, ARCH)
    assert seen == [(False, True)], "(entry there before its rename, draft complete before its rename)"
    assert len(entries(tmp_path)) == 1, "a draft was left behind"


def blocked_by_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    return str(tmp_path / "file" / "cache")


def read_only(tmp_path, monkeypatch):
    # chmod does not stop root, so the answer of the system is given here
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: False if str(path) == str(tmp_path) else access(path, mode))
    return str(tmp_path / "cache")


def relative(tmp_path, monkeypatch):
    return "cache"  # the XDG specification says to ignore it


@pytest.mark.parametrize("home", [blocked_by_a_file, read_only, relative], ids=lambda home: home.__name__)
def test_without_a_usable_home_it_still_compiles(cached_cubin, tmp_path, monkeypatch, home):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", home(tmp_path, monkeypatch))
    assert cached_cubin(SOURCE, OPTIONS, ARCH).startswith(ELF)
    outside = [file for file in entries(tmp_path) if scratch not in file.parents and file.name != "file"]
    assert not outside, f"written outside the temporary folder: {outside}"


def test_a_build_failure_carries_the_log_and_leaves_no_entry(cached_cubin, tmp_path):
    with pytest.raises(RuntimeError, match=r"candidate\.cu\(1\): error: identifier \"undefined_name\""):
        cached_cubin(SOURCE.replace("= 1", "= undefined_name"), OPTIONS, ARCH)
    assert not entries(tmp_path)


def test_ftz_false_is_really_in_force():
    """CuPy's own RawModule appends -ftz=true: a product of subnormals would be flushed."""
    space: dict = {}
    exec(compile(FILE.read_text("utf-8"), FILE.name, "exec"), space)
    program = nvrtc.createProgram(space["CUDA_SOURCE"], "candidate.cu", [], [])
    nvrtc.compileProgram(program, [*space["NVRTC_OPTIONS"], "--gpu-architecture=compute_90"])
    ptx = nvrtc.getPTX(program)
    text = ptx.decode() if isinstance(ptx, bytes) else ptx
    assert "fma.rn.f32" in text and ".ftz" not in text
