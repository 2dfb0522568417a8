"""What the host executor does around a kernel: a candidate's namespace and tensors, its cache, what it cannot run."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kbsub.eval.host_executor import (
    H200_LIMITS,
    SMALL_LIMITS,
    GuardedMemory,
    HostBuildError,
    HostFault,
    HostUnavailable,
    build,
    host_namespace,
    kernel_names,
)
from kbsub.eval.host_executor.memory import transfer
from kbsub.eval.process.isolated import Status
from support.paths import ROOT

CANDIDATES = ROOT / "submissions" / "level1_40"


def test_reading_a_tensors_last_byte_is_fine_and_the_next_is_not() -> None:
    memory = GuardedMemory()
    tensor = memory.copy(torch.arange(4096.0))
    region = memory.find(tensor.data_ptr())
    assert region is not None and region.data + region.nbytes == region.end
    assert memory.describe(region.end) == "byte 16384 of buffer 1, which has 16384"


def test_forward_runs_unmodified_and_leaves_inputs_alone() -> None:
    space = host_namespace((CANDIDATES / "reference_order.py").read_text(encoding="utf-8"), SMALL_LIMITS)
    model = space["ModelNew"]((6, 4))
    x = torch.randn(5, 6, 4)
    kept = x.clone()
    y = model(x)
    assert torch.equal(x, kept)
    assert torch.allclose(y, torch.nn.functional.layer_norm(x, (6, 4)), atol=1e-5)
    assert space["host_executor"].launches == {"row_statistics": 1, "normalise": 1}


def test_geometry_sees_the_limits_it_is_given() -> None:
    space = host_namespace((CANDIDATES / "reference_order.py").read_text(encoding="utf-8"), H200_LIMITS)
    limits = space["device_limits"](0)
    assert type(limits) is space["DeviceLimits"] and limits.multiprocessors == 132


def test_input_written_by_a_candidate_is_seen_by_the_caller() -> None:
    source = (CANDIDATES / "reference_order.py").read_text(encoding="utf-8")
    space = host_namespace(source.replace("y = torch.empty(x.shape, dtype=x.dtype, device=x.device)", "y = x"))
    x = torch.randn(2, 8)
    kept = x.clone()
    space["ModelNew"](8)(x)
    assert not torch.equal(x, kept)


def test_caller_is_told_of_a_fault_in_forward() -> None:
    source = (CANDIDATES / "reference_order.py").read_text(encoding="utf-8")
    space = host_namespace(source.replace("i < n / 4; i += 128", "i <= n / 4; i += 128"))
    with pytest.raises(HostFault, match=r"memory fault in kernel row_statistics.*input 0"):
        space["ModelNew"](8)(torch.randn(2, 8))


def test_misaligned_input_stays_misaligned() -> None:
    space = host_namespace((CANDIDATES / "reference_order.py").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="aligned to 16 bytes"):
        space["ModelNew"](8)(torch.randn(17)[1:].view(2, 8))


def test_strided_input_stays_strided() -> None:
    space = host_namespace((CANDIDATES / "reference_order.py").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="must be contiguous"):
        space["ModelNew"](8)(torch.randn(8, 2).t())


# Views in which several elements are one place in memory: (name, how it is made from a tensor of 40 floats).
OVERLAPPING = (
    ("expanded rows", lambda t: t[:8].expand(3, 8)),
    ("expanded columns", lambda t: t[:3].view(3, 1).expand(3, 8)),
    ("one value", lambda t: t[5].expand(3, 8)),
    ("windows", lambda t: t.unfold(0, 8, 3)),
)  # fmt: skip


@pytest.mark.parametrize("made", [made for _, made in OVERLAPPING], ids=[name for name, _ in OVERLAPPING])
def test_overlapping_input_reaches_the_candidate_and_comes_back(made: Any) -> None:
    memory, given = GuardedMemory(), torch.randn(40)
    view = made(given)
    guarded = memory.copy(view)
    assert memory.owns(guarded) and guarded.stride() == view.stride()
    assert torch.equal(guarded, view)
    guarded.as_strided((1,), (1,)).mul_(-1)  # what a kernel would write at the first address
    transfer(guarded, view)
    assert torch.equal(guarded, view)


def test_candidate_may_copy_an_expanded_input() -> None:
    source = (CANDIDATES / "reference_order.py").read_text(encoding="utf-8")
    space = host_namespace(source.replace("require_supported(x, self.ln)", "x = x.contiguous()", 1))
    x = torch.randn(1, 8).expand(3, 8)
    assert torch.allclose(space["ModelNew"](8)(x), torch.nn.functional.layer_norm(x, (8,)), atol=1e-5)


@pytest.mark.parametrize("same_thread", [False, True])
def test_no_tensor_goes_while_its_surroundings_are_read(monkeypatch: pytest.MonkeyPatch, same_thread: bool) -> None:
    """Another thread's launch, or the garbage collector, may drop one in the middle: that read unmapped memory."""
    module = importlib.import_module("kbsub.eval.host_executor.memory")
    memory, unmapped, early, threads = GuardedMemory(), [], [], []
    tensors = [memory.empty((6,), torch.float32) for _ in range(3)]
    unmap, fill = module._Region.unmap, module._fill_poison

    def filled(*arguments: Any) -> None:
        if same_thread:
            tensors.clear()
        elif not threads:
            threads.append(threading.Thread(target=tensors.clear))
            threads[0].start()
            threads[0].join(0.3)
        early.extend(unmapped)
        fill(*arguments)

    monkeypatch.setattr(module._Region, "unmap", lambda region: unmapped.append(region))
    monkeypatch.setattr(module, "_fill_poison", filled)
    assert memory.overwritten() is None and early == []
    for thread in threads:
        thread.join()
    assert len(unmapped) == 3
    for region in unmapped:
        unmap(region)


def test_machine_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HostUnavailable, match=r"no C\+\+ compiler .* install g\+\+") as caught:
        host_namespace((CANDIDATES / "reference_order.py").read_text(encoding="utf-8"))
    assert caught.value.status is Status.NOT_RUN


def test_file_that_launches_by_other_means_says_so() -> None:
    with pytest.raises(HostUnavailable, match=r"has CUDA_SOURCE but not DeviceLimits, .*loader lines") as caught:
        host_namespace("CUDA_SOURCE = ''\nclass ModelNew: ...\n")
    assert caught.value.status is Status.NOT_RUN


def test_cache_is_used_again_and_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBSUB_HOST_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.import_module("kbsub.eval.host_executor.build"), "MAX_CACHED", 3)
    for age in range(5):
        (tmp_path / f"old-{age}").mkdir()
        os.utime(tmp_path / f"old-{age}", (10.0 * age, 10.0 * age))
    source = 'extern "C" __global__ void k(int* y) { y[0] = 41; }'
    first = build.__wrapped__(source, ()).source_path
    built = first.with_name("kernels.so").stat().st_mtime_ns
    assert build.__wrapped__(source, ()).source_path == first
    assert first.with_name("kernels.so").stat().st_mtime_ns == built
    kept = sorted(entry.name for entry in tmp_path.iterdir() if entry.name.startswith("old"))
    assert kept == ["old-2", "old-3", "old-4"]


def test_kernel_names_under_options() -> None:
    source = """
#ifndef KIND
#define KIND 0
#endif
#if KIND == 0
#ifdef UNKNOWN
extern "C" __global__ void one(int* y) {}
#endif
#else
extern "C" __global__ void two(int* y) {}
#endif
extern "C" __global__ void three(int* y) {}
"""
    assert kernel_names(source) == ["one", "two", "three"]
    assert kernel_names(source, ()) == ["one", "three"]
    assert kernel_names(source, ("-DKIND=0",)) == ["one", "three"]
    assert kernel_names(source, ("--std=c++17", "-DKIND=2")) == ["two", "three"]


def test_kernel_names_count_what_they_cannot_decide() -> None:
    kernel = 'extern "C" __global__ void {}(int* y) {{}}'.format
    chain = ["#if KIND == 0", kernel("a"), "#elif KIND == 1", kernel("b"), "#else", kernel("c"), "#endif", kernel("d")]
    assert kernel_names("\n".join(chain), ("-DKIND=1",)) == ["b", "c", "d"]
    hidden = ["#define KIND 1", "#if KIND == 0", "#define OTHER 0", "#endif", "#if OTHER == 0", kernel("a"), "#endif"]
    assert kernel_names("\n".join([*hidden, "#if OTHER == 1", kernel("b"), "#endif"]), ()) == ["a", "b"]
    with pytest.raises(HostBuildError, match="#endif"):
        build("\n".join(["#else", "#endif", kernel("a")]))
