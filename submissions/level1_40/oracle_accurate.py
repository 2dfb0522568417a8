"""LayerNorm nearest to real arithmetic, at memory speed: any order, float64 where a rounding would show.

Contract: tolerance. On every input whose float64 result is finite (|x| up to FLT_MAX / 4) the error is at most
5 * 2^-24 * (|gamma * z| + |beta|) + 2^-149 an element against a float64 oracle, for fp32 (the last term
|gamma| times where that is more: z may be subnormal); fp16 and bf16 are that result rounded once more. It disagrees
with eager where eager is wrong (rows far from zero): declared in candidates.toml. Any shape and affine setting of
nn.LayerNorm over the trailing dimensions, zero rows and odd widths included; what is not contiguous is copied first.

What changes from reference_order_pipelined.py: no order is kept. Sums are float64; M2 is taken about the mean of what
a thread holds and merged by count, so that no outlier ruins a shift and no partial overflows; the mean goes to the
output as a high and a low part; rstd is rounded once, from float64. Four walks, chosen from the shape, the dtype and
the device:
- rows up to 32,768 elements are held in registers and read once;
- longer fp32 rows that fit the shared memory of all multiprocessors together are read once too, by one cooperative
  launch: every block owns the same columns of all rows. Its sums are of x and of (x - p)^2, p the row's first
  element, both in float64: since p is one of the n elements, (p - mean)^2 <= M2, so that taking n (p - mean)^2 off
  again costs a relative error of at most about n 2^-52 of M2 (1e-9 here), whatever the outliers. The mean cannot be
  had from x - p: an outlier p would be added n times, and the elements near the mean would lose their last bits. Nor
  can mean - p be had from the rounded mean: in a row that is constant but for p it is n times the spread;
- all other rows are read twice, the second time backwards, beginning with what L2 still holds, as vec4 or as elements.
float64 costs one conversion and one to three operations an element, which hide under the loads on H100/H200-class
chips; where float64 is slow, the walk that asks three is not taken (docs/kernel-notes.md).

Whether 16-byte accesses are possible is asked of each address, since the hardware demands it; nothing else looks.
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

THREADS = 512  # most threads of a block
HELD = 16  # vec4 a thread holds at most
BETAS = 12  # of them, whose beta lies in shared memory where rows are read once by the whole grid
MOST_BLOCKS = 160  # whose sums five warps collect
SPAN = 256  # threads of a block that walks a long row
TILE = 4096  # elements whose moments a block takes at once
GROUP = 16  # rows that share one load of gamma and beta
MOST_CHUNKS = 256  # of a row: every output block merges them
MOST_ROWS = 2**31 - GROUP  # an int in the kernels, which round it up to a multiple of GROUP
ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

CUDA_SOURCE = r"""
#ifndef ELEMENT
#define ELEMENT 0  // 0 float, 1 half, 2 bfloat16
#endif

constexpr int WARP = 32;
constexpr int THREADS = 512;  // most threads of a block
constexpr int SPAN = 256;     // threads of a block that walks a long row
constexpr int TILE = 4096;    // elements whose moments a block takes at once
constexpr int GROUP = 16;     // rows that share one load of gamma and beta
constexpr int SEATS = SPAN / GROUP;  // threads that merge the chunks of one row

// ---- element type: one and four elements as they lie in memory, and as floats ----
#if ELEMENT == 0
typedef float4 Packed;
typedef float Scalar;
__device__ __forceinline__ float widen(float f) { return f; }
__device__ __forceinline__ float narrow(float f) { return f; }
__device__ __forceinline__ float4 unpack(Packed v) { return v; }
__device__ __forceinline__ Packed pack(float4 v) { return v; }
#else
typedef uint2 Packed;
typedef unsigned short Scalar;
#if ELEMENT == 1
#ifndef KBSUB_HOST
__device__ __forceinline__ float half_to_float(unsigned short h) {
    float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f;
}
__device__ __forceinline__ unsigned short float_to_half(float f) {
    unsigned short h; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
}
#endif
__device__ __forceinline__ float widen(unsigned short h) { return half_to_float(h); }
__device__ __forceinline__ unsigned short narrow(float f) { return float_to_half(f); }
#else
#ifndef KBSUB_HOST
__device__ __forceinline__ unsigned short float_to_bfloat16(float f) {
    unsigned short h; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f)); return h;
}
#endif
__device__ __forceinline__ float widen(unsigned short h) { return __uint_as_float((unsigned)h << 16); }
__device__ __forceinline__ unsigned short narrow(float f) { return float_to_bfloat16(f); }
#endif
__device__ __forceinline__ float4 unpack(Packed v) {
    return make_float4(widen((unsigned short)(v.x & 0xffffu)), widen((unsigned short)(v.x >> 16)),
                       widen((unsigned short)(v.y & 0xffffu)), widen((unsigned short)(v.y >> 16)));
}
__device__ __forceinline__ Packed pack(float4 v) {
    return make_uint2(narrow(v.x) | ((unsigned)narrow(v.y) << 16), narrow(v.z) | ((unsigned)narrow(v.w) << 16));
}
#endif

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
__device__ __forceinline__ void prefetch_to_l2(const void* from, unsigned bytes) {  // a multiple of 16 bytes
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
#else
    for (unsigned at = 0; at < bytes; at += 128) asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)from + at));
#endif
}
__device__ __forceinline__ void wait_clocks(int clocks) {
    for (const long long start = clock64(); clock64() - start < clocks;) {}
}
__device__ __forceinline__ void spin_pause() { wait_clocks(60); }  // polls would hold the messages up
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

// ---- moments ----
struct Moments {
    double n, total, m2;  // m2: sum of squared differences from the mean, total / n
};
struct Chunk {
    double n, total, mean, m2;
};
__device__ __forceinline__ void merge(Moments& all, Moments more) {
    if (more.n == 0.) return;
    const double away = all.n == 0. ? 0. : more.total / more.n - all.total / all.n;
    all.m2 += more.m2 + away * away * (all.n * more.n / (all.n + more.n));
    all.n += more.n;
    all.total += more.total;
}
__device__ __forceinline__ double exchange(double v, int mask) {
    return __hiloint2double(__shfl_xor_sync(0xffffffffu, __double2hiint(v), mask),
                            __shfl_xor_sync(0xffffffffu, __double2loint(v), mask));
}
__device__ __forceinline__ double warp_total(double v, int lanes = WARP) {  // the same in every lane
    for (int mask = lanes / 2; mask > 0; mask /= 2) v += exchange(v, mask);
    return v;
}
// In every thread of the block; room for one value a warp in `warps`. One warp needs no barrier.
__device__ __forceinline__ double block_total(double v, double* warps) {
    v = warp_total(v);
    const int count = blockDim.x / WARP, lane = threadIdx.x % WARP;
    if (count == 1) return v;
    if (lane == 0) warps[threadIdx.x / WARP] = v;
    __syncthreads();
    return warp_total(lane < count ? warps[lane] : 0.);
}

__device__ __forceinline__ float largest(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// The sum in float64 of the first `length` of LENGTH vec4, and their largest magnitude.
template <int LENGTH> __device__ __forceinline__ double sum(const Packed* v, int length, float& top) {
    double a = 0., b = 0., c = 0., d = 0.;
    top = 0.f;
#pragma unroll
    for (int k = 0; k < LENGTH; ++k) {
        if (k < length) {
            const float4 e = unpack(v[k]);
            a += (double)e.x;
            b += (double)e.y;
            c += (double)e.z;
            d += (double)e.w;
            top = fmaxf(top, largest(e));
        }
    }
    return (a + b) + (c + d);
}
// x * scale - mean, the mean in two parts already scaled: exact but for the last rounding where x is near the mean.
__device__ __forceinline__ float away_from(float x, float scale, float high, float low) {
    return __fmaf_rn(x, scale, -high) - low;
}

// Their squared differences from `mean`: in fp32, scaled by a power of two taken from the largest magnitude so that no
// square overflows or vanishes; four at a time into float64.
template <int LENGTH> __device__ __forceinline__ double squares(const Packed* v, int length, double mean, float top) {
    const int exponent = min(max((int)(__float_as_uint(top) >> 23), 1), 252);
    const float scale = __uint_as_float((unsigned)(253 - exponent) << 23);
    const double scaled = mean * (double)scale, unscale = __hiloint2double((exponent - 126 + 1023) << 20, 0);
    const float high = (float)scaled, low = (float)(scaled - (double)high);
    double total = 0.;
#pragma unroll
    for (int k = 0; k < LENGTH; ++k) {
        if (k < length) {
            const float4 e = unpack(v[k]);
            const float x = away_from(e.x, scale, high, low), y = away_from(e.y, scale, high, low);
            const float z = away_from(e.z, scale, high, low), w = away_from(e.w, scale, high, low);
            total += (double)(__fmaf_rn(x, x, y * y) + __fmaf_rn(z, z, w * w));
        }
    }
    return total * unscale * unscale;
}

// ---- output ----
// What a row's elements need: z = (x * scale - high - low) * rstd. scale is 1 but for rows so small that the low part
// of their mean would be subnormal; rstd is rounded once, from float64.
struct RowFacts {
    float scale, high, low, rstd;
};
__device__ __forceinline__ RowFacts row_facts(double mean, double variance, double eps) {
    const bool tiny = fabs(mean) < 0x1p-60 && variance < 0x1p-120;
    const double scaled = tiny ? mean * 0x1p80 : mean, rstd = rsqrt(variance + eps);
    const float high = (float)scaled;
    return {tiny ? 0x1p80f : 1.f, high, (float)(scaled - (double)high), (float)(tiny ? rstd * 0x1p-80 : rstd)};
}
__device__ __forceinline__ float normalize(float x, float g, float b, RowFacts row) {
    return __fmaf_rn(g, away_from(x, row.scale, row.high, row.low) * row.rstd, b);
}
__device__ __forceinline__ Packed normalize_some(Packed x, Packed g, Packed b, RowFacts row) {
    const float4 e = unpack(x), s = unpack(g), t = unpack(b);
    return pack(make_float4(normalize(e.x, s.x, t.x, row), normalize(e.y, s.y, t.y, row),
                            normalize(e.z, s.z, t.z, row), normalize(e.w, s.w, t.w, row)));
}
__device__ __forceinline__ Scalar normalize_some(Scalar x, Scalar g, Scalar b, RowFacts row) {
    return narrow(normalize(widen(x), widen(g), widen(b), row));
}
// gamma or beta at i, or what stands for it where the module has none.
__device__ __forceinline__ Packed filled(float f, const Packed*) { return pack(make_float4(f, f, f, f)); }
__device__ __forceinline__ Scalar filled(float f, const Scalar*) { return narrow(f); }
template <typename T> __device__ __forceinline__ T parameter(const T* p, long long i, float otherwise) {
    return p ? p[i] : filled(otherwise, p);
}

// ---- short rows, read once: block (threads of a row, rows of a block); one warp a row needs no barrier ----
template <int LENGTH> __device__ __forceinline__ void rows_held(
        const Packed* __restrict__ x, const Packed* __restrict__ gamma, const Packed* __restrict__ beta,
        Packed* __restrict__ y, int rows, int vectors, double eps) {
    __shared__ double warps[2][THREADS / WARP];
    __shared__ RowFacts of_block;
    const int row = blockIdx.x * blockDim.y + threadIdx.y, thread = threadIdx.x, threads = blockDim.x;
    if (row >= rows) return;
    const int length = vectors > thread ? (vectors - thread + threads - 1) / threads : 0;
    x += (size_t)row * vectors;
    y += (size_t)row * vectors;
    Packed v[LENGTH];
#pragma unroll
    for (int k = 0; k < LENGTH; ++k)
        if (k < length) v[k] = x[thread + k * threads];
    const double n = 4. * vectors;
    float top;
    const double total = block_total(sum<LENGTH>(v, length, top), warps[0]);
    const double m2 = block_total(squares<LENGTH>(v, length, total / n, top), warps[1]);
    RowFacts facts;
    if (threads == WARP) {
        facts = row_facts(total / n, m2 / n, eps);
    } else {
        if (thread == 0) of_block = row_facts(total / n, m2 / n, eps);
        __syncthreads();
        facts = of_block;
    }
#pragma unroll
    for (int k = 0; k < LENGTH; ++k) {
        const int i = thread + k * threads;
        if (k < length) y[i] = normalize_some(v[k], parameter(gamma, i, 1.f), parameter(beta, i, 0.f), facts);
    }
}
extern "C" __global__ void __launch_bounds__(SPAN)
rows_held_1(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, int rows, int vectors,
            double eps) {
    rows_held<1>(x, gamma, beta, y, rows, vectors, eps);
}
extern "C" __global__ void __launch_bounds__(SPAN)
rows_held_2(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, int rows, int vectors,
            double eps) {
    rows_held<2>(x, gamma, beta, y, rows, vectors, eps);
}
extern "C" __global__ void __launch_bounds__(SPAN)
rows_held_4(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, int rows, int vectors,
            double eps) {
    rows_held<4>(x, gamma, beta, y, rows, vectors, eps);
}
extern "C" __global__ void __launch_bounds__(SPAN)
rows_held_8(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, int rows, int vectors,
            double eps) {
    rows_held<8>(x, gamma, beta, y, rows, vectors, eps);
}
extern "C" __global__ void __launch_bounds__(THREADS)
rows_held_8_wide(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, int rows, int vectors,
                 double eps) {
    rows_held<8>(x, gamma, beta, y, rows, vectors, eps);
}
extern "C" __global__ void __launch_bounds__(THREADS)
rows_held_16(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, int rows, int vectors,
            double eps) {
    rows_held<16>(x, gamma, beta, y, rows, vectors, eps);
}

// ---- long fp32 rows, read once: a grid that is resident as a whole, one block of 512 threads a multiprocessor ----
#if ELEMENT == 0
constexpr int HELD = 16;      // vec4 of a row that a thread of the whole grid holds
constexpr int BETAS = 12;     // of them, whose beta lies in shared memory; the others' in registers
constexpr int PARTS = 8;      // in which a held row lands
constexpr int POLLS = 5;      // warps that collect the blocks' sums; the others prefetch meanwhile
constexpr int PREFETCH = 64;  // vec4 a prefetching warp asks for at once
constexpr int PACE = 200;     // clocks between two such, so that sums do not queue behind them

struct Sums {
    double total, squared;  // of x, and of (x - pivot)^2
};
// A slot holds a block's sums of one row as bits, each EMPTY until it has come. No sum of floats has these bits: a NaN
// that began as a float ends in 29 zeros.
constexpr unsigned long long EMPTY = ~0ull;
__device__ __forceinline__ void send(ulonglong2* slot, Sums s) {
    write_pair(slot, make_ulonglong2((unsigned long long)__double_as_longlong(s.total),
                                     (unsigned long long)__double_as_longlong(s.squared)));
}
__device__ __forceinline__ Sums received(const ulonglong2* slot) {
    ulonglong2 v = read_pair(slot);
    while (v.x == EMPTY || v.y == EMPTY) {
        spin_pause();
        v = read_pair(slot);
    }
    return {__longlong_as_double((long long)v.x), __longlong_as_double((long long)v.y)};
}
// The warp's total in lanes 0 to 15, its squared in lanes 16 to 31: half the shuffles of two butterflies.
__device__ __forceinline__ double halves_total(Sums s) {
    const bool upper = threadIdx.x % WARP >= WARP / 2;
    const double own = (upper ? s.squared : s.total) + exchange(upper ? s.total : s.squared, WARP / 2);
    return warp_total(own, WARP / 2);
}
__device__ __forceinline__ void add(Sums& s, float x, double pivot) {
    const double away = (double)x - pivot;
    s.total += (double)x;
    s.squared = __fma_rn(away, away, s.squared);
}
// Part P of a row, as soon as it has landed, and all parts after it. Row 0 has one group of copies behind it: beta.
template <int P> __device__ __forceinline__ void take(const Packed* held, int length, double pivot, Sums* s, int row) {
    if (row == 0) copies_wait<PARTS - P>();
    else copies_wait<PARTS - P - 1>();
#pragma unroll
    for (int k = P * HELD / PARTS; k < (P + 1) * HELD / PARTS; ++k) {
        if (k < length) {
            const float4 e = unpack(held[k * THREADS]);
            add(s[0], e.x, pivot);
            add(s[1], e.y, pivot);
            add(s[0], e.z, pivot);
            add(s[1], e.w, pivot);
        }
    }
    if constexpr (P + 1 < PARTS) take<P + 1>(held, length, pivot, s, row);
}

// Block b owns columns b * share to (b + 1) * share of every row; gamma and beta of them stay on chip. A thread copies
// its next vec4 into the place of one that it is about to write out, so that nothing but sums passes between threads.
// While five warps wait for the other blocks' sums, the others bring the next row to L2.
// Shared memory: share + BETAS * 512 vec4. Grid: enough blocks for a row, 160 at most.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
rows_once(const Packed* __restrict__ x, const Packed* __restrict__ gamma, const Packed* __restrict__ beta,
          Packed* __restrict__ y, ulonglong2* slots, int rows, int vectors, int share, double eps) {
    extern __shared__ __align__(128) unsigned char shared_memory[];
    __shared__ double of_warps[2][THREADS / WARP], of_polls[2][POLLS];  // total, squared
    static_assert(THREADS / WARP == WARP / 2, "half a warp adds up what all warps have");
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, blocks = gridDim.x;
    const int half = lane / (WARP / 2), seat = lane % (WARP / 2);  // lower half: totals, upper half: squares
    if ((long long)blocks * share < vectors) __trap();  // a smaller grid than was asked for
    const int first = min((int)blockIdx.x * share, vectors), width = min(share, vectors - first);
    const int length = width > thread ? (width - thread + THREADS - 1) / THREADS : 0;
    Packed* const held = (Packed*)shared_memory + thread;
    Packed* const betas = held + share;
    const float* pivots = (const float*)x;
    const Packed *from = x + first + thread, *next = x + first + vectors;
    Packed* to = y + first + thread;
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        if (k < length) copy16_async(held + k * THREADS, from + k * THREADS);
        if ((k + 1) % (HELD / PARTS) == 0) copies_commit();
    }
    Packed g[HELD], b[HELD - BETAS];
#pragma unroll
    for (int k = 0; k < HELD; ++k) {
        const int i = first + thread + k * THREADS;
        if (k < length) {
            g[k] = parameter(gamma, i, 1.f);
            if (k >= BETAS) b[k - BETAS] = parameter(beta, i, 0.f);
            else if (beta) copy16_async(betas + k * THREADS, beta + i);
            else betas[k * THREADS] = filled(0.f, beta);
        }
    }
    copies_commit();
    for (int row = thread; row < rows; row += THREADS)
        write_pair(slots + row * blocks + blockIdx.x, make_ulonglong2(EMPTY, EMPTY));
    grid_barrier();
    const double n = 4. * vectors, per = 1. / n;
    float first_of_next = pivots[0];
#pragma unroll 1
    for (int row = 0; row < rows; ++row, from += vectors, next += vectors, to += vectors) {
        const double pivot = (double)first_of_next;
        if (row + 1 < rows) first_of_next = pivots[4ll * vectors * (row + 1)];  // a row ahead: it would be waited for
        Sums s[2] = {{0., 0.}, {0., 0.}};
        take<0>(held, length, pivot, s, row);
        double own = halves_total({s[0].total + s[1].total, s[0].squared + s[1].squared});
        if (seat == 0) of_warps[half][warp] = own;
        __syncthreads();
        if (warp == 0) {
            own = warp_total(of_warps[half][seat], WARP / 2);
            const double squared = exchange(own, WARP / 2);
            if (lane == 0) send(slots + row * blocks + blockIdx.x, {own, squared});
        }
        if (warp < POLLS) {
            Sums of_block = {0., 0.};
            if (thread < blocks) of_block = received(slots + row * blocks + thread);
            own = halves_total(of_block);
            if (seat == 0) of_polls[half][warp] = own;
        } else if (row + 1 < rows) {
            for (int i = (warp - POLLS) * PREFETCH; i < width; i += (THREADS / WARP - POLLS) * PREFETCH) {
                if (lane == 0) prefetch_to_l2(next + i, min(PREFETCH, width - i) * sizeof(Packed));
                wait_clocks(PACE);
            }
        }
        __syncthreads();
        Sums all = {of_polls[0][0], of_polls[1][0]};
        for (int w = 1; w < POLLS; ++w) {
            all.total += of_polls[0][w];
            all.squared += of_polls[1][w];
        }
        const double near = all.total * per;
        const double mean = __fma_rn(__fma_rn(-near, n, all.total), per, near);  // as if divided
        // Not mean - pivot: the mean's rounding, times n, shows beside a variance that is all the pivot's.
        const double off = __fma_rn(-n, pivot, all.total) * per, variance = __fma_rn(-off, off, all.squared * per);
        const RowFacts facts = row_facts(mean, variance < 0. ? 0. : variance, eps);  // a NaN stays
        if (row == 0) copies_wait<0>();  // beta
#pragma unroll
        for (int k = 0; k < HELD; ++k) {
            if (k < length) {
                const Packed shift = k < BETAS ? betas[k * THREADS] : b[k < BETAS ? 0 : k - BETAS];
                const Packed out = normalize_some(held[k * THREADS], g[k], shift, facts);
                if (row + 1 < rows) copy16_async(held + k * THREADS, from + vectors + k * THREADS);
                to[k * THREADS] = out;  // behind the copy: what lands last is waited for
            }
            if ((k + 1) % (HELD / PARTS) == 0) copies_commit();
        }
    }
}

#endif

// ---- long rows, read twice: moments of chunks, then the output ----
// What a thread finds in one tile, as vec4 or as single elements.
__device__ __forceinline__ Moments tile_moments(const Packed* x, long long tile, long long vectors) {
    constexpr int EACH = TILE / 4 / SPAN;
    const long long first = tile * (TILE / 4) + threadIdx.x;
    const int length = vectors > first ? (int)min((long long)EACH, (vectors - first + SPAN - 1) / SPAN) : 0;
    if (length == 0) return {0., 0., 0.};
    Packed v[EACH];
#pragma unroll
    for (int k = 0; k < EACH; ++k)
        if (k < length) v[k] = x[first + k * SPAN];
    float top;
    const double n = 4. * length, total = sum<EACH>(v, length, top);
    return {n, total, squares<EACH>(v, length, total / n, top)};
}
__device__ __forceinline__ Moments tile_moments(const Scalar* x, long long tile, long long n) {
    constexpr int EACH = TILE / SPAN;
    const long long first = tile * TILE + threadIdx.x;
    const int length = n > first ? (int)min((long long)EACH, (n - first + SPAN - 1) / SPAN) : 0;
    double total = 0., m2 = 0.;
    for (int k = 0; k < length; ++k) total += (double)widen(x[first + k * SPAN]);
    for (int k = 0; k < length; ++k) {
        const double d = (double)widen(x[first + k * SPAN]) - total / length;
        m2 += d * d;
    }
    return {(double)length, total, m2};
}

// Grid chunks * rows blocks, rows fastest, 256 threads: chunk c of a row is its tiles c, c + chunks, ... All blocks
// walk the columns together, so that those read last, which L2 still holds, are those the output begins with.
template <typename T> __device__ __forceinline__ void chunk_moments(
        const T* x, Chunk* chunks_of_rows, long long width, int rows, int chunks, int tiles) {
    __shared__ double warps[3][SPAN / WARP];
    const long long row = blockIdx.x % rows, chunk = blockIdx.x / rows;
    Moments own = {0., 0., 0.};
    for (long long tile = chunk; tile < tiles; tile += chunks)
        merge(own, tile_moments(x + row * width, tile, width));
    const double n = block_total(own.n, warps[0]), total = block_total(own.total, warps[1]);
    const double away = own.n == 0. ? 0. : own.total / own.n - total / n;
    const double m2 = block_total(own.m2 + own.n * away * away, warps[2]);
    if (threadIdx.x == 0) chunks_of_rows[row * chunks + chunk] = {n, total, total / n, m2};
}

// Grid column blocks * groups of 16 rows, groups fastest, columns backwards, 256 threads: a thread owns one column, of
// vec4 or of elements, and walks 16 rows, so that gamma and beta are read once a group. Its loads are under way while
// 16 threads a row merge the chunks, none of which is empty.
template <typename T> __device__ __forceinline__ void normalize_columns(
        const T* __restrict__ x, const T* __restrict__ gamma, const T* __restrict__ beta, T* __restrict__ y,
        const Chunk* __restrict__ chunks_of_rows, long long width, int rows, int chunks, double eps) {
    __shared__ RowFacts facts[GROUP];
    const int groups = (rows + GROUP - 1) / GROUP, first_row = blockIdx.x % groups * GROUP;
    const int here = min(GROUP, rows - first_row), backwards = (gridDim.x - 1 - blockIdx.x) / groups;
    const long long column = (long long)backwards * SPAN + threadIdx.x, start = first_row * width + column;
    const bool inside = column < width;
    T v[GROUP], g, b;
    if (inside) {
        g = parameter(gamma, column, 1.f);
        b = parameter(beta, column, 0.f);
    }
#pragma unroll
    for (int r = 0; r < GROUP; ++r)
        if (inside && r < here) v[r] = x[start + r * width];
    const int merged = threadIdx.x / SEATS, seat = threadIdx.x % SEATS;
    const Chunk* of_row = chunks_of_rows + (long long)(first_row + min(merged, here - 1)) * chunks;
    double n = 0., total = 0., m2 = 0.;
    for (int c = seat; c < chunks; c += SEATS) {
        n += of_row[c].n;
        total += of_row[c].total;
    }
    n = warp_total(n, SEATS);
    total = warp_total(total, SEATS);
    const double mean = total / n;
    for (int c = seat; c < chunks; c += SEATS) {
        const double away = of_row[c].mean - mean;
        m2 += of_row[c].m2 + of_row[c].n * away * away;
    }
    m2 = warp_total(m2, SEATS);
    if (seat == 0 && merged < here) facts[merged] = row_facts(mean, m2 / n, eps);
    __syncthreads();
    if (!inside) return;
#pragma unroll
    for (int r = 0; r < GROUP; ++r)
        if (r < here) y[start + r * width] = normalize_some(v[r], g, b, facts[r]);
}

extern "C" __global__ void __launch_bounds__(SPAN)
chunk_moments_vectors(const Packed* x, Chunk* chunks_of_rows, long long width, int rows, int chunks, int tiles) {
    chunk_moments(x, chunks_of_rows, width, rows, chunks, tiles);
}
extern "C" __global__ void __launch_bounds__(SPAN)
chunk_moments_elements(const Scalar* x, Chunk* chunks_of_rows, long long width, int rows, int chunks, int tiles) {
    chunk_moments(x, chunks_of_rows, width, rows, chunks, tiles);
}
extern "C" __global__ void __launch_bounds__(SPAN, 2)
normalize_vectors(const Packed* x, const Packed* gamma, const Packed* beta, Packed* y, const Chunk* chunks_of_rows,
                  long long width, int rows, int chunks, double eps) {
    normalize_columns(x, gamma, beta, y, chunks_of_rows, width, rows, chunks, eps);
}
extern "C" __global__ void __launch_bounds__(SPAN, 2)
normalize_elements(const Scalar* x, const Scalar* gamma, const Scalar* beta, Scalar* y, const Chunk* chunks_of_rows,
                   long long width, int rows, int chunks, double eps) {
    normalize_columns(x, gamma, beta, y, chunks_of_rows, width, rows, chunks, eps);
}
"""
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
OPTIONS_OF = {dtype: (*NVRTC_OPTIONS, f"-DELEMENT={element}") for dtype, element in ELEMENTS.items()}


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
    """How a shape is walked: one launch for rows that are read once, two for those that are read twice."""

    kernel: str  # rows_held_V, rows_held_8_wide or rows_once; of two launches, which elements: "vectors" or "elements"
    grid: tuple
    block: tuple
    chunks: int = 0  # of a row
    output_grid: tuple = ()
    share: int = 0  # vec4 of a row that a block owns
    shared_bytes: int = 0


@functools.lru_cache(maxsize=None)
def geometry(
    rows: int, n: int, dtype: torch.dtype, limits: DeviceLimits, packed: bool = True, whole_grid: bool = True
) -> Geometry:
    """The launches for (rows, n); packed: n is a multiple of 4 and every address allows vec4 access.

    whole_grid: the device holds one block of rows_once on every multiprocessor at once.
    """
    vectors, blocks = n // 4, limits.multiprocessors
    if packed and vectors <= THREADS * HELD:
        threads = next(t for t in (32, 128, 256, THREADS) if vectors <= 8 * t or t == THREADS)
        if threads == THREADS and vectors <= SPAN * HELD:
            # Rows that are resident all at once (fp32: one of 512 threads a multiprocessor; else two) finish soonest
            # with many threads each; of more, blocks of 256 overlap better, by a third for 8,192 fp32 rows.
            if rows <= limits.multiprocessors * (1 if dtype == torch.float32 else 2):
                return Geometry("rows_held_8_wide", (rows,), (THREADS,))
            threads = SPAN
        held = 1 << (-(-vectors // threads) - 1).bit_length()
        rows_of_block = 4 if threads == 32 else 1
        return Geometry(f"rows_held_{held}", (-(-rows // rows_of_block),), (threads, rows_of_block))
    share = -(-vectors // blocks // 32) * 32  # 512 bytes of fp32: shares that start within a line cost a tenth
    shared_bytes = 16 * (share + BETAS * THREADS)
    fits = share <= THREADS * HELD and shared_bytes + 1024 <= limits.shared_bytes_per_block and blocks <= MOST_BLOCKS
    fast_float64 = limits.fp32_to_fp64_ratio <= 2
    # A row costs a meeting of all blocks, 3 us: worth it where a block has more than half of what it can hold of it.
    worth_it = dtype == torch.float32 and rows >= 4 and 2 * share > THREADS * HELD
    if packed and whole_grid and fits and fast_float64 and worth_it:  # 1,024 bytes: the kernel's own, and the system's
        return Geometry("rows_once", (blocks,), (THREADS,), share=share, shared_bytes=shared_bytes)
    tiles, columns = -(-n // TILE), -(-(vectors if packed else n) // SPAN)
    chunks = max(1, min(tiles, -(-4 * limits.multiprocessors // rows), MOST_CHUNKS))
    output_grid = (columns * -(-rows // GROUP),)
    return Geometry("vectors" if packed else "elements", (chunks * rows,), (SPAN,), chunks, output_grid)


class AffineParameters(nn.Module):
    """What nn.LayerNorm holds: weight (ones) and bias (zeros) of `normalized_shape`, or None, and eps."""

    def __init__(self, normalized_shape, eps: float, elementwise_affine: bool, bias: bool):
        super().__init__()
        sizes = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
        if not (isinstance(sizes, (tuple, list)) and sizes and all(isinstance(n, int) and n > 0 for n in sizes)):
            raise RuntimeError(f"normalized_shape: {normalized_shape!r} must be one or more positive integers")
        self.normalized_shape = tuple(sizes)
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(self.normalized_shape)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.zeros(self.normalized_shape)) if elementwise_affine and bias else None


class Plan(NamedTuple):
    """What a call does on tensors of given facts: the geometry, the module that holds its kernels, their scalars."""

    geometry: Geometry
    module: CudaModule
    words: int  # of 8 bytes, that the launches need for themselves
    scalars: tuple  # of the kernel that writes y, without eps
    of_moments: tuple = ()  # scalars of the kernel before it
    copies: bool = False  # whether a tensor has to be made contiguous first


def facts(tensor) -> tuple:
    """What a plan depends on: shape, dtype, device, and the address modulo 16, which is None where a copy will be read.

    Of the tensor as it was given: what cannot be copied must be refused before anybody tries to. Nothing of a parameter
    that the module does not have; one word in place of the shape of a tensor that is not strided.
    """
    if tensor is None:
        return ()
    if tensor.layout != torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else str(tensor.layout), tensor.dtype, tensor.device, None
    return tensor.shape, tensor.dtype, tensor.device, tensor.data_ptr() % 16 if tensor.is_contiguous() else None


class value_error_on_failure:
    """Turns PyTorch's own error about a tensor that cannot be copied into a ValueError that names it."""

    def __init__(self, name: str, tensor):
        self.name, self.tensor = name, tensor

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if isinstance(error, RuntimeError):
            bytes_needed = self.tensor.numel() * self.tensor.element_size()
            rule = f"must be contiguous, or leave room for a contiguous copy of {bytes_needed} bytes"
            raise ValueError(f"{self.name}: strides {self.tensor.stride()}, {rule}") from error


def contiguous(name: str, tensor):
    """The tensor itself where it is contiguous (or absent), else a copy; ValueError where there is no room for one."""
    if tensor is None or tensor.is_contiguous():
        return tensor
    with value_error_on_failure(name, tensor):
        return tensor.contiguous()


def require_supported(x: tuple, weight: tuple, bias: tuple, sizes: tuple):
    """Raises ValueError, naming the tensor and the rule, for the facts of every input this file does not take."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor and isinstance(tensor[0], str):
            raise ValueError(f"{name}: {tensor[0]}, must be an ordinary (strided) tensor")
    shape, dtype, device, _ = x
    if device.type != DEVICE_TYPE:
        raise ValueError(f"x: on {device}, must be on {DEVICE_TYPE}")
    if dtype not in ELEMENTS:
        raise ValueError(f"x: dtype {dtype}, must be float32, float16 or bfloat16")
    if shape[max(0, len(shape) - len(sizes)) :] != sizes:
        raise ValueError(f"x: shape {tuple(shape)} must end in normalized_shape {sizes}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter and parameter[1:3] != (dtype, device):
            raise ValueError(f"{name}: {parameter[1]} on {parameter[2]}, must be {dtype} on {device}, as x is")
        if parameter and parameter[0] != sizes:
            raise ValueError(f"{name}: shape {tuple(parameter[0])}, must be normalized_shape {sizes}")


@functools.lru_cache(maxsize=None)
def planned(x: tuple, weight: tuple, bias: tuple, sizes: tuple):
    """The Plan for tensors of these facts, None where x is empty. ValueError for what this file does not take.

    Looked up from the second call on: a host that checks and counts anew is late for a kernel this short.
    """
    require_supported(x, weight, bias, sizes)
    shape, dtype, device, _ = x
    if 0 in shape:
        return None
    n, index = math.prod(sizes), device.index or 0
    rows = math.prod(shape) // n
    if rows > MOST_ROWS:
        raise ValueError(f"x: {rows} rows, must be at most {MOST_ROWS}")
    lows = [tensor[3] for tensor in (x, weight, bias) if tensor]
    copies = None in lows
    low = functools.reduce(int.__or__, (address or 0 for address in lows))  # copies and y begin on 512-byte boundaries
    module, limits = cuda_module(CUDA_SOURCE, OPTIONS_OF[dtype], index), device_limits(index)
    packed = n % 4 == 0 and low % (4 * dtype.itemsize) == 0
    plan = geometry(rows, n, dtype, limits, packed)
    if plan.kernel == "rows_once":
        if module.resident_blocks("rows_once", THREADS, plan.shared_bytes) >= plan.grid[0]:
            scalars = (np.int32(rows), np.int32(n // 4), np.int32(plan.share))
            return Plan(plan, module, 2 * rows * plan.grid[0], scalars, copies=copies)
        plan = geometry(rows, n, dtype, limits, packed, whole_grid=False)
    if plan.kernel.startswith("rows_held"):
        return Plan(plan, module, 0, (np.int32(rows), np.int32(n // 4)), copies=copies)
    scalars = (np.int64(n // 4 if packed else n), np.int32(rows), np.int32(plan.chunks))
    return Plan(plan, module, 4 * rows * plan.chunks, scalars, (*scalars, np.int32(-(-n // TILE))), copies)


class ModelNew(nn.Module):
    def __init__(self, normalized_shape, eps: float = 1e-5, elementwise_affine: bool = True, bias: bool = True):
        super().__init__()
        self.ln = AffineParameters(normalized_shape, eps, elementwise_affine, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (*, *normalized_shape) fp32, fp16 or bf16 -> y of that shape and dtype. ValueError otherwise."""
        ln = self.ln
        weight, bias = ln.weight, ln.bias
        plan = planned(facts(x), facts(weight), facts(bias), tuple(ln.normalized_shape))
        if plan is not None and plan.copies:
            x, weight, bias = contiguous("x", x), contiguous("weight", weight), contiguous("bias", bias)
        # Without the format it would keep what strides a one-row view has; torch.empty takes the host twice as long.
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        if plan is None:
            return y
        of_x, of_weight = x.data_ptr(), 0 if weight is None else weight.data_ptr()
        of_bias = 0 if bias is None else bias.data_ptr()
        walk, launch, eps = plan.geometry, plan.module.launch, np.float64(ln.eps)
        tensors = (of_x, of_weight, of_bias, y.data_ptr())
        if plan.words == 0:
            launch(walk.kernel, walk.grid, walk.block, (*tensors, *plan.scalars, eps))
            return y
        own = torch.empty(plan.words, dtype=torch.int64, device=x.device)
        of_own = own.data_ptr()
        arguments = (*tensors, of_own, *plan.scalars, eps)
        if walk.kernel == "rows_once":
            launch("rows_once", walk.grid, walk.block, arguments, walk.shared_bytes, cooperative=True)
            return y
        launch(f"chunk_moments_{walk.kernel}", walk.grid, walk.block, (of_x, of_own, *plan.of_moments))
        launch(f"normalize_{walk.kernel}", walk.output_grid, walk.block, arguments)
        return y
