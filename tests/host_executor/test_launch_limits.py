"""Would a driver take every launch of every candidate? Asked of five GPUs at a thousand shapes, without executing one.

What is known of each kernel is read from its cubin; the reader and the rules are tested on kernels of known facts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kbsub.eval.host_executor import (
    A100_LIMITS,
    H200_LIMITS,
    L40S_LIMITS,
    RTX3090_LIMITS,
    RTX5090_LIMITS,
    LaunchRefused,
    Limits,
    LimitsNotChecked,
    compile_gate,
)
from kbsub.eval.host_executor.compile_gate import DEVICES, Rehearsal
from kbsub.eval.host_executor.cubin_facts import KernelFacts, NoNvrtc, Parameter, compiled_facts, read_cubin
from kbsub.eval.host_executor.launch_limits import Launch, argument, refusals, resident_blocks
from kbsub.eval.tasks.task_file import read_task_file
from support.host_run import Host, cuda_files

pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="NVRTC: pip install 'kb-submissions[cuda13]'")

GPUS = {
    "H200": H200_LIMITS, "A100": A100_LIMITS, "L40S": L40S_LIMITS, "RTX3090": RTX3090_LIMITS, "RTX5090": RTX5090_LIMITS,
}  # fmt: skip
MEMORY = {"H200": 141e9, "A100": 80e9, "L40S": 48e9, "RTX3090": 24e9, "RTX5090": 32e9}  # bytes; x and y must fit
CANDIDATES = {name: (path.read_text("utf-8"), precisions) for name, (path, precisions) in cuda_files().items()}
GRIDS = {name: read_task_file(path.parent).grid for name, (path, _) in cuda_files().items()}
ACCURATE = "level1_40/oracle_accurate"
WIDTHS = (
    *range(1, 41),
    *(power + off for power in (1 << k for k in range(6, 23)) for off in (-4, -1, 0, 1, 4)),
    1001, 10_000, 12_288, 12_292, 16_388, 20_672, 24_576, 33_000, 150_001, 165_000,
)  # fmt: skip
# The share of calls that is left of a file that refuses most widths: channels of a power of two; below 1,024 of them.
REFUSING = {"channel_rows": 0.02, "pixel_order": 0.3}
VECTORISED_ONLY = ("reference_order", "reference_order_pipelined", "half_accumulated")
ROWS = (1, 3, 4, 31, 107, 108, 133, 300, 1024, 4097, 65_535, 65_536, 65_537, 1 << 20)
MOST_ELEMENTS = 1 << 34  # of x: 32 GB in half; more does not fit with y
SHAPES = [(rows, n) for n in WIDTHS for rows in ROWS if rows * n <= MOST_ELEMENTS]


def rehearsed(source: str, precisions: tuple[str, ...], limits: Limits, shapes: Any) -> tuple[Rehearsal, int]:
    """Every shape in every precision, at an aligned address and at one that is not: (what was launched, refused)."""
    rehearsal, own = Rehearsal(source, limits), 0
    for precision in precisions:
        for shape in shapes:
            for address in (0, 4 if precision == "fp32" else 2):
                try:
                    rehearsal.forward(shape, precision, address)
                except ValueError:  # the file's own refusal; a driver's is none
                    own += 1
    return rehearsal, own


def test_shapes_are_a_thousand_and_hold_the_boundaries() -> None:
    assert len(SHAPES) >= 1000
    named = {8192, 8196, 10_000, 12_288, 16_384, 16_388, 20_672, 32_768, 65_536, 131_072, 4_194_304}
    assert named <= set(WIDTHS)


# Files that `make test` asks at every shape of the GPU measured on; of others, and of one with little shared memory,
# it takes one shape in so many (a prime: every number of rows and every width has its turn). `make test-all` takes all
# five, and every shape.
LAYER_NORMS = ("level1_40/", "local_layernorm_tokens/")
THINNED = 23
# Files that are compiled anew for each number of channels that is a multiple of 4, to 128, and each precision: `make
# test` takes a few of them, in fp32. A build is a third of a second.
BUILT_BY_CHANNELS, FEW_CHANNELS = ("pixel_order", "pixel_accurate"), (4, 64, 128)
ON = [
    pytest.param(
        name,
        gpu,
        marks=[] if gpu == "H200" or (gpu == "RTX3090" and name.startswith(LAYER_NORMS)) else [pytest.mark.slow],
        id=f"{name}-{gpu}",
    )
    for name in CANDIDATES
    for gpu in GPUS
]


@pytest.mark.parametrize(("name", "gpu"), ON)
def test_driver_would_take_every_launch(name: str, gpu: str, request: pytest.FixtureRequest) -> None:
    source, precisions = CANDIDATES[name]
    stem = name.partition("/")[2]
    widest = 4 if "fp32" in precisions else 2  # bytes of an element
    often = gpu == "H200" and name.startswith(LAYER_NORMS)
    step = 1 if often or request.config.getoption("--slow") else THINNED
    rows_and_widths = SHAPES
    if stem in BUILT_BY_CHANNELS and step > 1:
        precisions = precisions[:1]
        rows_and_widths = [(rows, n) for rows, n in SHAPES if n % 4 or n > max(FEW_CHANNELS) or n in FEW_CHANNELS]
    shapes = [each.at(rows, n) for at, each in enumerate(GRIDS[name]) for rows, n in rows_and_widths[at::step]]
    shapes = [shape for shape in shapes if 2 * widest * shape.elements <= MEMORY[gpu]]
    assert len(shapes) >= 0.7 * len(SHAPES) / step
    rehearsal, own = rehearsed(source, precisions, GPUS[gpu], shapes)
    calls = len(shapes) * len(precisions) * 2
    # Files of the reference order refuse odd widths and unaligned addresses in words; whatever is not refused launches.
    least = calls / 2
    if stem in VECTORISED_ONLY:
        least = 0.9 * sum(shape.inputs[0][1] % 4 == 0 for shape in shapes) * len(precisions)
    elif stem in REFUSING:
        least = REFUSING[stem] * calls
    assert rehearsal.launched >= least, f"{stem} refused {own} of {calls} itself: this test sees too little of it"
    refused = rehearsal.refused()
    assert not refused, "\n".join(refused)


# What was wrong with oracle_accurate, put back: (text that is there, what it was, words of the refusal).
OLD_BOUNDS = (
    "__launch_bounds__(THREADS)\nrows_held_8_wide(",
    "__launch_bounds__(SPAN)\nrows_held_8_wide(",
    "rows_held_8_wide: 512 threads a block, compiled for at most 256",
)
OLD_GEOMETRY = (
    "if threads == THREADS and vectors <= SPAN * HELD:",
    "if False:",
    "rows_held_8: 512 threads a block, compiled for at most 256",
)


@pytest.mark.parametrize("now,before,words", [OLD_BOUNDS, OLD_GEOMETRY], ids=["bounds", "geometry"])
@pytest.mark.parametrize("n", [8196, 10_000, 12_288, 16_384])
def test_what_was_wrong_is_found_when_put_back(now: str, before: str, words: str, n: int) -> None:
    source, precisions = CANDIDATES[ACCURATE]
    assert source.count(now) == 1
    shape = GRIDS[ACCURATE][0].at(3, n)
    rehearsal, _ = rehearsed(source.replace(now, before), precisions, H200_LIMITS, [shape])
    refused = rehearsal.refused()
    assert len(refused) == len(precisions) and all(words in line and f"3x{n}" in line for line in refused), refused


def test_host_refuses_what_was_wrong() -> None:
    source, _ = CANDIDATES[ACCURATE]
    space: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(source.replace(*OLD_BOUNDS[:2]), "candidate", "exec"), space)
    host = Host(space["CUDA_SOURCE"], options=space["NVRTC_OPTIONS"])
    x = host.empty(1, 8196)
    scalars = (np.int32(1), np.int32(2049), np.float64(1e-5))
    with pytest.raises(LaunchRefused, match="rows_held_8_wide: 512 threads a block, compiled for at most 256"):
        host.launch("rows_held_8_wide", 1, 512, x, 0, 0, host.empty(1, 8196), *scalars)


# ---- the reader: kernels of known facts ----

HOSTED = r"""
struct Sixteen { double a, b; };
extern "C" __global__ void __launch_bounds__(96, 2)
sizes(char a, short b, int c, long long d, Sixteen e, float f, double g, float* y) {
    __shared__ float s[32];
    s[threadIdx.x % 32] = a + b + c + d + e.a + e.b + f + g;
    __syncthreads();
    y[threadIdx.x] = s[31 - threadIdx.x % 32];
}
extern "C" __global__ void free_of_bounds(float* y) {
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float* s = reinterpret_cast<float*>(shared_memory);
    s[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[0];
}
extern "C" __global__ void __launch_bounds__(1024, 1) nothing() {}
"""
KNOWN = (  # and one that the host executor does not know, with the newer form of parameters
    HOSTED
    + r"""
struct Large { char bytes[20000]; };
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void __cluster_dims__(2, 1, 1) in_pairs(Large v, int i, float* y) { y[0] = v.bytes[i]; }
#endif
"""
)
PLAIN = ("--std=c++17",)


@pytest.mark.parametrize("arch", DEVICES)
def test_reader_gives_the_facts_of_known_kernels(arch: str) -> None:
    facts = compiled_facts(KNOWN, PLAIN, arch)
    placed = ((0, 1), (2, 2), (4, 4), (8, 8), (16, 16), (32, 4, True), (40, 8, True), (48, 8))
    sizes = facts["sizes"]
    assert sizes.parameters == tuple(Parameter(*place) for place in placed)
    assert (sizes.max_threads, sizes.static_shared, sizes.block, sizes.cluster) == (96, 128, None, None)
    assert (facts["free_of_bounds"].max_threads, facts["free_of_bounds"].static_shared) == (None, 0)
    assert (facts["nothing"].max_threads, facts["nothing"].parameters) == (1024, ())
    if arch not in ("sm_80", "sm_86", "sm_89"):
        assert facts["in_pairs"].cluster == (2, 1, 1)
        assert facts["in_pairs"].parameters == (Parameter(0, 20_000), Parameter(20_000, 4), Parameter(20_008, 8))


# Seconds of NVRTC for a candidate: `make test` reads the oldest form of a cubin and the newest, the kernels all six.
READ = [("known", arch) for arch in DEVICES] + [
    pytest.param(ACCURATE, arch, marks=[] if arch in ("sm_80", "sm_120") else [pytest.mark.slow]) for arch in DEVICES
]


@pytest.mark.usefixtures("kept_compiles")
@pytest.mark.parametrize(("source", "arch"), READ)
def test_reader_agrees_with_ptxas(arch: str, source: str) -> None:
    if source == "known":
        source = KNOWN
    else:
        space: dict[str, Any] = {"__name__": "candidate"}
        exec(compile(CANDIDATES[source][0], "candidate", "exec"), space)
        source = space["CUDA_SOURCE"]
    compiled = compile_gate.compile_source(source, PLAIN, arch)
    said = {name: (used.registers, used.shared) for name, used in compiled.resources.items()}
    assert {name: (kernel.registers, kernel.static_shared) for name, kernel in compiled.facts.items()} == said


def test_facts_are_the_same_from_the_cache() -> None:
    first = compiled_facts(KNOWN, PLAIN, "sm_90")
    assert compiled_facts.__wrapped__(KNOWN, PLAIN, "sm_90") == first


def test_what_is_no_cubin_is_said() -> None:
    with pytest.raises(ValueError, match="not a cubin"):
        read_cubin(b"PK\x03\x04" + bytes(100))


# ---- the rules: a launch that keeps them all, and for each rule one that breaks just it ----

KERNEL = KernelFacts("k", 32, 1000, None, None, None, (Parameter(0, 8), Parameter(8, 4), Parameter(12, 4, True)))
GOOD = Launch("k", (4, 1, 1), (128, 1, 1), tuple(map(argument, (0, np.int32(1), np.float32(1)))))


@dataclass(frozen=True)
class Broken:
    """One field of GOOD or of KERNEL changed, and the words of the one refusal; no words: still taken."""

    words: str
    launch: dict[str, Any]
    kernel: dict[str, Any]


def broken(words: str, launch: dict[str, Any] | None = None, **kernel: Any) -> Broken:
    return Broken(words, launch or {}, kernel)


def given(*values: Any) -> dict[str, Any]:
    return {"arguments": tuple(map(argument, values))}


RULES = {
    "taken": broken(""),
    "block none": broken("block dimension x is 0, must be 1 to 1024", {"block": (0, 1, 1)}),
    "block z": broken("block dimension z is 65, must be 1 to 64", {"block": (1, 1, 65)}),
    "block y": broken("block dimension y is 1025, must be 1 to 1024", {"block": (1, 1025, 1)}),
    "block threads": broken("(512, 3, 1) has 1536 threads, must be 1 to 1024", {"block": (512, 3, 1)}),
    "grid x most": broken("", {"grid": (2**31 - 1, 65_535, 65_535)}),
    "grid x": broken("grid dimension x is 2147483648, must be 1 to 2147483647", {"grid": (2**31, 1, 1)}),
    "grid y": broken("grid dimension y is 65536, must be 1 to 65535", {"grid": (1, 65_536, 1)}),
    "grid z": broken("grid dimension z is 65536, must be 1 to 65535", {"grid": (1, 1, 65_536)}),
    "bounds met": broken("", max_threads=128),
    "bounds": broken("128 threads a block, compiled for at most 127", max_threads=127),
    "exact block": broken("block (128, 1, 1), compiled for exactly (64, 2, 1)", block=(64, 2, 1)),
    # 72 registers: a quarter of the multiprocessor's has room for 7 warps (measured on an H200: 896 threads)
    "registers met": broken("", {"block": (896, 1, 1)}, registers=70),
    "registers": broken("928 threads a block of 70 registers", {"block": (928, 1, 1)}, registers=70),
    "shared, default met": broken("", {"shared_bytes": 48_152}),
    "shared, default": broken("set, which is 0", {"shared_bytes": 48_153}),
    "shared, allowed": broken("", {"shared_bytes": 100_000, "allowed_shared_bytes": 100_000}),
    "shared, allowed less": broken("which is 10", {"shared_bytes": 11, "allowed_shared_bytes": 10}),
    "shared, opt-in met": broken("", {"shared_bytes": 231_448, "allowed_shared_bytes": 231_448}),
    "shared, opt-in": broken(
        "1000 bytes of static and 231449 of dynamic shared memory, the device allows 232448 together",
        {"shared_bytes": 231_449, "allowed_shared_bytes": 231_449},
    ),
    "cluster": broken("grid (4, 1, 1) is no multiple of the cluster (3, 1, 1)", cluster=(3, 1, 1)),
    "cluster size": broken("cluster (16, 1, 1) of 16 blocks", {"grid": (16, 1, 1)}, cluster=(16, 1, 1)),
    "too few": broken("2 arguments, the kernel takes 3", given(0, np.int32(1))),
    "size": broken("argument 1 (numpy int64) is 8 bytes", given(0, np.int64(1), np.float32(1))),
    "order": broken("argument 0 (numpy int32) is 4 bytes", given(np.int32(1), 0, np.float32(1))),
    "kind": broken("(numpy int32), the kernel's parameter is a floating", given(0, np.int32(1), np.int32(1))),
    "type": broken("argument 1 (float) is neither an int", given(0, 1.0, np.float32(1))),
    # 132 multiprocessors times 16 blocks of 128 threads, of 4 of 16 warps' registers, or of one's shared memory
    "resident": broken("", {"grid": (2112, 1, 1), "cooperative": True}),
    "by threads": broken("2113 blocks, of which only 2112", {"grid": (2113, 1, 1), "cooperative": True}),
    "by registers": broken("133 blocks, of which only 132", {"grid": (133, 1, 1), "cooperative": True,
                           "block": (256, 1, 1)}, registers=200),
    "by shared": broken("265 blocks, of which only 264", {"grid": (265, 1, 1), "cooperative": True,
                        "shared_bytes": 100_000, "allowed_shared_bytes": 100_000}),
    "by blocks": broken("4225 blocks, of which only 4224", {"grid": (4225, 1, 1), "cooperative": True,
                        "block": (32, 1, 1)}),
}  # fmt: skip


@pytest.mark.parametrize("case", RULES.values(), ids=RULES)
def test_each_rule_refuses_what_breaks_it_alone(case: Broken) -> None:
    refused = refusals(replace(GOOD, **case.launch), replace(KERNEL, **case.kernel), H200_LIMITS)
    several = any(words in case.words for words in ("y is 1025", "numpy int32) is 4"))  # 1,025 threads, two arguments
    assert refused == [] if not case.words else (several or len(refused) == 1) and case.words in refused[0], refused
    assert all(line.startswith("k: ") for line in refused)


# (device, threads, dynamic bytes, blocks a multiprocessor) of a kernel of 32 registers and 1,000 static bytes
RESIDENT = ((RTX3090_LIMITS, 32, 0, 16), (L40S_LIMITS, 32, 0, 24), (RTX5090_LIMITS, 32, 0, 24),
            (A100_LIMITS, 32, 0, 32), (A100_LIMITS, 1024, 0, 2),
            (RTX3090_LIMITS, 1024, 0, 1), (H200_LIMITS, 128, 200_000, 1))  # fmt: skip


@pytest.mark.parametrize("limits,threads,shared_bytes,blocks", RESIDENT)
def test_resident_blocks_by_device(limits: Limits, threads: int, shared_bytes: int, blocks: int) -> None:
    assert resident_blocks(KERNEL, threads, shared_bytes, limits) == blocks * limits.multiprocessors


# ---- the host executor: what it does with the facts, and what it says without them ----


def test_host_says_that_it_checked() -> None:
    host = Host(HOSTED, options=PLAIN)
    with pytest.raises(LaunchRefused, match="free_of_bounds: 2 arguments, the kernel takes 1"):
        host.launch("free_of_bounds", 1, 32, 0, 0)
    assert host.executor.limits_checked


def test_host_without_nvrtc_says_that_it_did_not_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", None)
    monkeypatch.setattr("kbsub.eval.host_executor.executor.compiled_facts", compiled_facts.__wrapped__)
    with pytest.raises(NoNvrtc):
        compiled_facts.__wrapped__(HOSTED, PLAIN, "sm_90")
    with pytest.warns(LimitsNotChecked, match=r"not checked .* no NVRTC here .* pip install"):
        host = Host(HOSTED, options=PLAIN)
    assert not host.executor.limits_checked and "no NVRTC" in host.executor.unchecked[0]
    with pytest.raises(LaunchRefused, match="1025, must be 1 to 1024"):  # the rules that need no facts hold
        host.launch("nothing", 1, 1025)
