"""What the host executor promises of a sound kernel: CUDA's meaning, unedited text, late copies, any thread order."""

from __future__ import annotations

import hashlib
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from host_run import Host

from kbsub.eval.host_executor import (
    HostBuildError,
    LaunchRefused,
    build,
    host_namespace,
    poisoned,
)

CANDIDATES = Path(__file__).resolve().parents[1] / "submissions" / "level1_40"
ORDERS = (0, 1, 5)  # threads in order, reversed, shuffled

SOURCE = r"""
#ifndef FACTOR
#define FACTOR 1
#endif
__constant__ int table[4] = {10, 20, 30, 40};
constexpr int STAGES = 2, STAGE = 4;

extern "C" __global__ void indices(int* out)  // grid (2, 3, 2), block (4, 2, 2)
{
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] = FACTOR * (1000 * block + thread) + table[3] - 40;
}
extern "C" __global__ void shuffles(const int* in, int* out, int* votes)  // one warp
{
    const int lane = threadIdx.x, v = in[lane];
    out[lane] = __shfl_sync(~0u, v, 5);
    out[32 + lane] = __shfl_sync(~0u, v, lane + 1, 8);
    out[64 + lane] = __shfl_up_sync(~0u, v, 3u);
    out[96 + lane] = __shfl_up_sync(~0u, v, 1u, 4);
    out[128 + lane] = __shfl_down_sync(~0u, v, 3u);
    out[160 + lane] = __shfl_down_sync(~0u, v, 1u, 4);
    out[192 + lane] = __shfl_xor_sync(~0u, v, 21);
    out[224 + lane] = (int)__reduce_add_sync(~0u, (unsigned)v);
    out[256 + lane] = __reduce_min_sync(~0u, v);
    out[288 + lane] = __reduce_max_sync(~0u, v);
    if (lane < 16) out[320 + lane] = __shfl_xor_sync(0xffffu, v, 1);  // a part of the warp, the rest elsewhere
    else out[320 + lane] = __shfl_down_sync(0xffff0000u, v, 1);
    if (lane == 0) { votes[0] = 0; votes[1] = 0; votes[2] = 0; }
    __syncwarp();
    const int ballot = (int)__ballot_sync(~0u, v > 0), any = __any_sync(~0u, v == in[7]);
    const int all = __all_sync(~0u, v == in[7]);
    if (lane == 3) { votes[0] = ballot; votes[1] = any; votes[2] = all; }
}
extern "C" __global__ void wide_shuffle(const double* in, double* out)
{
    out[threadIdx.x] = __shfl_xor_sync(~0u, in[threadIdx.x], 1);
}
extern "C" __global__ void block_sum(const float* x, float* sums, unsigned* done, float* total)  // last block
{
    __shared__ float part[64];
    __shared__ bool last;
    part[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    __syncthreads();
    for (int half = 32; half > 0; half /= 2) {
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        sums[blockIdx.x] = part[0];
        __threadfence();
        last = atomicAdd(done, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.f;
        for (int b = 0; b < gridDim.x; ++b) sum += sums[b];
        *total = sum;
    }
}
extern "C" __global__ void atomics(int* cells, float* real, unsigned long long* wide)  // 64 threads
{
    const int t = threadIdx.x;
    atomicAdd(&cells[0], t); atomicSub(&cells[1], 1); atomicMax(&cells[2], t); atomicMin(&cells[3], -t);
    atomicOr(&cells[4], 1 << t % 32); atomicAnd(&cells[5], ~(1 << t % 8)); atomicXor(&cells[6], t);
    if (atomicCAS(&cells[7], 0, t + 100) == 0) atomicExch(&cells[8], 1);
    atomicAdd(real, 1); atomicAdd(wide, 1ull);
}
// One consumer warp behind a ring of two stages, one copying warp: x (n) -> y = 2 x.
extern "C" __global__ void ring(const float4* x, float4* y, int n4)
{
    extern __shared__ __align__(128) unsigned char shared_memory[];
    float4* slots = reinterpret_cast<float4*>(shared_memory);
    Barrier* full = reinterpret_cast<Barrier*>(slots + STAGES * STAGE * 32);
    Barrier* empty = full + STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) { barrier_init(full + s, 32); barrier_init(empty + s, 32); }
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, stages = (n4 + STAGE * 32 - 1) / (STAGE * 32);
    for (int k = 0; k < stages; ++k) {
        const int s = k % STAGES;
        const unsigned parity = k / STAGES & 1;
        if (threadIdx.x >= 32) {
            barrier_wait(empty + s, parity ^ 1);
            for (int i = 0; i < STAGE; ++i) {
                const int at = (k * STAGE + i) * 32 + lane;
                if (at < n4) copy16_async(slots + (s * STAGE + i) * 32 + lane, x + at);
            }
            copies_arrive_noinc(full + s);
        } else {
            barrier_wait(full + s, parity);
            for (int i = 0; i < STAGE; ++i) {
                const int at = (k * STAGE + i) * 32 + lane;
                float4 v = slots[(s * STAGE + i) * 32 + lane];
                if (at < n4) y[at] = make_float4(2.f * v.x, 2.f * v.y, 2.f * v.z, 2.f * v.w);
            }
            barrier_arrive(empty + s);
        }
    }
}
extern "C" __global__ void groups(const float4* x, float4* y)  // four copies in groups of their own
{
    __shared__ float4 held[4];
    for (int i = 0; i < 4; ++i) { copy16_async(held + i, x + i); copies_commit(); }
    y[0] = held[0];          // no wait: still poison
    copies_wait<2>();
    y[1] = held[1];          // the two oldest groups are there
    y[2] = held[2];          // the others need not be, so they are not
    copies_wait<0>();
    y[3] = held[3];
}
extern "C" __global__ void bulk(const float4* x, float4* y, int wait)
{
    __shared__ float4 held[8];
    __shared__ Barrier full;
    if (threadIdx.x == 0) {
        barrier_init(&full, 1);
        barrier_expect_bytes(&full, 128);
        bulk_copy_async(held, x, 64, &full);
        bulk_copy_async(held + 4, x + 4, 64, &full);
    }
    __syncthreads();
    if (wait) barrier_wait(&full, 0);
    if (threadIdx.x < 8) y[threadIdx.x] = held[threadIdx.x];
}
extern "C" __global__ void two_grid_barriers(unsigned* cells, unsigned* out)
{
    if (threadIdx.x == 0) cells[blockIdx.x] = blockIdx.x + 1;
    grid_barrier();
    unsigned sum = 0;
    for (int b = 0; b < gridDim.x; ++b) sum += cells[b];
    grid_barrier();
    if (threadIdx.x == 0) cells[blockIdx.x] = sum;
    grid_barrier();
    out[blockIdx.x * blockDim.x + threadIdx.x] = cells[(blockIdx.x + 1) % gridDim.x];
}
extern "C" __global__ void relay(volatile unsigned* sums, unsigned* out)  // block b spins for block b - 1
{
    if (threadIdx.x == 0) {
        unsigned sum = 1;  // what has not come yet is 0
        if (blockIdx.x > 0) {
            while (sums[blockIdx.x - 1] == 0) spin_pause();
            sum = sums[blockIdx.x - 1];
        }
        out[blockIdx.x] = sum + blockIdx.x;
        sums[blockIdx.x] = sum + blockIdx.x;
    }
}
extern "C" __global__ void hand_over(const int* x, int* y)  // warps 0, 1 write what warps 2, 3 read; block 128
{
    __shared__ int held[64];
    const int t = threadIdx.x % 64;
    for (int round = 0; round < 3; ++round) {
        if (threadIdx.x < 64) {
            held[t] = x[64 * round + t];
            named_barrier(1, 128);
            named_barrier(2, 128);
        } else {
            named_barrier(1, 128);
            y[64 * round + t] = held[63 - t];
            named_barrier(2, 128);
        }
    }
    if (threadIdx.x >= 64) {  // a barrier of two warps only
        held[t] = y[t];
        named_barrier(3, 64);
        y[192 + t] = held[63 - t];
    }
}
extern "C" __global__ void looks_before_it_waits(int* y)
{
    __shared__ Barrier ready;
    if (threadIdx.x == 0) barrier_init(&ready, 32);
    __syncthreads();
    y[threadIdx.x] = barrier_test(&ready, 0);  // the first to look comes too early
    barrier_arrive(&ready);
    barrier_wait(&ready, 0);
    y[32 + threadIdx.x] = barrier_test(&ready, 0);
}
extern "C" __global__ void conversions(const float* x, unsigned short* half, unsigned short* brain, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { half[i] = float_to_half(x[i]); brain[i] = float_to_bfloat16(x[i]); }
}
extern "C" __global__ void halves(const unsigned short* bits, float* x)  // all 65,536
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    x[i] = half_to_float(bits[i]);
}
extern "C" __global__ void roots(const float* x, float* y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = rsqrtf(x[i]);
}
extern "C" __global__ void unfused(const float* x, float* y)
{
    y[0] = x[0] * x[1] + x[2];
    y[1] = __fmaf_rn(x[0], x[1], x[2]);
    y[2] = x[3] * 0.5f;  // a subnormal stays one
}
extern "C" __global__ void missing_barrier(float* y)  // thread t reads what thread 63 - t wrote
{
    __shared__ float part[64];
    part[threadIdx.x] = (float)threadIdx.x;
    y[threadIdx.x] = part[63 - threadIdx.x];
}
"""


@pytest.fixture(params=ORDERS, ids=lambda seed: f"order{seed}")
def host(request: pytest.FixtureRequest) -> Host:
    return Host(SOURCE, seed=request.param)


def test_text_reaches_the_compiler_unedited() -> None:
    for path in [CANDIDATES / "reference_order.py", CANDIDATES / "split_flat.py"]:
        space = host_namespace(path.read_text(encoding="utf-8"))
        source = space["CUDA_SOURCE"]
        compiled = build(source, space["NVRTC_OPTIONS"]).source_path.read_bytes()
        assert hashlib.sha256(compiled).hexdigest() == hashlib.sha256(source.encode()).hexdigest(), path.name


def test_indices_cover_grid_and_block_in_three_dimensions(host: Host) -> None:
    out = host.empty(12 * 16, dtype=torch.int32)
    host.launch("indices", (2, 3, 2), (4, 2, 2), out)
    assert out.tolist() == [1000 * b + t for b in range(12) for t in range(16)]


def test_definitions_among_the_options_are_honoured() -> None:
    host = Host(SOURCE, options=("--std=c++17", "--fmad=true", "-DFACTOR=3"))
    out = host.empty(16, dtype=torch.int32)
    host.launch("indices", 1, (4, 2, 2), out)
    assert out.tolist() == [3 * t for t in range(16)]


def test_shuffles_votes_and_reductions(host: Host) -> None:
    v = np.random.default_rng(3).integers(-50, 50, 32)
    out, votes = host.empty(11, 32, dtype=torch.int32), host.empty(3, dtype=torch.int32)
    host.launch("shuffles", 1, 32, host.tensor(v, torch.int32), out, votes)
    lane = np.arange(32)
    upper = np.where(lane < 31, v[np.minimum(lane + 1, 31)], v)
    expected = [
        np.full(32, v[5]),
        v[lane // 8 * 8 + (lane + 1) % 8],
        np.where(lane < 3, v, v[lane - 3]),
        np.where(lane % 4 == 0, v, v[lane - 1]),
        np.where(lane > 28, v, v[(lane + 3) % 32]),
        np.where(lane % 4 == 3, v, v[(lane + 1) % 32]),
        v[lane ^ 21],
        np.full(32, v.sum()),
        np.full(32, v.min()),
        np.full(32, v.max()),
        np.where(lane < 16, v[lane ^ 1], upper),
    ]
    for row, values in enumerate(expected):
        assert out[row].tolist() == values.tolist(), f"row {row}"
    ballot = sum(1 << i for i in range(32) if v[i] > 0)
    assert votes.tolist() == [ballot - (1 << 32) if ballot >> 31 else ballot, 1, 0]


def test_eight_byte_shuffle(host: Host) -> None:
    x = host.tensor(torch.randn(32, dtype=torch.float64), torch.float64)
    y = host.empty(32, dtype=torch.float64)
    host.launch("wide_shuffle", 1, 32, x, y)
    assert torch.equal(y, x.view(16, 2).flip(1).flatten())


def test_last_block_sees_all_others_over_two_workers() -> None:
    host = Host(SOURCE, workers=2)
    x = host.tensor(torch.arange(64 * 40) % 7)
    sums, done, total = host.empty(40), host.tensor([0], torch.int32), host.empty(1)
    host.launch("block_sum", 40, 64, x, sums, done, total)
    assert total.item() == x.sum().item()


def test_atomics(host: Host) -> None:
    cells = host.tensor([0, 0, 0, 0, 0, 255, 0, 0, 0], torch.int32)
    real, wide = host.tensor([0.0]), host.tensor([0], torch.int64)
    host.launch("atomics", 1, 64, cells, real, wide)
    first = {0: 100, 1: 163}.get(host.executor.seed, cells[7].item())
    assert cells.tolist() == [2016, -64, 63, -63, -1, 0, 0, first, 1]
    assert (real.item(), wide.item()) == (64.0, 64)


@pytest.mark.parametrize("n4", [1, 127, 128, 129, 1000])
def test_ring_of_asynchronous_copies(host: Host, n4: int) -> None:
    x, y = host.tensor(torch.randn(n4, 4)), host.empty(n4, 4)
    host.launch("ring", 1, 64, x, y, np.int32(n4), shared_bytes=2 * 4 * 32 * 16 + 4 * 8)
    assert torch.equal(y, 2 * x)


def test_copies_complete_as_late_as_their_groups_allow(host: Host) -> None:
    x, y = host.tensor(torch.randn(4, 4)), host.empty(4, 4)
    y.zero_()
    host.launch("groups", 1, 1, x, y)
    assert [bool(poisoned(row).all()) for row in y] == [True, False, True, False]
    assert torch.equal(y[1], x[1]) and torch.equal(y[3], x[3])


@pytest.mark.parametrize("wait", [0, 1])
def test_bulk_copy_is_there_after_the_wait_and_not_before(host: Host, wait: int) -> None:
    x, y = host.tensor(torch.randn(8, 4)), host.empty(8, 4)
    y.zero_()
    host.launch("bulk", 1, 32, x, y, np.int32(wait))
    assert torch.equal(y, x) if wait else bool(poisoned(y).all())


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", ORDERS)
def test_grid_barriers(seed: int, workers: int) -> None:
    host = Host(SOURCE, seed=seed, workers=workers)
    cells, out = host.empty(9, dtype=torch.int32), host.empty(9 * 33, dtype=torch.int32)
    host.launch("two_grid_barriers", 9, 33, cells, out, cooperative=True)
    assert out.tolist() == [45] * (9 * 33)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("seed", ORDERS)
def test_blocks_that_spin_for_each_other(seed: int, workers: int) -> None:
    host = Host(SOURCE, seed=seed, workers=workers)
    sums, out = host.tensor(torch.zeros(30), torch.int32), host.empty(30, dtype=torch.int32)
    host.launch("relay", 30, 64, sums, out, cooperative=True)
    assert out.tolist() == [1 + b * (b + 1) // 2 for b in range(30)]


def test_named_barriers_for_parts_of_a_block(host: Host) -> None:
    x, y = host.tensor(torch.arange(192), torch.int32), host.empty(256, dtype=torch.int32)
    host.launch("hand_over", 1, 128, x, y)
    assert y.view(4, 64)[:3].tolist() == x.view(3, 64).flip(1).tolist()
    assert y[192:].tolist() == x[:64].tolist()


def test_barrier_can_be_looked_at_without_waiting(host: Host) -> None:
    y = host.empty(64, dtype=torch.int32)
    host.launch("looks_before_it_waits", 1, 32, y)
    assert y[:32].min() == 0 and y[32:].tolist() == [1] * 32


def test_conversions_round_as_torch_does(host: Host) -> None:
    edges = [0.0, -0.0, 65504.0, 65519.99, 65520.0, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 1.0001 * 2.0**-25, 1e-45]
    bits = np.random.default_rng(1).integers(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32)
    near_half = (np.random.default_rng(2).integers(0x33000000, 0x477FFFFF, 50_000)).astype(np.uint32)
    parts = [np.array([*edges, np.inf], np.float32), bits.view(np.float32), near_half.view(np.float32)]
    x = torch.from_numpy(np.concatenate(parts))
    half, brain = host.empty(len(x), dtype=torch.float16), host.empty(len(x), dtype=torch.bfloat16)
    host.launch("conversions", -(-len(x) // 256), 256, host.tensor(x), half, brain, np.int32(len(x)))
    for name, got in (("half", half), ("bfloat16", brain)):
        expected = x.to(got.dtype)
        same = (got.view(torch.int16) == expected.view(torch.int16)) | (got.isnan() & expected.isnan())
        wrong = (~same).nonzero().flatten()[:3]
        assert same.all(), [(name, x[i].item().hex(), got[i].item(), expected[i].item()) for i in wrong]


def test_every_half_widens_exactly(host: Host) -> None:
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    x = host.empty(65536)
    host.launch("halves", 256, 256, host.tensor(bits, torch.int16), x)
    expected = bits.view(torch.float16).float()
    assert bool(((x.view(torch.int32) == expected.view(torch.int32)) | (x.isnan() & expected.isnan())).all())


def test_rsqrt_is_correctly_rounded(host: Host) -> None:
    x = torch.from_numpy(np.random.default_rng(4).integers(1, 0x7F800000, 20_000).astype(np.uint32).view(np.float32))
    y = host.empty(len(x))
    host.launch("roots", -(-len(x) // 256), 256, host.tensor(x), y, np.int32(len(x)))
    values, roots = x.double().numpy(), y.double().numpy()
    # 1/sqrt(x) lies between two midpoints m of neighbours exactly when m^2 x is below, above 1 (integers: no rounding).
    for value, root in zip(values[:2000].tolist(), roots[:2000].tolist(), strict=True):
        low, high = (np.nextafter(np.float32(root), np.float32(end)) for end in (0, np.inf))
        for neighbour, sign in ((low, -1), (high, 1)):
            top, bottom = ((float(neighbour) + root) / 2).as_integer_ratio()
            p, q = value.as_integer_ratio()
            assert (top * top * p - bottom * bottom * q) * sign > 0, (value.hex(), root.hex())


def test_nothing_is_fused_that_was_not_written_so(host: Host) -> None:
    x = torch.tensor([1 + 2.0**-13, 1 - 2.0**-13, -1.0, 2.0**-126], dtype=torch.float32)
    y = host.empty(3)
    host.launch("unfused", 1, 1, host.tensor(x), y)
    assert y.tolist() == [0.0, -(2.0**-26), 2.0**-127]


def test_thread_order_shows_a_missing_barrier() -> None:
    wrong = {}
    for seed in ORDERS:
        host = Host(SOURCE, seed=seed)
        y = host.empty(64)
        host.launch("missing_barrier", 1, 64, y)
        wrong[seed] = poisoned(y).nonzero().flatten().tolist()
    assert wrong[0] == list(range(32)) and wrong[1] == list(range(32, 64)), wrong
    assert wrong[5] and wrong[5] not in (wrong[0], wrong[1])


REFUSED_LAUNCHES = (
    ("indices", 1, 2048, (), "2048 threads"),
    ("indices", (1, 70_000), 32, (), "dimension y is 70000, must be 1 to 65535"),
    ("indices", 0, 32, (), "dimension x is 0, must be 1 to"),
    ("nothing", 1, 32, (), "is not in CUDA_SOURCE"),
    ("indices", 1, 32, (), "0 arguments, the kernel takes 1"),
    ("indices", 1, 32, (np.int32(1),), "numpy int32, the kernel's parameter is p"),
    ("ring", 1, 64, (0, 0, np.int64(1)), "numpy int64, the kernel's parameter is i4"),
    ("ring", 1, 64, (0, 0, 1), "argument 2 is int"),
    ("indices", 1, 32, (0x1234,), "address of no tensor"),
)


@pytest.mark.parametrize("kernel,grid,block,arguments,words", REFUSED_LAUNCHES, ids=lambda v: str(v)[:40])
def test_launch_that_a_device_would_refuse(kernel, grid, block, arguments, words) -> None:
    with pytest.raises(LaunchRefused, match=words):
        Host(SOURCE).launch(kernel, grid, block, *arguments)


def test_shared_memory_beyond_the_limit_is_refused() -> None:
    with pytest.raises(LaunchRefused, match="the device allows 232448"):
        Host(SOURCE).launch("ring", 1, 64, 0, 0, np.int32(1), shared_bytes=232_449)


REFUSED_SOURCES = (
    ("no kernel at all", (), "has no kernel"),
    ('extern "C" __global__ void k(int* y) { y[0] = undefined_name; }', (), "undefined_name"),
    ('__device__ unsigned counter;\nextern "C" __global__ void k() { }', (), "__device__ variable counter"),
    ('extern "C" __global__ void k() { }', ("--use_fast_math",), "IEEE only"),
    ('extern "C" __global__ void k() { }', ("-ftz=true",), "IEEE only"),
)


@pytest.mark.parametrize("source,options,words", REFUSED_SOURCES, ids=lambda v: str(v)[:30])
def test_source_that_cannot_be_followed_is_refused(source: str, options: tuple[str, ...], words: str) -> None:
    with pytest.raises(HostBuildError, match=words):
        build(source, options)


def test_no_two_threads_of_the_caller_disturb_a_launch() -> None:
    host, outs = Host(SOURCE, workers=2), []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(8):
            outs.append(host.empty(12 * 16, dtype=torch.int32))
        list(pool.map(lambda out: host.launch("indices", (2, 3, 2), (4, 2, 2), out), outs))
    assert all(out.tolist() == [1000 * b + t for b in range(12) for t in range(16)] for out in outs)
