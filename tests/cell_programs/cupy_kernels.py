"""LayerNorm in two CuPy kernels: sums of slices of a row, then the row. One of `kbsub measure cell`."""

import cupy
import torch
import torch.nn as nn

SLICES, THREADS = 256, 256

CUDA_SOURCE = r"""
extern "C" __global__ void slice_sums(const float4* x, double2* sums, int vectors) {
    const float4* row = x + (size_t)blockIdx.y * vectors;
    float s = 0.f, q = 0.f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
        const float4 v = row[i];
        s += (v.x + v.y) + (v.z + v.w);
        q += (v.x * v.x + v.y * v.y) + (v.z * v.z + v.w * v.w);
    }
    __shared__ double2 of_threads[256];
    of_threads[threadIdx.x] = make_double2(s, q);
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            of_threads[threadIdx.x].x += of_threads[threadIdx.x + half].x;
            of_threads[threadIdx.x].y += of_threads[threadIdx.x + half].y;
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) sums[blockIdx.y * gridDim.x + blockIdx.x] = of_threads[0];
}

extern "C" __global__ void normalise(const float4* x, const float4* gamma, const float4* beta, const double2* sums,
                                     float4* y, int vectors, float eps) {
    __shared__ double2 of_threads[256];
    of_threads[threadIdx.x] = sums[blockIdx.y * 256 + threadIdx.x];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            of_threads[threadIdx.x].x += of_threads[threadIdx.x + half].x;
            of_threads[threadIdx.x].y += of_threads[threadIdx.x + half].y;
        }
        __syncthreads();
    }
    const double n = 4.0 * vectors, mean = of_threads[0].x / n;
    const float m = (float)mean, r = rsqrtf((float)(of_threads[0].y / n - mean * mean) + eps);
    const size_t row = (size_t)blockIdx.y * vectors;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += gridDim.x * blockDim.x) {
        const float4 v = x[row + i], g = gamma[i], b = beta[i];
        y[row + i] = make_float4((v.x - m) * r * g.x + b.x, (v.y - m) * r * g.y + b.y,
                                 (v.z - m) * r * g.z + b.z, (v.w - m) * r * g.w + b.w);
    }
}
"""
MODULE = cupy.RawModule(code=CUDA_SOURCE)
SLICE_SUMS, NORMALISE = (MODULE.get_function(name) for name in ("slice_sums", "normalise"))


class ModelNew(nn.Module):
    def __init__(self, normalized_shape):
        super().__init__()
        self.ln = nn.LayerNorm(normalized_shape)

    def forward(self, x):
        y = torch.empty_like(x)
        vectors = self.ln.weight.numel() // 4
        rows = x.numel() // 4 // vectors
        sums = torch.empty(rows, SLICES, 2, dtype=torch.float64, device=x.device)
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            SLICE_SUMS((SLICES, rows), (THREADS,), (x.data_ptr(), sums.data_ptr(), cupy.int32(vectors)))
            pointers = (x, self.ln.weight, self.ln.bias, sums, y)
            arguments = (*(each.data_ptr() for each in pointers), cupy.int32(vectors), cupy.float32(self.ln.eps))
            NORMALISE((SLICES, rows), (THREADS,), arguments)
        return y
