"""The split with its affine tail as one CUDA kernel, rows fastest: gamma and beta are shared through L2.

Contract: control. The statistics come from `torch.var_mean`, whose order of summation is not the
reference's, so the official uniform input is within 1e-4 and inputs far from zero (+1000) are not.

From `split_flat.py`: only the grid is turned. Blocks that run at the same time now work on the same
columns of different rows, so each piece of gamma and beta is fetched from memory once, not once a row.
The arithmetic of an element does not change, hence neither do the bits.

Inference only; fp32. The experiment this restates is public: see README.md.
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

THREADS = 256  # one element each
MAX_GRID_Y = 65_535  # CUDA's limit; more column tiles than this are folded by the kernel's loop
MAX_ELEMENTS = 2**31 - 1

CUDA_SOURCE = r"""
// normalise_interleaved: grid (rows, column tiles), block 256; thread = one column of one row, x is (rows, n).
extern "C" __global__ void normalise_interleaved(
    const float* __restrict__ x, const float* __restrict__ var, const float* __restrict__ mean,
    const float* __restrict__ gamma, const float* __restrict__ beta, float* __restrict__ y, int n, float eps)
{
    const int row = blockIdx.x;
    const float r = 1.f / sqrtf(var[row] + eps);
    const float m = mean[row];
    for (long long j = blockIdx.y * 256LL + threadIdx.x; j < n; j += gridDim.y * 256LL) {
        const long long i = (long long)row * n + j;
        const float z = (x[i] - m) * r;
        y[i] = gamma[j] * z + beta[j];  // built with --fmad=false: a product, then a sum
    }
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


def geometry(rows: int, n: int, dtype: torch.dtype, limits: DeviceLimits) -> Geometry:
    """Rows fastest; a grid y above CUDA's limit is folded (the kernel loops), never refused."""
    tiles = -(-n // THREADS)
    return Geometry(grid=(rows, min(tiles, MAX_GRID_Y)), block=(THREADS,))


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
    if tuple(x.shape[1:]) != sizes:
        raise ValueError(f"x: shape {tuple(x.shape)} must be (rows, *{sizes})")
    if x.numel() > MAX_ELEMENTS:
        raise ValueError(f"x: {x.numel()} elements, must be fewer than 2^31")
    for name, tensor in (("x", x), ("weight", ln.weight), ("bias", ln.bias)):
        if tensor.device.type != DEVICE_TYPE or tensor.device != x.device:
            raise ValueError(f"{name}: on {tensor.device}, must be on {DEVICE_TYPE}, the device of x ({x.device})")
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name}: dtype {tensor.dtype}, must be torch.float32")
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: strides {tensor.stride()}, must be contiguous")
        if name != "x" and tuple(tensor.shape) != sizes:
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, must be normalized_shape {sizes}")


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5):
        super().__init__()
        self.ln = AffineParameters(normalized_shape, eps)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (rows, *normalized_shape) fp32, contiguous, on a CUDA device -> the same shape. ValueError otherwise."""
        require_supported(x, self.ln)
        weight, bias = self.ln.weight, self.ln.bias
        rows, n = x.shape[0], weight.numel()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if rows == 0:
            return y
        index = x.device.index or 0
        var, mean = torch.var_mean(x, dim=tuple(range(1, x.dim())), unbiased=False, keepdim=True)
        launch = geometry(rows, n, x.dtype, device_limits(index))
        addresses = (x, var, mean, weight, bias, y)
        cuda_module(CUDA_SOURCE, NVRTC_OPTIONS, index).launch(
            "normalise_interleaved",
            launch.grid,
            launch.block,
            (*(tensor.data_ptr() for tensor in addresses), np.int32(n), np.float32(self.ln.eps)),
        )
        return y
