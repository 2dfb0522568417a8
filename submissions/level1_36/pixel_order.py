"""RMSNorm over the channels in PyTorch's own order of operations: every bit of the output equal to eager.

Contract: bit-identical to `x / sqrt(mean(x ** 2, dim=1) + eps)` on CUDA (any NaN equals any NaN); fp32, fp16, bf16;
x (batch, channels, *), contiguous. It reads x once where eager reads it twice and moves three temporaries.

What fixes the bits: eager stores the squares before it adds them, so no fused multiply-add; the mean is PyTorch's
generic reduction over a strided dimension. Four accumulators take the channels in turn and are added one by one; where
a thread would have 16 channels and more for each of H threads, H threads share a pixel and meet in a tree. H and the
rule that chooses it are in `order_of`. Here a pixel's channels are spread over four threads so that each owns whole
accumulators: the same sums in the same order, whoever computes them. No sum crosses a pixel, so the sizes of x decide
nothing else. This order is the same in every PyTorch read from 2.5 to 2.13: what changed there, the tree of a warp,
is not in it.

| kernel | grid, block | chosen when |
|---|---|---|
| `pixels_held` | tiles of 512 or 128 pixels, (128 or 32, 4) | multiples of 4 channels, to 128, and of 4 pixels |
| `pixels_any` | 256 pixels a block | everything else that `order_of` knows: reads x twice |

Credit: the order follows `Reduce.cuh` of PyTorch, (c) the PyTorch contributors, BSD-style licence (docs of this
repository: NOTICE). Inference only.
"""

import functools
import hashlib
import math
import os
import pathlib
import tempfile
from _thread import get_ident
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

SHARES = 4  # of `pixels_held`: threads that share a pixel's channels
LANES, WIDE_LANES = 128, 32  # of `pixels_held`: threads along the pixels; the second where registers are short
NARROW_CHANNELS = 64  # up to these a thread has few enough registers for LANES
VECTOR = 4  # pixels a thread, and outputs a thread of PyTorch's kernel where the sizes allow it
HELD_CHANNELS = 128  # more do not fit into registers
THREADS = 256  # of `pixels_any`, a pixel each
ACCUMULATORS = 4  # of a thread of PyTorch's kernel
REDUCE_THREADS = 512  # of a block of PyTorch's kernel, divided by its outputs a thread
IMAGE_BYTES = 2**31  # beyond it PyTorch cuts the channels themselves into parts

CUDA_SOURCE = r"""
// Built with -DELEMENT (0 float, 1 half, 2 bfloat16); for pixels_held with -DHELD (channels a thread) and -DLANES.
#if ELEMENT == 0
typedef float Scalar;
typedef float4 Packed;
__device__ __forceinline__ float widen(Scalar v) { return v; }
__device__ __forceinline__ Scalar narrow(float v) { return v; }
__device__ __forceinline__ float4 unpack(Packed v) { return v; }
__device__ __forceinline__ Packed pack(float4 v) { return v; }
#else
typedef unsigned short Scalar;
typedef uint2 Packed;
#if ELEMENT == 1
#ifndef KBSUB_HOST
__device__ __forceinline__ float half_to_float(unsigned short h) {
    float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f;
}
__device__ __forceinline__ unsigned short float_to_half(float f) {
    unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
}
#endif
__device__ __forceinline__ float widen(Scalar h) { return half_to_float(h); }
__device__ __forceinline__ Scalar narrow(float f) { return float_to_half(f); }
#else
#ifndef KBSUB_HOST
__device__ __forceinline__ unsigned short float_to_bfloat16(float f) {
    unsigned short h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
}
#endif
__device__ __forceinline__ float widen(Scalar h) { return __uint_as_float((unsigned)h << 16); }
__device__ __forceinline__ Scalar narrow(float f) { return float_to_bfloat16(f); }
#endif
__device__ __forceinline__ float4 unpack(Packed v) {
    return make_float4(widen((Scalar)(v.x & 0xffffu)), widen((Scalar)(v.x >> 16)),
                       widen((Scalar)(v.y & 0xffffu)), widen((Scalar)(v.y >> 16)));
}
__device__ __forceinline__ Packed pack(float4 v) {
    return make_uint2(narrow(v.x) | ((unsigned)narrow(v.y) << 16), narrow(v.z) | ((unsigned)narrow(v.w) << 16));
}
#endif

// ---- the arithmetic: each step of eager is rounded to the dtype where eager stores it ----
__device__ __forceinline__ float stored(float v) { return widen(narrow(v)); }
__device__ __forceinline__ float square(float v) { return stored(__fmul_rn(v, v)); }
__device__ __forceinline__ float rms_of(float total, float share, float eps)
{
    return stored(__fsqrt_rn(stored(__fadd_rn(stored(__fmul_rn(total, share)), eps))));
}
// x / d, rounded once, as __fdiv_rn, where nothing on the way leaves the normal numbers: r = 1 / d rounded, a quotient,
// and one correction by its remainder. What the correction leaves is below 3 * 2^-24 ulp; the quotients of fp32 numbers
// that lie so near to a tie were enumerated, and each is right (tests/submissions/test_one_correction.py).
__device__ __forceinline__ bool is_plain(float d) { return d > 1e-18f && d < 1e18f; }
__device__ __forceinline__ bool is_above(float x) { return fabsf(x) > 1e-18f; }  // too large: then d is not plain
__device__ __forceinline__ float over(float x, float d, float r)
{
    const float q = __fmul_rn(x, r);
    return __fmaf_rn(__fmaf_rn(-d, q, x), r, q);
}
__device__ __forceinline__ float4 over(float4 x, float4 d, float4 r)
{
    return make_float4(over(x.x, d.x, r.x), over(x.y, d.y, r.y), over(x.z, d.z, r.z), over(x.w, d.w, r.w));
}
__device__ __forceinline__ float4 over(float4 x, float4 d)
{
    return make_float4(__fdiv_rn(x.x, d.x), __fdiv_rn(x.y, d.y), __fdiv_rn(x.z, d.z), __fdiv_rn(x.w, d.w));
}
__device__ __forceinline__ float4 add(float4 a, float4 b)
{
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
__device__ __forceinline__ float4 squares(float4 v)
{
    return make_float4(square(v.x), square(v.y), square(v.z), square(v.w));
}

// pixels_held: grid (tiles of LANES x 4 pixels over all images), block (LANES, 4); x (images, 4 * HELD channels,
// pixels), pixels = 4 * vectors. Thread (lane, g) keeps channels g, g + 4, g + 8, ... of four adjacent pixels.
extern "C" __global__ void __launch_bounds__(4 * LANES) pixels_held(
    const Packed* __restrict__ x, Packed* __restrict__ y, unsigned vectors, unsigned all_vectors, int split,
    float share, float eps)
{
    __shared__ float4 part[4][LANES];
    const unsigned lane = threadIdx.x, g = threadIdx.y, v = blockIdx.x * (unsigned)LANES + lane;
    const bool inside = v < all_vectors;
    const unsigned image = v / vectors;
    const long long first = (long long)image * (4 * HELD) * vectors + (v - image * vectors) + (long long)g * vectors;
    const long long step = 4LL * vectors;

    Packed held[HELD];
    if (inside) {
#pragma unroll
        for (int m = 0; m < HELD; ++m)
            held[m] = __ldcs(x + first + m * step);
        float4 sum;
        if (split) {  // four threads a pixel, accumulator i has the channels g + 4i + 16k
            float4 acc[4] = {};
#pragma unroll
            for (int m = 0; m < HELD; ++m)
                acc[m % 4] = add(acc[m % 4], squares(unpack(held[m])));
            sum = add(add(add(acc[0], acc[1]), acc[2]), acc[3]);
        } else {  // one thread a pixel, whose accumulator g has the channels g + 4k
            sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
            for (int m = 0; m < HELD; ++m)
                sum = add(sum, squares(unpack(held[m])));
        }
        part[g][lane] = sum;
    }
    __syncthreads();
    if (!inside)
        return;
    const float4 a = part[0][lane], b = part[1][lane], c = part[2][lane], d = part[3][lane];
    const float4 total = split ? add(add(a, c), add(b, d)) : add(add(add(a, b), c), d);
    const float4 rms = make_float4(rms_of(total.x, share, eps), rms_of(total.y, share, eps),
                                   rms_of(total.z, share, eps), rms_of(total.w, share, eps));
    bool plain = is_plain(rms.x) && is_plain(rms.y) && is_plain(rms.z) && is_plain(rms.w);
#pragma unroll
    for (int m = 0; m < HELD; ++m) {  // one branch a thread: one for every quotient costs more than the quotient
        const float4 f = unpack(held[m]);
        plain = plain & is_above(f.x) & is_above(f.y) & is_above(f.z) & is_above(f.w);
    }
    if (plain) {
        const float4 r = make_float4(__frcp_rn(rms.x), __frcp_rn(rms.y), __frcp_rn(rms.z), __frcp_rn(rms.w));
#pragma unroll
        for (int m = 0; m < HELD; ++m)
            __stcs(y + first + m * step, pack(over(unpack(held[m]), rms, r)));
    } else {
#pragma unroll
        for (int m = 0; m < HELD; ++m)
            __stcs(y + first + m * step, pack(over(unpack(held[m]), rms)));
    }
}

// What thread h of `shares` of PyTorch's adds of one pixel: accumulator i has the channels h + shares * (i + 4k).
__device__ __forceinline__ float thread_sum(const Scalar* pixel, int channels, int pixels, int h, int shares)
{
    float acc[4] = {0.f, 0.f, 0.f, 0.f};
    for (long long c = h; c < channels; c += 4 * shares)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (c + (long long)i * shares < channels)
                acc[i] = __fadd_rn(acc[i], square(widen(pixel[(c + (long long)i * shares) * pixels])));
    return __fadd_rn(__fadd_rn(__fadd_rn(acc[0], acc[1]), acc[2]), acc[3]);
}

// pixels_any: grid (pixels of all images / 256), block 256; thread = one pixel of x (images, channels, pixels).
// The tree pairs h with h + shares / 2 first: taken in bit-reversed order, that is the carry of a binary counter.
extern "C" __global__ void __launch_bounds__(256) pixels_any(
    const Scalar* __restrict__ x, Scalar* __restrict__ y, int channels, int pixels, long long all_pixels, int depth,
    float share, float eps)
{
    const long long p = blockIdx.x * 256LL + threadIdx.x;
    if (p >= all_pixels)
        return;
    const long long image = p / pixels;
    const long long first = image * channels * pixels + (p - image * pixels);
    float waiting[10], total = 0.f;  // a sum of 2^level threads waits for its other half
    for (int b = 0; b < 1 << depth; ++b) {
        int h = 0;
        for (int bit = 0; bit < depth; ++bit)
            h |= (b >> bit & 1) << (depth - 1 - bit);
        total = thread_sum(x + first, channels, pixels, h, 1 << depth);
        bool open = true;
#pragma unroll
        for (int level = 0; level < 10; ++level) {
            if (open && (b >> level & 1)) {
                total = __fadd_rn(waiting[level], total);
            } else if (open) {
                waiting[level] = total;
                open = false;
            }
        }
    }
    const float rms = rms_of(total, share, eps);
    for (int c = 0; c < channels; ++c) {
        const long long at = first + (long long)c * pixels;
        y[at] = narrow(__fdiv_rn(widen(x[at]), rms));
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


# ---- packed launch: byte-identical in the files of the channel norms; a test says so ----
def facts(x: torch.Tensor) -> tuple:
    """What the launch for x depends on: shape, dtype, device, the address modulo 16 (None where x is not contiguous).

    Of a tensor that is not an ordinary one nothing else may be asked. The thread, since a packed launch is not shared.
    """
    if x.layout != torch.strided or x.is_nested:
        return ()
    return x.shape, x.dtype, x.device, x.data_ptr() % 16 if x.is_contiguous() else None, get_ident()


class PackedLaunch:
    """One launch that is made again and again, by one thread: its arguments lie packed, two addresses change.

    CuPy's own call makes an object of every argument and of the stream, half of the host's time for a call. It is still
    taken until the context is known, in which the kernel then runs; where another context is current, or none; and for
    a module that is not the loader's.
    """

    def __init__(self, module, index: int, name: str, grid: tuple, block: tuple, scalars: tuple, shared_bytes: int = 0):
        """scalars: of numpy, of the kernel's own types; they follow the addresses of x and y."""
        self.module, self.index, self.context = module, index, 0
        self.launch = (name, grid, block), scalars, shared_bytes
        if not isinstance(module, CudaModule):
            return
        self.words = np.zeros(2 + len(scalars), np.uint64)
        for at, scalar in enumerate(scalars, 2):
            self.words[at : at + 1].view(scalar.dtype)[0] = scalar  # the low bytes of its word
        first = self.words.ctypes.data
        self.pointers = np.array([first + 8 * at for at in range(len(self.words))], np.uint64)
        sizes = (*(grid + (1, 1))[:3], *(block + (1, 1))[:3], shared_bytes)
        driver, function = module.driver, module.kernel(name, shared_bytes)
        self.current_context, self.current_stream = driver.ctxGetCurrent, torch._C._cuda_getCurrentRawStream
        self.run = functools.partial(driver.launchKernel, function.ptr, *sizes)
        self.parameters = self.pointers.ctypes.data

    def __call__(self, of_x: int, of_y: int):
        """On the current stream; the addresses of x and y."""
        if self.context and self.context == self.current_context():
            words = self.words
            words[0] = of_x
            words[1] = of_y
            self.run(self.current_stream(self.index), self.parameters, 0)
            return
        (name, grid, block), scalars, shared_bytes = self.launch
        self.module.launch(name, grid, block, (of_x, of_y, *scalars), shared_bytes)
        if isinstance(self.module, CudaModule) and torch.cuda.current_device() == self.index:
            self.context = self.current_context()


def no_launch(of_x: int, of_y: int):
    """For an x without elements: a grid of no blocks is an error."""


LAUNCHES: dict = {}  # by `facts` and what else a file's `planned` depends on
# ---- end of packed launch ----


ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class Geometry(NamedTuple):
    """kernel: by name; grid, block; options: of NVRTC beyond NVRTC_OPTIONS."""

    kernel: str
    grid: tuple
    block: tuple
    options: tuple


def power_of_two(n: int, most: int) -> int:
    """The largest power of two that is at most n, and at most `most` (itself a power of two)."""
    return min(1 << (max(n, 1).bit_length() - 1), most)


def order_of(images: int, channels: int, pixels: int) -> int:
    """How many threads of PyTorch's reduction kernel share one pixel of (images, channels, pixels), in its tree.

    ValueError where the channels are the fastest dimension, or where PyTorch spreads one pixel over several blocks.
    """
    if pixels == 1 and channels > 1:
        raise ValueError(f"x: one pixel an image ({images}, {channels}, 1): PyTorch's order there is that of rows, "
                         "and depends on its version; channel_rows.py takes such rows")  # fmt: skip
    outputs = images * pixels
    vector = VECTOR if pixels % 4 == 0 else 2 if pixels % 2 == 0 else 1
    threads = REDUCE_THREADS // vector
    width = power_of_two(outputs // vector, 32)
    height = min(power_of_two(channels, threads), threads // width)
    if channels < min(height * 16, 256):
        return 1
    if -(-channels // height) >= 256:
        raise ValueError(f"x: {channels} channels for {outputs} pixels, must be fewer: PyTorch may spread a pixel's "
                         "channels over several blocks there, an order that is not reproduced")  # fmt: skip
    return height


def geometry(images: int, channels: int, pixels: int, dtype: torch.dtype, aligned: bool, limits) -> Geometry:
    """From the sizes alone. aligned: x begins at a multiple of four elements."""
    shares = order_of(images, channels, pixels)
    vectors = images * (pixels // VECTOR)
    if aligned and shares in (1, 4) and not pixels % VECTOR and not channels % SHARES and channels <= HELD_CHANNELS:
        lanes = LANES if channels <= NARROW_CHANNELS else WIDE_LANES
        options = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DHELD={channels // SHARES}", f"-DLANES={lanes}")
        return Geometry("pixels_held", (-(-vectors // lanes),), (lanes, SHARES), options)
    options = (f"-DELEMENT={ELEMENTS[dtype]}", "-DHELD=1", "-DLANES=32")
    return Geometry("pixels_any", (-(-images * pixels // THREADS),), (THREADS,), options)


def require_supported(x: torch.Tensor):
    """Raises ValueError, naming the tensor and the rule, for every input this file does not take."""
    if x.layout != torch.strided or x.is_nested:  # before anything else: not all of them have a shape
        raise ValueError(f"x: {'nested' if x.is_nested else x.layout}, must be an ordinary (strided) tensor")
    if x.dim() < 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, must be (batch, channels, *)")
    if x.dtype not in ELEMENTS:
        raise ValueError(f"x: dtype {x.dtype}, must be torch.float32, torch.float16 or torch.bfloat16")
    if x.device.type != DEVICE_TYPE:
        raise ValueError(f"x: on {x.device}, must be on {DEVICE_TYPE}")
    if not x.is_contiguous():
        raise ValueError(f"x: strides {x.stride()}, must be contiguous: eager adds in another order there")
    image_bytes = x[0].numel() * x.element_size() if x.numel() else 0
    if image_bytes >= IMAGE_BYTES or math.prod(x.shape[2:]) >= 2**31 or x.numel() // x.shape[1] >= 2**33:
        raise ValueError(f"x: shape {tuple(x.shape)}, one image must be smaller than 2^31 bytes")


def planned(x: torch.Tensor, eps: float):
    """The launch for tensors of the facts of x. ValueError for what the file does not take."""
    require_supported(x)
    if x.numel() == 0:
        return no_launch
    images, channels, pixels = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    index = x.device.index or 0
    aligned = x.data_ptr() % (VECTOR * x.element_size()) == 0
    plan = geometry(images, channels, pixels, x.dtype, aligned, device_limits(index))
    shares = order_of(images, channels, pixels)
    share = np.float32(images * pixels) / np.float32(x.numel())
    if plan.kernel == "pixels_held":
        vectors = pixels // VECTOR
        sizes = (np.uint32(vectors), np.uint32(images * vectors), np.int32(shares == SHARES))
    else:
        sizes = (np.int32(channels), np.int32(pixels), np.int64(images * pixels), np.int32(shares.bit_length() - 1))
    module = cuda_module(CUDA_SOURCE, NVRTC_OPTIONS + plan.options, index)
    return PackedLaunch(module, index, plan.kernel, plan.grid, plan.block, (*sizes, share, np.float32(eps)))


class ModelNew(nn.Module):
    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        if not (isinstance(num_features, int) and 0 < num_features < 2**31):
            raise RuntimeError(f"num_features: {num_features!r} must be a positive integer below 2^31")
        self.num_features = num_features  # as in the reference, which never looks at it
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (batch, channels, *) -> the same shape and dtype. ValueError for what the file does not take."""
        eps = float(self.eps)
        key = (facts(x), eps)
        launch = LAUNCHES.get(key)
        if launch is None:
            launch = LAUNCHES[key] = planned(x, eps)
        y = torch.empty_like(x)
        launch(x.data_ptr(), y.data_ptr())
        return y
