"""RMSNorm over the channels, nearest to real arithmetic, at memory speed.

Contract: tolerance, declared accurate: x / sqrt(mean(x ** 2, dim=1) + eps), x (batch, channels, *), fp32, fp16, bf16,
any layout: contiguous as it is, anything else through a contiguous copy. Every output is within a rounding and a half
of its dtype from the float64 answer, where eager adds rounded squares in fp32, and infinite ones above 1.8e19.

From `pixel_order.py`: the same walk over x (each pixel's channels spread over four threads, read once), without its
order: squares and sums in float64, which no fp32 number overflows; the reciprocal root in two parts, so that an
output is one fused multiply-add away from rounded once. What it costs is hidden behind the memory, where float64 is
not slow.

| kernel | grid, block | chosen when |
|---|---|---|
| `nearest_held` | tiles of 512 or 128 pixels, (128 or 32, 4) | multiples of 4 channels, to 128, and of 4 pixels |
| `nearest_any` | 256 pixels a block | everything else: reads x twice |

Inference only.
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

SHARES = 4  # of `nearest_held`: threads that share a pixel's channels
LANES, WIDE_LANES = 128, 32  # of `nearest_held`: threads along the pixels; the second where registers are short
NARROW_CHANNELS = 64  # up to these a thread has few enough registers for LANES
VECTOR = 4  # pixels a thread
HELD_CHANNELS = 128  # more do not fit into registers
THREADS = 256  # of `nearest_any`, a pixel each

CUDA_SOURCE = r"""
// Built with -DELEMENT (0 float, 1 half, 2 bfloat16); for nearest_held with -DHELD (channels a thread) and -DLANES.
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

// ---- the arithmetic ----
struct Reciprocal {
    float high, low;  // their sum is 1 / rms
    double wide;      // the same, for when it is no ordinary fp32 number
    bool plain;
};
__device__ __forceinline__ Reciprocal reciprocal_of(double total, double channels, double eps)
{
    Reciprocal r;
    r.wide = __ddiv_rn(1., __dsqrt_rn(__dadd_rn(__ddiv_rn(total, channels), eps)));
    r.high = __double2float_rn(r.wide);
    r.low = __double2float_rn(__dsub_rn(r.wide, (double)r.high));
    r.plain = r.wide > 1e-18 && r.wide < 1e18;
    return r;
}
__device__ __forceinline__ float times(float x, Reciprocal r)
{
    // x * high alone may be subnormal, where a fused multiply-add still rounds once; the low part is then nothing.
    return r.plain ? __fmaf_rn(x, r.high, __fmul_rn(x, r.low)) : __double2float_rn(__dmul_rn((double)x, r.wide));
}
struct Sums {
    double x, y, z, w;
};
__device__ __forceinline__ Sums fold(Sums s, float4 v)
{
    const double x = v.x, y = v.y, z = v.z, w = v.w;
    return Sums{__fma_rn(x, x, s.x), __fma_rn(y, y, s.y), __fma_rn(z, z, s.z), __fma_rn(w, w, s.w)};
}

// nearest_held: grid (tiles of LANES x 4 pixels over all images), block (LANES, 4); x (images, 4 * HELD channels,
// pixels), pixels = 4 * vectors. Thread (lane, g) keeps channels g, g + 4, g + 8, ... of four adjacent pixels.
extern "C" __global__ void __launch_bounds__(4 * LANES) nearest_held(
    const Packed* __restrict__ x, Packed* __restrict__ y, unsigned vectors, unsigned all_vectors, double eps)
{
    __shared__ Sums part[4][LANES];
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
        Sums sum = {0., 0., 0., 0.};
#pragma unroll
        for (int m = 0; m < HELD; ++m)
            sum = fold(sum, unpack(held[m]));
        part[g][lane] = sum;
    }
    __syncthreads();
    if (!inside)
        return;
    Sums total = {0., 0., 0., 0.};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Sums s = part[i][lane];
        total = Sums{__dadd_rn(total.x, s.x), __dadd_rn(total.y, s.y),
                     __dadd_rn(total.z, s.z), __dadd_rn(total.w, s.w)};
    }
    const double channels = 4 * HELD;
    const Reciprocal a = reciprocal_of(total.x, channels, eps), b = reciprocal_of(total.y, channels, eps);
    const Reciprocal c = reciprocal_of(total.z, channels, eps), d = reciprocal_of(total.w, channels, eps);
#pragma unroll
    for (int m = 0; m < HELD; ++m) {
        const float4 f = unpack(held[m]);
        __stcs(y + first + m * step, pack(make_float4(times(f.x, a), times(f.y, b), times(f.z, c), times(f.w, d))));
    }
}

// nearest_any: grid (pixels of all images / 256), block 256; thread = one pixel of x (images, channels, pixels).
extern "C" __global__ void __launch_bounds__(256) nearest_any(
    const Scalar* __restrict__ x, Scalar* __restrict__ y, int channels, int pixels, long long all_pixels, double eps)
{
    const long long p = blockIdx.x * 256LL + threadIdx.x;
    if (p >= all_pixels)
        return;
    const long long image = p / pixels;
    const long long first = image * channels * pixels + (p - image * pixels);
    double total = 0.;
    for (int c = 0; c < channels; ++c) {
        const double v = widen(x[first + (long long)c * pixels]);
        total = __fma_rn(v, v, total);
    }
    const Reciprocal r = reciprocal_of(total, (double)channels, eps);
    for (int c = 0; c < channels; ++c) {
        const long long at = first + (long long)c * pixels;
        y[at] = narrow(times(widen(x[at]), r));
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


def geometry(images: int, channels: int, pixels: int, dtype: torch.dtype, aligned: bool, limits) -> Geometry:
    """From the sizes alone. aligned: x begins at a multiple of four elements."""
    vectors = images * (pixels // VECTOR)
    if aligned and not pixels % VECTOR and not channels % SHARES and channels <= HELD_CHANNELS:
        lanes = LANES if channels <= NARROW_CHANNELS else WIDE_LANES
        options = (f"-DELEMENT={ELEMENTS[dtype]}", f"-DHELD={channels // SHARES}", f"-DLANES={lanes}")
        return Geometry("nearest_held", (-(-vectors // lanes),), (lanes, SHARES), options)
    options = (f"-DELEMENT={ELEMENTS[dtype]}", "-DHELD=1", "-DLANES=32")
    return Geometry("nearest_any", (-(-images * pixels // THREADS),), (THREADS,), options)


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
    if x.numel() and (math.prod(x.shape[1:]) >= 2**31 or x.numel() // x.shape[1] >= 2**33):
        raise ValueError(f"x: shape {tuple(x.shape)}, one image must have fewer than 2^31 elements")


def planned(x: torch.Tensor, eps: float):
    """The launch for tensors of the facts of x. ValueError for what the file does not take."""
    require_supported(x)
    if x.numel() == 0:
        return no_launch
    images, channels, pixels = x.shape[0], x.shape[1], math.prod(x.shape[2:])
    index = x.device.index or 0
    aligned = not x.is_contiguous() or x.data_ptr() % (VECTOR * x.element_size()) == 0  # a copy is aligned
    plan = geometry(images, channels, pixels, x.dtype, aligned, device_limits(index))
    if plan.kernel == "nearest_held":
        sizes = (np.uint32(pixels // VECTOR), np.uint32(images * (pixels // VECTOR)))
    else:
        sizes = (np.int32(channels), np.int32(pixels), np.int64(images * pixels))
    module = cuda_module(CUDA_SOURCE, NVRTC_OPTIONS + plan.options, index)
    return PackedLaunch(module, index, plan.kernel, plan.grid, plan.block, (*sizes, np.float64(eps)))


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
        x = x.contiguous()
        y = torch.empty_like(x)
        launch(x.data_ptr(), y.data_ptr())
        return y
