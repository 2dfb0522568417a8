"""Residual and LayerNorm in one launch: x and the residual are read once, their sum is never stored.

Contract: within the official tolerance of native wherever native is near the true value; fp32, fp16, bf16.

What changes from add_then_norm.py: eager writes x + residual, and reads it again to normalise it. Here the sum is
formed in the registers of the threads that share a row, rounded to the tensors' type as eager's stored one is, and it
stays there until the output is written: three trips of a row's bytes instead of five. What is wider than registers and
shared memory together is formed again. Accesses are 16 bytes; where rows do not start at a multiple of 16 bytes, the
vectors are those of x's address grid, only the first and the last of a row are guarded elements, and the residual is
read by element.

Arithmetic in fp32, as in ../local_layernorm_tokens/token_best.py: a mean from the sum of h / n (which cannot overflow),
then d = h - mean, and from the sums of d and of d^2 what that mean was off by, and the variance.
"""

import functools
import hashlib
import os
import pathlib
import tempfile
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

WARP = 32
ROW_BLOCK = 128  # threads of a block that holds several rows: small, so that its rows end at about the same time
WARP_HELD = (1, 2, 4)  # vectors a lane keeps in registers where a warp has the row: one kernel each
BLOCK_HELD = {2: 512, 4: 512, 8: 512}  # where a block has it: one kernel each, and its most threads
WIDE_THREADS, WIDE_HELD = 1024, 4  # beyond: 64 registers a thread, so most of the row in shared memory
ACCESS = 16  # bytes
STATIC_SHARED = 1024  # bytes a block uses beside its slots, rounded up
MAX_WIDTH = 2**30  # so that an int counts past the end of a row without overflow
MAX_ROWS = 2**31 - 1  # CUDA's limit on a grid's x
ELEMENT = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

CUDA_SOURCE = r"""
// ELEMENT: 0 fp32, 1 fp16, 2 bf16.
// ALIGNED: every row, gamma and beta start at 16 bytes and n is a multiple of the vector; else see `shift`.
#ifndef KBSUB_HOST
__device__ __forceinline__ float half_to_float(unsigned short h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ unsigned floats_to_half2(float low, float high)
{
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ unsigned floats_to_bfloat162(float low, float high)
{
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
// The compiler must not keep the unpacked elements of one use for the next: they take twice the registers.
__device__ __forceinline__ void forget_unpacked(uint4& v)
{
    asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w));
}
#endif

// ---- an element, and a vector of W elements in four words ----
#if ELEMENT == 0
typedef float Element;
constexpr int W = 4;
__device__ __forceinline__ unsigned bits_of(Element e) { return __float_as_uint(e); }
__device__ __forceinline__ Element element_of(uint4 v, int k)
{
    return __uint_as_float(k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w);
}
__device__ __forceinline__ void unpack(uint4 v, float (&e)[W])
{
    e[0] = __uint_as_float(v.x);
    e[1] = __uint_as_float(v.y);
    e[2] = __uint_as_float(v.z);
    e[3] = __uint_as_float(v.w);
}
__device__ __forceinline__ uint4 pack(const float (&e)[W])
{
    return uint4{__float_as_uint(e[0]), __float_as_uint(e[1]), __float_as_uint(e[2]), __float_as_uint(e[3])};
}
#else
typedef unsigned short Element;
constexpr int W = 8;
__device__ __forceinline__ unsigned bits_of(Element e) { return e; }
__device__ __forceinline__ Element element_of(uint4 v, int k)
{
    const unsigned word = k < 2 ? v.x : k < 4 ? v.y : k < 6 ? v.z : v.w;
    return (Element)(word >> (k % 2 * 16));
}
__device__ __forceinline__ void unpack_pair(unsigned pair, float& low, float& high)
{
    if (ELEMENT == 1) {
        low = half_to_float((unsigned short)(pair & 0xffffu));
        high = half_to_float((unsigned short)(pair >> 16));
    } else {
        low = __uint_as_float(pair << 16);
        high = __uint_as_float(pair & 0xffff0000u);
    }
}
__device__ __forceinline__ void unpack(uint4 v, float (&e)[W])
{
    unpack_pair(v.x, e[0], e[1]);
    unpack_pair(v.y, e[2], e[3]);
    unpack_pair(v.z, e[4], e[5]);
    unpack_pair(v.w, e[6], e[7]);
}
__device__ __forceinline__ unsigned pack_pair(float low, float high)
{
    return ELEMENT == 1 ? floats_to_half2(low, high) : floats_to_bfloat162(low, high);
}
__device__ __forceinline__ uint4 pack(const float (&e)[W])
{
    return uint4{pack_pair(e[0], e[1]), pack_pair(e[2], e[3]), pack_pair(e[4], e[5]), pack_pair(e[6], e[7])};
}
#endif

// Elements at ... at + W - 1 of a row of n; at may be negative. Zero outside the row.
__device__ __forceinline__ bool whole(int at, int n) { return ALIGNED || (at >= 0 && at + W <= n); }
__device__ __forceinline__ bool in_row(int at, int n) { return ALIGNED || (at >= 0 && at < n); }
__device__ __forceinline__ uint4 guarded(const Element* row, int at, int n)
{
    constexpr int PER_WORD = W / 4;
    unsigned word[4] = {0u, 0u, 0u, 0u};
#pragma unroll
    for (int k = 0; k < W; ++k)
        if (at + k >= 0 && at + k < n)
            word[k / PER_WORD] |= bits_of(row[at + k]) << (k % PER_WORD * 16);
    return uint4{word[0], word[1], word[2], word[3]};
}
__device__ __forceinline__ uint4 load(const Element* row, int at, int n)
{
    return whole(at, n) ? *reinterpret_cast<const uint4*>(row + at) : guarded(row, at, n);
}
// The residual, gamma and beta do not share x's place on the address grid.
__device__ __forceinline__ uint4 load_beside(const Element* p, int at, int n)
{
    return ALIGNED ? *reinterpret_cast<const uint4*>(p + at) : guarded(p, at, n);
}
// x + residual, rounded to the elements' type. Zero outside the row.
__device__ __forceinline__ uint4 load_sum(const Element* x, const Element* residual, int at, int n)
{
    float e[W], r[W];
    unpack(load(x, at, n), e);
    unpack(load_beside(residual, at, n), r);
#pragma unroll
    for (int k = 0; k < W; ++k)
        e[k] += r[k];
    return pack(e);
}
__device__ __forceinline__ void store(Element* row, int at, int n, uint4 v)
{
    if (ALIGNED || (whole(at, n) && (unsigned long long)(row + at) % 16 == 0))
        *reinterpret_cast<uint4*>(row + at) = v;
    else
#pragma unroll
        for (int k = 0; k < W; ++k)
            if (in_row(at + k, n))
                row[at + k] = element_of(v, k);
}

// ---- the threads that share a row ----
__device__ __forceinline__ float lanes_sum(float v, int lanes)
{
    for (int step = lanes / 2; step > 0; step /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, step);
    return v;
}
// A power of two of lanes of a warp.
struct Lanes {
    int rank, size;
    __device__ __forceinline__ float sum(float v, int) const { return lanes_sum(v, size); }
    __device__ __forceinline__ float2 sum2(float2 v, int) const
    {
        return float2{lanes_sum(v.x, size), lanes_sum(v.y, size)};
    }
};
// A whole warp: the size is known to the compiler.
struct Warp {
    int rank;
    static constexpr int size = 32;
    __device__ __forceinline__ float sum(float v, int) const { return lanes_sum(v, 32); }
    __device__ __forceinline__ float2 sum2(float2 v, int) const
    {
        return float2{lanes_sum(v.x, 32), lanes_sum(v.y, 32)};
    }
};
// A block: warps first, then every warp over the warps' sums. Each reduction of a row has its own place.
struct Block {
    int rank, size;
    float2* partials;  // [2][32]
    __device__ __forceinline__ float2 sum2(float2 v, int place) const
    {
        v = float2{lanes_sum(v.x, 32), lanes_sum(v.y, 32)};
        const int lane = rank % 32;
        if (lane == 0)
            partials[32 * place + rank / 32] = v;
        __syncthreads();
        v = lane < size / 32 ? partials[32 * place + lane] : float2{0.f, 0.f};
        return float2{lanes_sum(v.x, 32), lanes_sum(v.y, 32)};
    }
    __device__ __forceinline__ float sum(float v, int place) const { return sum2(float2{v, 0.f}, place).x; }
};

// ---- one row ----
// The vector's part of the mean. Sums are taken in pairs: a row of equal values of a power-of-two length is exact.
__device__ __forceinline__ float mean_of(uint4 v, float share)
{
    float e[W];
    unpack(v, e);
#pragma unroll
    for (int k = 0; k < W; k += 2)
        e[k] = fmaf(e[k], share, e[k + 1] * share);
#if ELEMENT != 0
    e[0] += e[2];
    e[4] += e[6];
    return e[0] + e[4];
#else
    return e[0] + e[2];
#endif
}
__device__ __forceinline__ void add_deviations(float2& sums, uint4 v, float mean, int at, int n)
{
    float e[W];
    unpack(v, e);
#pragma unroll
    for (int k = 0; k < W; ++k) {
        const float d = in_row(at + k, n) ? e[k] - mean : 0.f;
        sums.x += d;
        sums.y = fmaf(d, d, sums.y);
    }
}
struct Statistics {
    float mean, rstd, shift;  // y = ((x - mean) * rstd + shift) * gamma + beta; shift = (mean - true mean) * rstd
};
__device__ __forceinline__ uint4 output(uint4 v, Statistics s, uint4 gamma, uint4 beta)
{
    float e[W], g[W], b[W];
    unpack(v, e);
    unpack(gamma, g);
    unpack(beta, b);
#pragma unroll
    for (int k = 0; k < W; ++k)
        e[k] = fmaf(fmaf(e[k] - s.mean, s.rstd, s.shift), g[k], b[k]);
    return pack(e);
}

// The sum of the rows of n elements at x and residual, normalised to y by the threads of `group`: vector v belongs to
// thread v % group.size. A thread keeps its first HELD vectors in registers. WIDE: the next `stored` in its slots of
// shared memory; the rest is read again. Not WIDE: a row has at most HELD vectors a thread, and one more of them only
// where it starts inside a vector.
template <int HELD, bool WIDE, class Group>
__device__ __forceinline__ void normalise(
    const Group& group, const Element* x, const Element* residual, const Element* gamma, const Element* beta,
    Element* y, int n, float eps, uint4* slots, int stored)
{
    // Vector v holds the elements from v * W - shift on, so that it starts at a multiple of 16 bytes.
    const int shift = ALIGNED ? 0 : (int)((unsigned long long)x / sizeof(Element) % W);
    const int step = W * group.size;
    const int first = W * group.rank - shift;
    const int in_slots = first + HELD * step;
    const int beyond = WIDE ? in_slots + stored * step : in_slots;
    constexpr bool REST = WIDE || !ALIGNED;

    uint4 held[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = first + i * step;
        held[i] = at < n ? load_sum(x, residual, at, n) : uint4{0u, 0u, 0u, 0u};
    }
    const float share = 1.f / n;
    float sum = 0.f;
    for (int at = in_slots, i = 0; WIDE && i < stored && at < n; at += step, ++i) {
        const uint4 v = load_sum(x, residual, at, n);
        slots[i * group.size] = v;
        sum += mean_of(v, share);
    }
    for (int at = beyond; REST && at < n; at += step)
        sum += mean_of(load_sum(x, residual, at, n), share);
    float part[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        part[i] = mean_of(held[i], share);  // what lies beyond the row is zero
#pragma unroll
    for (int apart = 1; apart < HELD; apart *= 2)
#pragma unroll
        for (int i = 0; i + apart < HELD; i += 2 * apart)
            part[i] += part[i + apart];
    const float mean = group.sum(sum + part[0], 0);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        forget_unpacked(held[i]);

    float2 sums = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = first + i * step;
        if (at < n)
            add_deviations(sums, held[i], mean, at, n);
    }
    for (int at = in_slots, i = 0; WIDE && i < stored && at < n; at += step, ++i)
        add_deviations(sums, slots[i * group.size], mean, at, n);
    for (int at = beyond; REST && at < n; at += step)
        add_deviations(sums, load_sum(x, residual, at, n), mean, at, n);
    sums = group.sum2(sums, 1);
#pragma unroll
    for (int i = 0; i < HELD; ++i)
        forget_unpacked(held[i]);

    Statistics s;
    s.mean = mean;
    const float off = sums.x * share;
    const float var = fmaxf(fmaf(-off, off, sums.y * share), 0.f);
    s.rstd = sums.y < __int_as_float(0x7f800000) ? rsqrtf(var + eps) : 0.f;  // as native where squares overflow
    s.shift = -off * s.rstd;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = first + i * step;
        if (at < n)
            store(y, at, n, output(held[i], s, load_beside(gamma, at, n), load_beside(beta, at, n)));
    }
    for (int at = in_slots, i = 0; WIDE && i < stored && at < n; at += step, ++i)
        store(y, at, n, output(slots[i * group.size], s, load_beside(gamma, at, n), load_beside(beta, at, n)));
    for (int at = beyond; REST && at < n; at += step)
        store(
            y, at, n,
            output(load_sum(x, residual, at, n), s, load_beside(gamma, at, n), load_beside(beta, at, n)));
}

// rows_by_lanes: grid (row blocks), block (128): a row to each `lanes` lanes, made for one vector a lane.
extern "C" __global__ void __launch_bounds__(128) rows_by_lanes(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, long long rows, int n, float eps, int lanes)
{
    const long long row = (blockIdx.x * 128LL + threadIdx.x) / lanes;
    const Lanes group = {(int)(threadIdx.x % lanes), lanes};
    // Lanes whose row does not exist take part in the warp's shuffles, with an empty row.
    const long long start = row < rows ? row * n : 0;
    normalise<1, false>(
        group, x + start, residual + start, gamma, beta, y + start, row < rows ? n : 0, eps, nullptr, 0);
}

// rows_by_warps_<HELD>: grid (row blocks), block (128): a row to each warp.
template <int HELD>
__device__ __forceinline__ void by_warps(
    const Element* x, const Element* residual, const Element* gamma, const Element* beta, Element* y, long long rows,
    int n, float eps)
{
    const long long row = blockIdx.x * 4LL + threadIdx.x / 32, start = row * n;
    if (row < rows)
        normalise<HELD, false>(
            Warp{(int)threadIdx.x % 32}, x + start, residual + start, gamma, beta, y + start, n, eps, nullptr, 0);
}
extern "C" __global__ void __launch_bounds__(128) rows_by_warps_1(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, long long rows, int n, float eps)
{
    by_warps<1>(x, residual, gamma, beta, y, rows, n, eps);
}
extern "C" __global__ void __launch_bounds__(128) rows_by_warps_2(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, long long rows, int n, float eps)
{
    by_warps<2>(x, residual, gamma, beta, y, rows, n, eps);
}
extern "C" __global__ void __launch_bounds__(128) rows_by_warps_4(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, long long rows, int n, float eps)
{
    by_warps<4>(x, residual, gamma, beta, y, rows, n, eps);
}

// row_by_block_<HELD>: grid (rows), block (threads): a row to each block, in registers.
// wide_row: the same with `stored` vectors a thread in shared memory.
template <int HELD, bool WIDE>
__device__ __forceinline__ void by_block(
    const Element* x, const Element* residual, const Element* gamma, const Element* beta, Element* y, int n, float eps,
    uint4* slots, int stored)
{
    __shared__ float2 partials[64];
    const Block group = {(int)threadIdx.x, (int)blockDim.x, partials};
    const long long start = (long long)blockIdx.x * n;
    normalise<HELD, WIDE>(group, x + start, residual + start, gamma, beta, y + start, n, eps, slots, stored);
}
extern "C" __global__ void __launch_bounds__(512) row_by_block_2(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, int n, float eps)
{
    by_block<2, false>(x, residual, gamma, beta, y, n, eps, nullptr, 0);
}
extern "C" __global__ void __launch_bounds__(512) row_by_block_4(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, int n, float eps)
{
    by_block<4, false>(x, residual, gamma, beta, y, n, eps, nullptr, 0);
}
extern "C" __global__ void __launch_bounds__(512) row_by_block_8(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, int n, float eps)
{
    by_block<8, false>(x, residual, gamma, beta, y, n, eps, nullptr, 0);
}
extern "C" __global__ void __launch_bounds__(1024) wide_row(
    const Element* __restrict__ x, const Element* __restrict__ residual, const Element* __restrict__ gamma,
    const Element* __restrict__ beta, Element* __restrict__ y, int n, float eps, int stored)
{
    extern __shared__ __align__(16) unsigned char shared_memory[];
    by_block<4, true>(
        x, residual, gamma, beta, y, n, eps, reinterpret_cast<uint4*>(shared_memory) + threadIdx.x, stored);
}
"""
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")


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


class Geometry(NamedTuple):
    kernel: str
    grid: tuple
    block: tuple
    last: int  # the kernel's own last argument: lanes of a row, vectors a thread in shared memory; -1 where it has none
    shared_bytes: int


def geometry(rows: int, n: int, dtype: torch.dtype, limits: DeviceLimits) -> Geometry:
    """Few lanes, a warp or a block a row, with as few vectors a thread as fit; then shared memory."""
    width = ACCESS // dtype.itemsize
    vectors = -(-n // width) if n % width == 0 else -(-(n + width - 1) // width)  # a row may start inside a vector
    if vectors < WARP:
        lanes = 1 << (vectors - 1).bit_length()
        blocks = -(-rows * lanes // ROW_BLOCK)
        return Geometry("rows_by_lanes", (blocks,), (ROW_BLOCK,), lanes, 0)
    if vectors <= WARP * WARP_HELD[-1]:
        held = next(held for held in WARP_HELD if WARP * held >= vectors)
        return Geometry(f"rows_by_warps_{held}", (-(-rows * WARP // ROW_BLOCK),), (ROW_BLOCK,), -1, 0)
    for held, most in BLOCK_HELD.items():
        threads = -(-vectors // (held * WARP)) * WARP
        if threads <= most:
            return Geometry(f"row_by_block_{held}", (rows,), (threads,), -1, 0)
    room = (limits.shared_bytes_per_block - STATIC_SHARED) // (ACCESS * WIDE_THREADS)
    stored = min(-(-vectors // WIDE_THREADS) - WIDE_HELD, room)
    return Geometry("wide_row", (rows,), (WIDE_THREADS,), stored, stored * ACCESS * WIDE_THREADS)


class AffineParameters(nn.Module):
    """What nn.LayerNorm holds: weight (ones) and bias (zeros) of `normalized_shape`, and eps."""

    def __init__(self, normalized_shape, eps: float):
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if not (isinstance(sizes, (tuple, list)) and sizes and all(isinstance(n, int) and n > 0 for n in sizes)):
            raise RuntimeError(f"normalized_shape: {normalized_shape!r} must be one or more positive integers")
        self.normalized_shape = tuple(sizes)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape))
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape))


def require_supported(x: torch.Tensor, residual: torch.Tensor, ln: AffineParameters):
    """Raises ValueError, naming the tensor and the rule, for every input this file does not take."""
    if ln.weight is None or ln.bias is None:
        raise ValueError("weight, bias: both must be present (an affine layer norm)")
    sizes = tuple(ln.normalized_shape)  # a list where somebody has replaced it
    for name, tensor in (("x", x), ("residual", residual), ("weight", ln.weight), ("bias", ln.bias)):
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
    if x.dim() <= len(sizes) or tuple(x.shape[-len(sizes) :]) != sizes:
        raise ValueError(f"x: shape {tuple(x.shape)} must be (tokens..., *{sizes})")
    if residual.shape != x.shape:
        raise ValueError(f"residual: shape {tuple(residual.shape)}, must be that of x, {tuple(x.shape)}")
    if ln.weight.numel() > MAX_WIDTH or x.numel() // ln.weight.numel() > MAX_ROWS:
        raise ValueError(f"x: shape {tuple(x.shape)}, must have rows of at most 2^30 elements and fewer than 2^31 rows")
    for name, tensor in (("x", x), ("residual", residual), ("weight", ln.weight), ("bias", ln.bias)):
        if tensor.device.type != DEVICE_TYPE or tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, must be on {DEVICE_TYPE}, the device of x ({x.device})")
        if tensor.dtype not in ELEMENT or tensor.dtype != x.dtype:
            known = "torch.float32, torch.float16 or torch.bfloat16"
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be {known}, as that of x ({x.dtype})")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")
        if name in ("weight", "bias") and tuple(tensor.shape) != sizes:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be normalized_shape {sizes}")


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = AffineParameters(normalized_shape, eps)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual (tokens..., *normalized_shape) fp32, fp16 or bf16 -> y of that shape. ValueError otherwise."""
        require_supported(x, residual, self.ln)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = self.ln.weight.numel()
        rows = x.numel() // n
        if rows == 0:
            return y
        index = x.device.index or 0
        launch = geometry(rows, n, x.dtype, device_limits(index))
        tensors = (x, residual, self.ln.weight, self.ln.bias, y)
        aligned = n * x.element_size() % ACCESS == 0 and all(tensor.data_ptr() % ACCESS == 0 for tensor in tensors)
        options = (*NVRTC_OPTIONS, f"-DELEMENT={ELEMENT[x.dtype]}", f"-DALIGNED={int(aligned)}")
        arguments = [tensor.data_ptr() for tensor in tensors]
        if launch.kernel.startswith("rows_by"):
            arguments.append(np.int64(rows))
        arguments += [np.int32(n), np.float32(self.ln.eps)]
        if launch.last >= 0:
            arguments.append(np.int32(launch.last))
        cuda_module(CUDA_SOURCE, options, index).launch(
            launch.kernel, launch.grid, launch.block, tuple(arguments), launch.shared_bytes
        )
        return y
