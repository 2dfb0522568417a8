"""LayerNorm over the hidden dimension, half in and out, fp32 in between, one 16-byte load of eight a thread.

Contract: within the official tolerance of native, fp16, any hidden size.

From `f16x8_pack_f16.py`: the same 16-byte accesses, with the arithmetic in fp32. The row stays packed in registers
and is widened each time it is used.
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

MOST_THREADS = 1024  # of a block
MOST_HELD = 2  # octets, 8 registers: widened, they are 16
WIDTH = 8  # elements of an octet
BYTES = 16  # of such an access
MAX_WIDTH = 2**30  # so that an int counts past the end of a row without overflow
MAX_ROWS = 2**31 - 1  # CUDA's limit on a grid's x

CUDA_SOURCE = r"""
// HELD: how many octets of its row a thread keeps in registers; what a wider row has beyond them is read again.
#ifndef KBSUB_HOST
__device__ __forceinline__ float half_to_float(unsigned short h)
{
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ unsigned short float_to_half(float f)
{
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}
#endif

// The sum over the block, in every thread: each warp first, then each warp again over the warps' sums.
__device__ __forceinline__ float warp_sum(float v)
{
    for (int lanes = 16; lanes > 0; lanes /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, lanes);
    return v;
}
__device__ __forceinline__ float block_sum(float v, float* partials)
{
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0)
        partials[threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partials[threadIdx.x % 32] : 0.f);
}

// Eight halves in four words. ALIGNED: n is a multiple of 8 and every row starts at 16 bytes; else guarded elements.
__device__ __forceinline__ unsigned pair_at(const unsigned short* p, int at, int n)
{
    const unsigned low = at < n ? p[at] : (unsigned short)0;
    const unsigned high = at + 1 < n ? p[at + 1] : (unsigned short)0;
    return low | high << 16;
}
__device__ __forceinline__ uint4 load8(const unsigned short* p, int at, int n)
{
    if (ALIGNED)
        return *reinterpret_cast<const uint4*>(p + at);
    return uint4{pair_at(p, at, n), pair_at(p, at + 2, n), pair_at(p, at + 4, n), pair_at(p, at + 6, n)};
}
__device__ __forceinline__ void store8(unsigned short* p, int at, int n, uint4 v)
{
    if (ALIGNED) {
        *reinterpret_cast<uint4*>(p + at) = v;
        return;
    }
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int k = 0; k < 8; ++k)
        if (at + k < n)
            p[at + k] = (unsigned short)(words[k / 2] >> (k % 2 * 16));
}
__device__ __forceinline__ float low(unsigned pair) { return half_to_float((unsigned short)(pair & 0xffffu)); }
__device__ __forceinline__ float high(unsigned pair) { return half_to_float((unsigned short)(pair >> 16)); }
__device__ __forceinline__ float sum8(uint4 v)
{
    return ((low(v.x) + high(v.x)) + (low(v.y) + high(v.y))) + ((low(v.z) + high(v.z)) + (low(v.w) + high(v.w)));
}
__device__ __forceinline__ float squares2(unsigned pair, float mean, int at, int n)
{
    const float d0 = low(pair) - mean, d1 = high(pair) - mean;
    return (ALIGNED || at < n ? d0 * d0 : 0.f) + (ALIGNED || at + 1 < n ? d1 * d1 : 0.f);
}
__device__ __forceinline__ float squares8(uint4 v, float mean, int at, int n)
{
    return (squares2(v.x, mean, at, n) + squares2(v.y, mean, at + 2, n)) +
           (squares2(v.z, mean, at + 4, n) + squares2(v.w, mean, at + 6, n));
}
__device__ __forceinline__ unsigned output2(unsigned v, float mean, float rstd, unsigned g, unsigned b)
{
    const unsigned short first = float_to_half(fmaf((low(v) - mean) * rstd, low(g), low(b)));
    const unsigned short second = float_to_half(fmaf((high(v) - mean) * rstd, high(g), high(b)));
    return first | (unsigned)second << 16;
}
__device__ __forceinline__ uint4 output8(uint4 v, float mean, float rstd, uint4 g, uint4 b)
{
    return uint4{output2(v.x, mean, rstd, g.x, b.x), output2(v.y, mean, rstd, g.y, b.y),
                 output2(v.z, mean, rstd, g.z, b.z), output2(v.w, mean, rstd, g.w, b.w)};
}

// layer_norm_f16x8_pack_f32: grid (rows), block (threads); octet v (elements 8 v to 8 v + 7) belongs to thread
// v % threads.
extern "C" __global__ void __launch_bounds__(1024) layer_norm_f16x8_pack_f32(
    const unsigned short* __restrict__ x, const unsigned short* __restrict__ gamma,
    const unsigned short* __restrict__ beta, unsigned short* __restrict__ y, int n, float eps)
{
    __shared__ float partials[2][32];
    const int step = 8 * blockDim.x;
    const int first = 8 * threadIdx.x;
    const int beyond = first + HELD * step;
    x += (long long)blockIdx.x * n;
    y += (long long)blockIdx.x * n;

    uint4 held[HELD];
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = first + i * step;
        held[i] = at < n ? load8(x, at, n) : uint4{0u, 0u, 0u, 0u};
        sum += sum8(held[i]);
    }
    for (int at = beyond; at < n; at += step)
        sum += sum8(load8(x, at, n));
    const float mean = block_sum(sum, partials[0]) / n;

    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = first + i * step;
        if (at < n)
            squares += squares8(held[i], mean, at, n);
    }
    for (int at = beyond; at < n; at += step)
        squares += squares8(load8(x, at, n), mean, at, n);
    const float rstd = rsqrtf(block_sum(squares, partials[1]) / n + eps);

#pragma unroll
    for (int i = 0; i < HELD; ++i) {
        const int at = first + i * step;
        if (at < n)
            store8(y, at, n, output8(held[i], mean, rstd, load8(gamma, at, n), load8(beta, at, n)));
    }
    for (int at = beyond; at < n; at += step)
        store8(y, at, n, output8(load8(x, at, n), mean, rstd, load8(gamma, at, n), load8(beta, at, n)));
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
    grid: tuple
    block: tuple
    held: int  # octets of the row that a thread keeps in registers


def geometry(rows: int, n: int, dtype: torch.dtype, limits: DeviceLimits) -> Geometry:
    """One block a row; a thread for each of its octets up to MOST_THREADS, then a power of two of them a thread."""
    units = -(-n // WIDTH)
    threads = min(-(-units // 32) * 32, MOST_THREADS)
    held = 1
    while held * threads < units and held < MOST_HELD:
        held *= 2
    return Geometry((rows,), (threads,), held)


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


def require_supported(x: torch.Tensor, ln: AffineParameters):
    """Raises ValueError, naming the tensor and the rule, for every input this file does not take."""
    if ln.weight is None or ln.bias is None:
        raise ValueError("weight, bias: both must be present (an affine layer norm)")
    sizes = tuple(ln.normalized_shape)  # a list where somebody has replaced it
    for name, tensor in (("x", x), ("weight", ln.weight), ("bias", ln.bias)):
        if tensor.layout != torch.strided or tensor.is_nested:  # before anything else: not all of them have a shape
            what = "nested" if tensor.is_nested else tensor.layout
            raise ValueError(f"{name}: {what}, must be an ordinary (strided) tensor")
    if x.dim() <= len(sizes) or tuple(x.shape[-len(sizes) :]) != sizes:
        raise ValueError(f"x: shape {tuple(x.shape)} must be (tokens..., *{sizes})")
    if ln.weight.numel() > MAX_WIDTH or x.numel() // ln.weight.numel() > MAX_ROWS:
        raise ValueError(f"x: shape {tuple(x.shape)}, must have rows of at most 2^30 elements and fewer than 2^31 rows")
    for name, tensor in (("x", x), ("weight", ln.weight), ("bias", ln.bias)):
        if tensor.device.type != DEVICE_TYPE or tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, must be on {DEVICE_TYPE}, the device of x ({x.device})")
        if tensor.dtype != torch.float16:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be torch.float16")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")
        if name != "x" and tuple(tensor.shape) != sizes:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be normalized_shape {sizes}")


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = AffineParameters(normalized_shape, eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (tokens..., *normalized_shape) fp16 -> y of that shape. ValueError otherwise."""
        require_supported(x, self.ln)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        n = self.ln.weight.numel()
        rows = x.numel() // n
        if rows == 0:
            return y
        index = x.device.index or 0
        launch = geometry(rows, n, x.dtype, device_limits(index))
        tensors = (x, self.ln.weight, self.ln.bias, y)
        aligned = n % WIDTH == 0 and all(tensor.data_ptr() % BYTES == 0 for tensor in tensors)
        options = (*NVRTC_OPTIONS, f"-DHELD={launch.held}", f"-DALIGNED={int(aligned)}")
        cuda_module(CUDA_SOURCE, options, index).launch(
            "layer_norm_f16x8_pack_f32",
            launch.grid,
            launch.block,
            (*(tensor.data_ptr() for tensor in tensors), np.int32(n), np.float32(self.ln.eps)),
        )
        return y
