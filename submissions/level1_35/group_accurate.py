"""GroupNorm nearest to real arithmetic, x read once.

Contract: tolerance, declared accurate: x (batch, channels, *) fp32, any layout: what is not contiguous is copied first.
A group of 8 MiB is held by 33 multiprocessors, half of it in registers, while they sum it, meet once through a few
words in L2, and write it out; four such sets work at different stages of different groups.

Every output is within a few roundings of the float64 answer: sums in float64 of x and of (x - p)^2, p the row's first
element; the mean goes to the output as a high and a low part; the reciprocal root is rounded once.

| kernel | grid, block | chosen when |
|---|---|---|
| `sets_once` | sets of blocks, cooperative, 512 | rows of 8,192 elements and more that 64 blocks can hold, aligned |
| `row_any` | a block a row, 512 | everything else: reads x twice |

Inference only.
"""

import functools
import hashlib
import math
import os
import pathlib
import tempfile
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

THREADS, BLOCKS = 512, 1  # of a block; of them a multiprocessor
HELD, STAGED = 12, 20  # vec4 of a row that a thread keeps in registers, and in shared memory
STAGED_BYTES = 16 * THREADS * STAGED
MOST_MEMBERS = 64  # blocks that share a row
WORTH_IT = 2048  # vec4 of a row, from which on blocks share it

CUDA_SOURCE = r"""
// Built with -DTHREADS (of a block), -DBLOCKS (of them a multiprocessor), -DHELD (vec4 a thread keeps in registers) and
// -DSTAGED (vec4 it keeps in shared memory).
#ifndef REFILL
#define REFILL 1
#endif
#ifndef PAUSE
#define PAUSE 60
#endif
constexpr int WARPS = THREADS / 32;

// ---- device-only functions ----
#ifndef KBSUB_HOST
__device__ __forceinline__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void spin_pause() {  // polls would hold the messages up
    for (const long long start = clock64(); clock64() - start < PAUSE;) {}
}
__device__ __forceinline__ ulonglong2 read_pair(const ulonglong2* p) {  // anew each time; each half is one access
    ulonglong2 v; asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(p) : "memory");
    return v;
}
__device__ __forceinline__ void write_pair(ulonglong2* p, ulonglong2 v) {
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(v.x), "l"(v.y) : "memory");
}
// All blocks of a cooperative launch meet on the word that the driver keeps for it (as cooperative_groups' grid sync
// does): its top bit flips once block 0 has added what is missing and all others have added one.
__device__ __forceinline__ void grid_barrier() {
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned low, high;
        asm("mov.u32 %0, %%envreg2;" : "=r"(low));
        asm("mov.u32 %0, %%envreg1;" : "=r"(high));
        volatile unsigned* word = (volatile unsigned*)((((unsigned long long)high << 32) | low) + 4);
        __threadfence();
        const unsigned before = atomicAdd((unsigned*)word, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
        while (((before ^ *word) & 0x80000000u) == 0) {}
        __threadfence();
    }
    __syncthreads();
}
#endif

constexpr unsigned long long EMPTY = ~0ull;  // what a slot holds until its message has come

// ---- moments ----
struct Sums {
    double total, squared;  // of x, and of (x - pivot)^2
};
__device__ __forceinline__ double exchange(double v, int mask) {
    return __hiloint2double(__shfl_xor_sync(0xffffffffu, __double2hiint(v), mask),
                            __shfl_xor_sync(0xffffffffu, __double2loint(v), mask));
}
__device__ __forceinline__ double warp_total(double v) {  // the same in every lane
    for (int mask = 16; mask > 0; mask /= 2) v = __dadd_rn(v, exchange(v, mask));
    return v;
}
__device__ __forceinline__ void add(Sums& s, float x, double pivot) {
    const double away = __dsub_rn((double)x, pivot);
    s.total = __dadd_rn(s.total, (double)x);
    s.squared = __fma_rn(away, away, s.squared);
}
__device__ __forceinline__ void add(Sums* s, float4 v, double pivot) {
    add(s[0], v.x, pivot);
    add(s[1], v.y, pivot);
    add(s[0], v.z, pivot);
    add(s[1], v.w, pivot);
}

// ---- output: z = (x * scale - high - low) * rstd, rstd rounded once, the mean in two parts ----
// scale is 1 but for rows so small that the low part of their mean would be subnormal.
struct RowFacts {
    float scale, high, low, rstd;
};
__device__ __forceinline__ RowFacts row_facts(double mean, double variance, double eps) {
    const bool tiny = fabs(mean) < 0x1p-60 && variance < 0x1p-120;
    const double scaled = tiny ? __dmul_rn(mean, 0x1p80) : mean, rstd = rsqrt(__dadd_rn(variance, eps));
    const float high = (float)scaled;
    return {tiny ? 0x1p80f : 1.f, high, (float)__dsub_rn(scaled, (double)high),
            (float)(tiny ? __dmul_rn(rstd, 0x1p-80) : rstd)};
}
// From the sums over n elements. p is one of them, so (p - mean)^2 <= M2: taking n (p - mean)^2 off costs little.
__device__ __forceinline__ RowFacts facts_of(Sums all, double n, double pivot, double eps) {
    const double mean = __ddiv_rn(all.total, n), off = __ddiv_rn(__fma_rn(-n, pivot, all.total), n);
    const double variance = __fma_rn(-off, off, __ddiv_rn(all.squared, n));
    return row_facts(mean, variance < 0. ? 0. : variance, eps);  // a NaN stays
}
__device__ __forceinline__ float normalize(float x, float g, float b, RowFacts row) {
    return __fmaf_rn(g, __fmul_rn(__fsub_rn(__fmaf_rn(x, row.scale, -row.high), row.low), row.rstd), b);
}
__device__ __forceinline__ float4 normalize(float4 x, float g, float b, RowFacts row) {
    return make_float4(normalize(x.x, g, b, row), normalize(x.y, g, b, row), normalize(x.z, g, b, row),
                       normalize(x.w, g, b, row));
}
// Sums of the block, in thread 0 (two barriers); `room` for one pair a warp.
__device__ __forceinline__ Sums block_sums(Sums s, double (*room)[32], int warps) {
    s = {warp_total(s.total), warp_total(s.squared)};
    if (threadIdx.x % 32 == 0) {
        room[0][threadIdx.x / 32] = s.total;
        room[1][threadIdx.x / 32] = s.squared;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
        const bool there = threadIdx.x < warps;
        s = {warp_total(there ? room[0][threadIdx.x] : 0.), warp_total(there ? room[1][threadIdx.x] : 0.)};
    }
    return s;
}

// sets_once: a cooperative grid of sets of `members` blocks; row r (a group of `vectors` vec4) belongs to set r mod
// sets, whose blocks hold `share` vec4 of it each and meet through slots (rows * members pairs). Read once.
// Dynamic shared memory: STAGED * THREADS vec4.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sets_once(
    const float4* __restrict__ x, const float* __restrict__ gamma,
    const float* __restrict__ beta, float4* __restrict__ y, ulonglong2* slots,
    int rows, int vectors, int members, int share, int channels, int channel_vectors, double eps)
{
    extern __shared__ __align__(128) unsigned char shared_memory[];
    __shared__ double room[2][32], of_set[2];
    float4* const staged = (float4*)shared_memory + threadIdx.x;
    const int thread = threadIdx.x, sets = gridDim.x / members;
    const int set = blockIdx.x / members, member = blockIdx.x % members;
    if (share > (HELD + STAGED) * THREADS || (long long)share * members < vectors) __trap();
    for (long long slot = blockIdx.x * (long long)THREADS + thread; slot < (long long)rows * members;
         slot += (long long)gridDim.x * THREADS)
        write_pair(slots + slot, make_ulonglong2(EMPTY, EMPTY));
    grid_barrier();
    if (set >= sets) return;
    const int first = min(member * share, vectors), width = min(share, vectors - first);
    const int length = width > thread ? (width - thread + THREADS - 1) / THREADS : 0;
    const long long step = (long long)sets * vectors;
    const float4* from = x + (long long)set * vectors + first + thread;
    float4* to = y + (long long)set * vectors + first + thread;
    const float* pivots = (const float*)(x + (long long)set * vectors);
#pragma unroll
    for (int k = 0; k < STAGED; ++k)
        if (HELD + k < length && set < rows) copy16_async(staged + k * THREADS, from + (HELD + k) * THREADS);
    copies_commit();
    float first_of_next = set < rows ? *pivots : 0.f;
#pragma unroll 1
    for (int row = set; row < rows; row += sets, from += step, to += step) {
        const double pivot = (double)first_of_next;
        float4 held[HELD];
#pragma unroll
        for (int k = 0; k < HELD; ++k)
            if (k < length) held[k] = __ldcs(from + k * THREADS);
        pivots += 4 * step;
        if (row + sets < rows) first_of_next = *pivots;  // a row ahead: it would be waited for
        Sums s[2] = {{0., 0.}, {0., 0.}};
        copies_wait<0>();
#pragma unroll 2
        for (int k = 0; k < STAGED; ++k)
            if (HELD + k < length) add(s, staged[k * THREADS], pivot);
#pragma unroll
        for (int k = 0; k < HELD; ++k)
            if (k < length) add(s, held[k], pivot);
        Sums own = block_sums({__dadd_rn(s[0].total, s[1].total), __dadd_rn(s[0].squared, s[1].squared)}, room, WARPS);
        if (thread < 32) {
            ulonglong2* const of_row = slots + (long long)row * members;
            if (thread == 0)
                write_pair(of_row + member, make_ulonglong2((unsigned long long)__double_as_longlong(own.total),
                                                            (unsigned long long)__double_as_longlong(own.squared)));
            Sums all = {0., 0.};
            for (int m = thread; m < members; m += 32) {
                ulonglong2 v = read_pair(of_row + m);
                while (v.x == EMPTY || v.y == EMPTY) {  // no sum of floats has these bits
                    spin_pause();
                    v = read_pair(of_row + m);
                }
                all.total = __dadd_rn(all.total, __longlong_as_double((long long)v.x));
                all.squared = __dadd_rn(all.squared, __longlong_as_double((long long)v.y));
            }
            all = {warp_total(all.total), warp_total(all.squared)};
            if (thread == 0) {
                of_set[0] = all.total;
                of_set[1] = all.squared;
            }
        }
        __syncthreads();
        const RowFacts facts = facts_of({of_set[0], of_set[1]}, 4. * vectors, pivot, eps);
        // A block's share lies in one channel or in two.
        const int channel = (int)((long long)row * (vectors / channel_vectors) % channels) + first / channel_vectors;
        const int turn = channel_vectors - first % channel_vectors, other = min(channel + 1, channels - 1);
        const float g0 = gamma[channel], g1 = gamma[other], b0 = beta[channel], b1 = beta[other];
        const bool more = row + sets < rows;
#pragma unroll 4
        for (int k = 0; k < STAGED; ++k) {
            if (HELD + k < length) {
                const float4 v = staged[k * THREADS];
                if (REFILL && more) copy16_async(staged + k * THREADS, from + step + (HELD + k) * THREADS);
                const bool here = thread + (HELD + k) * THREADS < turn;
                __stcs(to + (HELD + k) * THREADS, normalize(v, here ? g0 : g1, here ? b0 : b1, facts));
            }
        }
        if (REFILL) copies_commit();
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            if (k < length) {
                const bool here = thread + k * THREADS < turn;
                __stcs(to + k * THREADS, normalize(held[k], here ? g0 : g1, here ? b0 : b1, facts));
            }
        }
        if (!REFILL) {
#pragma unroll
            for (int k = 0; k < STAGED; ++k)
                if (HELD + k < length && more) copy16_async(staged + k * THREADS, from + step + (HELD + k) * THREADS);
            copies_commit();
        }
    }
}

// row_any: a block of THREADS a row, element by element; every other size. Reads x twice.
extern "C" __global__ void __launch_bounds__(THREADS) row_any(
    const float* __restrict__ x, const float* __restrict__ gamma,
    const float* __restrict__ beta, float* __restrict__ y, long long n, int channels, int channels_a_group, double eps)
{
    __shared__ double room[2][32], of_set[2];
    x += blockIdx.x * n;
    y += blockIdx.x * n;
    const double pivot = (double)x[0];
    Sums s = {0., 0.};
    for (long long i = threadIdx.x; i < n; i += THREADS) add(s, x[i], pivot);
    s = block_sums(s, room, WARPS);
    if (threadIdx.x == 0) {
        of_set[0] = s.total;
        of_set[1] = s.squared;
    }
    __syncthreads();
    const RowFacts facts = facts_of({of_set[0], of_set[1]}, (double)n, pivot, eps);
    for (long long i = threadIdx.x; i < n; i += THREADS) {
        const int of_group = blockIdx.x % (channels / channels_a_group) * channels_a_group;
        const int channel = of_group + (int)(i / (n / channels_a_group));
        y[i] = normalize(x[i], gamma[channel], beta[channel], facts);
    }
}
"""
NVRTC_OPTIONS = ("--std=c++17", "--fmad=true", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


# ---- loader: byte-identical in every CUDA file of this repository; a test says so ----
DEVICE_TYPE = "cuda"  # where tensors must live; the host executor sets "cpu"


class DeviceLimits(NamedTuple):
    """What a launch geometry may depend on: the device, never pointers, contents or call counts."""

    index: int
    compute_capability: int  # 90 for sm_90
    multiprocessors: int
    shared_bytes_per_block: int  # the opt-in limit
    shared_bytes_per_multiprocessor: int
    threads_per_multiprocessor: int
    l2_bytes: int
    fp32_to_fp64_ratio: int  # 2 on H100/H200, 64 on consumer parts


@functools.lru_cache(maxsize=None)
def device_limits(index: int) -> DeviceLimits:
    import cupy

    device = cupy.cuda.Device(index)
    facts = device.attributes
    return DeviceLimits(
        index=index,
        compute_capability=int(device.compute_capability),
        multiprocessors=facts["MultiProcessorCount"],
        shared_bytes_per_block=facts["MaxSharedMemoryPerBlockOptin"],
        shared_bytes_per_multiprocessor=facts["MaxSharedMemoryPerMultiprocessor"],
        threads_per_multiprocessor=facts["MaxThreadsPerMultiProcessor"],
        l2_bytes=facts["L2CacheSize"],
        fp32_to_fp64_ratio=facts["SingleToDoublePrecisionPerfRatio"],
    )


class RawStream(NamedTuple):
    ptr: int


def cached_cubin(source: str, options: tuple, arch: str) -> bytes:
    """The cubin of `source`, from the user cache when its digest holds, else compiled by NVRTC.

    The NVRTC binding is called directly because CuPy's RawModule appends -ftz=true after the caller's options.
    """
    from cupy_backends.cuda.libs import nvrtc

    flags = (*options, "--gpu-architecture=" + arch)
    key = hashlib.sha256(repr((source, flags, nvrtc.getVersion())).encode()).hexdigest()
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "kbsub" / "cubin"
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not (folder.is_absolute() and nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="kbsub-cubin-"))  # no usable home: compiled once a process
    folder.mkdir(parents=True, exist_ok=True)
    entry = folder / key
    stored = entry.read_bytes() if entry.is_file() else b""
    if len(stored) > 32 and hashlib.sha256(stored[32:]).digest() == stored[:32]:
        return stored[32:]
    program = nvrtc.createProgram(source, "candidate.cu", [], [])
    with build_log_on_failure(nvrtc, program):
        nvrtc.compileProgram(program, list(flags))
    cubin = nvrtc.getCUBIN(program) + b"\0"  # CuPy's binding drops the last byte of the image
    nvrtc.destroyProgram(program)
    draft = tempfile.NamedTemporaryFile(dir=folder, delete=False)
    with draft:
        draft.write(hashlib.sha256(cubin).digest() + cubin)
    os.replace(draft.name, entry)
    return cubin


class build_log_on_failure:
    """Turns an NVRTC error into a RuntimeError that carries the build log."""

    def __init__(self, nvrtc, program):
        self.nvrtc, self.program = nvrtc, program

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is not None:
            raise RuntimeError(f"NVRTC: {error}\n{self.nvrtc.getProgramLog(self.program)}") from error


class CudaModule:
    """The kernels of one source on one device, launched on torch's current stream."""

    def __init__(self, source: str, options: tuple, index: int):
        import cupy

        self.driver = cupy.cuda.driver
        self.index = index
        self.limits = device_limits(index)
        with torch.cuda.device(index):
            torch.cuda.current_stream(index).synchronize()  # the primary context exists from here on
            self.module = cupy.cuda.function.Module()
            self.module.load(cached_cubin(source, options, f"sm_{self.limits.compute_capability}"))
        self.kernels: dict = {}

    def kernel(self, name: str, shared_bytes: int):
        function, allowed = self.kernels.get(name) or (self.module.get_function(name), 0)
        if shared_bytes > allowed:
            self.driver.funcSetAttribute(function.ptr, 8, shared_bytes)  # MAX_DYNAMIC_SHARED_SIZE_BYTES
            allowed = shared_bytes
        self.kernels[name] = (function, allowed)
        return function

    def resident_blocks(self, name: str, threads: int, shared_bytes: int) -> int:
        """How many blocks of this kernel the whole device holds at once."""
        function = self.kernel(name, shared_bytes)
        each = self.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, threads, shared_bytes)
        return each * self.limits.multiprocessors

    def launch(
        self, name: str, grid: tuple, block: tuple, arguments: tuple, shared_bytes: int = 0, cooperative: bool = False
    ):
        """Arguments: addresses as int, scalars as numpy scalars of the kernel's own types."""
        stream = RawStream(torch.cuda.current_stream(self.index).cuda_stream)
        function = self.kernel(name, shared_bytes)
        if torch.cuda.current_device() == self.index:
            function(grid, block, arguments, shared_bytes, stream, cooperative)
        else:
            with torch.cuda.device(self.index):
                function(grid, block, arguments, shared_bytes, stream, cooperative)


@functools.lru_cache(maxsize=None)
def cuda_module(source: str, options: tuple, index: int) -> CudaModule:
    return CudaModule(source, options, index)


# ---- end of loader ----


BUILD = (f"-DTHREADS={THREADS}", f"-DBLOCKS={BLOCKS}", f"-DHELD={HELD}", f"-DSTAGED={STAGED}")


class Geometry(NamedTuple):
    """kernel: "sets_once" or "row_any"; sets of `members` blocks, each with `share` vec4 of a row."""

    kernel: str
    members: int = 0
    sets: int = 0
    share: int = 0


def geometry(rows: int, n: int, whole: int, aligned: bool, blocks: int) -> Geometry:
    """From the sizes. n: elements of a row; whole: of what shares its parameters, of which a block may touch two.

    aligned: x begins on 16 bytes. blocks: of sets_once, that the device holds at once.
    """
    vectors = n // 4
    members = max(-(-vectors // (THREADS * (HELD + STAGED))), -(-n // whole))
    share = -(-vectors // members)
    fits = aligned and n % 4 == 0 and whole % 4 == 0 and members <= MOST_MEMBERS
    if fits and vectors >= WORTH_IT and blocks >= members and vectors < 2**31:
        return Geometry("sets_once", members, min(blocks // members, rows), share)
    return Geometry("row_any")


class GroupNormParameters(nn.Module):
    """What nn.GroupNorm holds: weight (ones) and bias (zeros) of its channels, and eps."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5):
        super().__init__()
        for name, value in (("num_features", num_channels), ("num_groups", num_groups)):
            if not (isinstance(value, int) and 0 < value < 2**31):
                raise RuntimeError(f"{name}: {value!r} must be a positive integer below 2^31")
        if num_channels % num_groups:
            raise RuntimeError(f"num_features: {num_channels} must be a multiple of num_groups, {num_groups}")
        self.num_groups, self.num_channels, self.eps = num_groups, num_channels, eps
        self.weight = nn.Parameter(torch.ones(num_channels))
        self.bias = nn.Parameter(torch.zeros(num_channels))


def require_supported(x: torch.Tensor, gn: GroupNormParameters):
    """Raises ValueError, naming the tensor and the rule, for every input this file does not take."""
    if gn.weight is None or gn.bias is None:
        raise ValueError("weight, bias: both must be present")
    for name, tensor in (("x", x), ("weight", gn.weight), ("bias", gn.bias)):
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be torch.float32")
        if tensor.device.type != DEVICE_TYPE or tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, must be on {DEVICE_TYPE}, the device of x ({x.device})")
        if name != "x" and (tuple(tensor.shape) != (gn.num_channels,) or not tensor.is_contiguous()):
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be ({gn.num_channels},), contiguous")
    if x.dim() < 2 or x.shape[1] != gn.num_channels:
        raise ValueError(f"x: shape {tuple(x.shape)}, must be (batch, {gn.num_channels}, *)")
    if x.numel() and (math.prod(x.shape[2:]) >= 2**31 or x.shape[0] * x.shape[1] >= 2**31):
        raise ValueError(f"x: shape {tuple(x.shape)}, must have fewer than 2^31 channels of fewer than 2^31 pixels")


class ModelNew(nn.Module):
    def __init__(self, num_features: int, num_groups: int):
        super().__init__()
        self.gn = GroupNormParameters(num_groups, num_features)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, channels, *) fp32 -> the same shape. ValueError for what the file does not take."""
        gn = self.gn
        require_supported(x, gn)
        x = x.contiguous()
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel() == 0:
            return y
        pixels, channels = math.prod(x.shape[2:]), gn.num_channels
        a_group = channels // gn.num_groups
        rows, n = x.shape[0] * gn.num_groups, a_group * pixels
        index, eps = x.device.index or 0, np.float64(gn.eps)
        module = cuda_module(CUDA_SOURCE, NVRTC_OPTIONS + BUILD, index)
        blocks = 0
        if device_limits(index).shared_bytes_per_block >= STAGED_BYTES + 1024:
            blocks = module.resident_blocks("sets_once", THREADS, STAGED_BYTES)
        plan = geometry(rows, n, pixels, x.data_ptr() % 16 == 0, blocks)
        tensors = (x.data_ptr(), gn.weight.data_ptr(), gn.bias.data_ptr(), y.data_ptr())
        if plan.kernel == "row_any":
            sizes = (np.int64(n), np.int32(channels), np.int32(a_group))
            module.launch("row_any", (rows,), (THREADS,), (*tensors, *sizes, eps))
            return y
        slots = torch.empty(2 * rows * plan.members, dtype=torch.int64, device=x.device)
        sizes = (rows, n // 4, plan.members, plan.share, channels, pixels // 4)
        arguments = (*tensors, slots.data_ptr(), *(np.int32(size) for size in sizes), eps)
        grid = (plan.sets * plan.members,)
        module.launch("sets_once", grid, (THREADS,), arguments, STAGED_BYTES, cooperative=True)
        return y
