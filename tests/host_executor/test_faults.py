"""A fault of each kind, planted in a kernel that is otherwise sound: the executor must find it and say where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kbsub.eval.host_executor import HostFault, poisoned
from support.host_run import Host

SOURCE = r"""
extern "C" __global__ void read_late(const float* x, float* y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i % n] = x[i];  // no guard: the last block runs past n
}
extern "C" __global__ void write_late(float* y, int n)
{
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n) y[i] = 1.f;  // <= should be <
}
extern "C" __global__ void write_early(float* y)
{
    y[(int)threadIdx.x - 1] = 1.f;
}
extern "C" __global__ void read_null(const float* x, float* y)
{
    y[0] = x[threadIdx.x];
}
extern "C" __global__ void misaligned(const float* x, float* y)
{
    const float4 v = *reinterpret_cast<const float4*>(x + 1);
    y[0] = v.x;
}
extern "C" __global__ void dynamic_shared_late(float* y)
{
    extern __shared__ __align__(16) unsigned char shared_memory[];
    float* s = reinterpret_cast<float*>(shared_memory);
    s[threadIdx.x + (threadIdx.x == 63)] = 1.f;  // 64 floats were asked for
    y[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void static_shared_late(float* y, int past)
{
    __shared__ float4 s[64];
    s[threadIdx.x + (threadIdx.x == 63 ? past : 0)] = make_float4(1.f, 1.f, 1.f, 1.f);
    y[threadIdx.x] = s[threadIdx.x].x;
}
extern "C" __global__ void lost_half(float* y)
{
    if (threadIdx.x % 2)
        __syncthreads();
    else
        y[threadIdx.x] = __shfl_sync(0xffffffffu, 1.f, 0);
}
extern "C" __global__ void never_arrives(float* y)
{
    __shared__ Barrier full;
    if (threadIdx.x == 0) barrier_init(&full, 2);
    __syncthreads();
    if (threadIdx.x == 5) barrier_arrive(&full);
    barrier_wait(&full, 0);
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void one_arrival_too_many(float* y)
{
    __shared__ Barrier full, other;
    if (threadIdx.x == 0) { barrier_init(&full, 40); barrier_init(&other, 1); }
    __syncthreads();
    for (int k = 0; k < 2; ++k) barrier_arrive(&other);  // each arrival is a phase of its own
    barrier_expect_bytes(&full, 16);                     // nobody copies: at arrival 41 none is pending
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void barrier_before_init(float* y)
{
    __shared__ Barrier full;
    if (threadIdx.x == blockDim.x - 1) barrier_init(&full, blockDim.x);
    barrier_arrive(&full);  // a __syncthreads() is missing before it
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void divergent_shuffle(float* y)
{
    float v = (float)threadIdx.x;
    if (threadIdx.x < 16)
        v += __shfl_down_sync(0xffffffffu, v, 8);
    y[threadIdx.x] = v;
}
extern "C" __global__ void foreign_mask(float* y)
{
    y[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.f, 0);
}
extern "C" __global__ void mixed_shuffles(float* y)
{
    float v = (float)threadIdx.x;
    if (threadIdx.x % 2)
        v = __shfl_xor_sync(0xffffffffu, v, 1);
    else
        v = __shfl_down_sync(0xffffffffu, v, 1);
    y[threadIdx.x] = v;
}
extern "C" __global__ void two_syncthreads(float* y)
{
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void named_mismatch(float* y)
{
    if (threadIdx.x < 32) named_barrier(1, 64); else named_barrier(1, 32);
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void named_alone(float* y)
{
    if (threadIdx.x < 32) named_barrier(2, 64);
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void meet(unsigned* counter, float* y)
{
    if (threadIdx.x == 0) {
        grid_arrive(counter);
        grid_wait(counter, gridDim.x);
    }
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = 1.f;
}
extern "C" __global__ void meet_one_missing(unsigned* counter, float* y)
{
    if (threadIdx.x == 0) {
        if (blockIdx.x != 2) grid_arrive(counter);
        grid_wait(counter, gridDim.x);
    }
    __syncthreads();
    y[blockIdx.x * blockDim.x + threadIdx.x] = 1.f;
}
extern "C" __global__ void spins_for_nobody(volatile unsigned* flag, float* y)
{
    while (*flag == 0) spin_pause();
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void whole_grid(float* y)
{
    grid_barrier();
    y[blockIdx.x * blockDim.x + threadIdx.x] = 1.f;
}
extern "C" __global__ void copy_past_shared(const float4* x, float* y)
{
    extern __shared__ __align__(16) unsigned char shared_memory[];
    copy16_async(shared_memory + 16 * (threadIdx.x + 1), x);
    copies_commit();
    copies_wait<0>();
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void copy_late_source(const float4* x, float* y)
{
    extern __shared__ __align__(16) unsigned char shared_memory[];
    copy16_async(shared_memory + 16 * threadIdx.x, x + threadIdx.x + 1);  // one element late
    copies_commit();
    copies_wait<0>();
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void huge_locals(float* y)
{
    volatile float many[9000];
    for (int i = 8999; i >= 0; --i) many[i] = (float)i;
    __syncthreads();
    y[threadIdx.x] = many[threadIdx.x];
}
extern "C" __global__ void hangs(const volatile unsigned* flag, float* y)
{
    while (*flag == 0) { }
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void traps(float* y)
{
    if (threadIdx.x == 7) __trap();
    y[threadIdx.x] = 1.f;
}
extern "C" __global__ void divides_by_zero(int* y, int zero)
{
    y[threadIdx.x] = 7 / zero;
}
extern "C" __global__ void forgets_one(float* y, int n)
{
    if (threadIdx.x + 1 < n) y[threadIdx.x] = 1.f;
}
"""


@dataclass(frozen=True)
class Planted:
    """`x` and `y` in `arguments` stand for tensors of `n` floats, `counter` for one zeroed unsigned."""

    kernel: str
    kind: str
    words: str  # must stand in the message
    arguments: tuple[Any, ...] = ("y",)
    grid: int = 1
    block: int = 64
    n: int = 64
    shared_bytes: int = 0
    cooperative: bool = False
    block_at: tuple[int, ...] = (0, 0, 0)
    thread_at: tuple[int, ...] | None = None  # None: any thread may be the one that is named
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kernel}{'-cooperative' if self.cooperative else ''}"


N64 = np.int32(64)
PLANTED = (
    Planted("read_late", "memory", "read byte 400 of x, which has 400", ("x", "y", np.int32(100)), grid=2, n=100,
            block_at=(1, 0, 0), thread_at=(36, 0, 0)),
    Planted("write_late", "memory", "wrote byte 256 of y", ("y", N64), grid=2, block_at=(1, 0, 0), thread_at=(0, 0, 0)),
    # Fewer than 4 floats before a 16-byte boundary or on the first page: seen after the launch, by its poison.
    Planted("write_early", "memory", "4 bytes before the start of y", ("y",), block_at=(-1, -1, -1)),
    Planted("read_null", "memory", "read address 0", (0, "y"), thread_at=(0, 0, 0)),
    Planted("misaligned", "misaligned", "size does not divide", ("x", "y"), thread_at=(0, 0, 0)),
    Planted("dynamic_shared_late", "shared", "wrote dynamic shared memory at byte 256 of 256", shared_bytes=256,
            thread_at=(63, 0, 0)),
    Planted("static_shared_late", "shared", "past the end of static shared memory", ("y", np.int32(200)),
            thread_at=(63, 0, 0)),
    Planted("copy_past_shared", "shared", "to byte 1024 of 1024", ("x", "y"), shared_bytes=1024, n=256,
            thread_at=(63, 0, 0)),
    Planted("copy_late_source", "memory", "read byte 1024 of x", ("x", "y"), shared_bytes=1024, n=256,
            thread_at=(63, 0, 0)),
    Planted("lost_half", "divergence", "mask 0xffffffff) for lanes 1,3,5,", thread_at=(0, 0, 0)),
    Planted("never_arrives", "deadlock", "1 of 2 arrivals", thread_at=(0, 0, 0)),
    Planted("one_arrival_too_many", "barrier", "more arrivals than the 40",
            thread_at=(39, 0, 0)),  # the last to reach __syncthreads() goes on first: 63, 0, 1, ... 38 have arrived
    Planted("barrier_before_init", "barrier", "before barrier_init", thread_at=(0, 0, 0)),
    Planted("divergent_shuffle", "divergence", "__shfl_down_sync", block=32),
    Planted("foreign_mask", "divergence", "does not name the calling lane 16", block=32, thread_at=(16, 0, 0)),
    Planted("mixed_shuffles", "divergence", "divergent __shfl", block=32, thread_at=(1, 0, 0)),
    Planted("two_syncthreads", "divergence", "while other threads of the block wait", thread_at=(32, 0, 0)),
    Planted("named_mismatch", "divergence", "while 32 threads wait", thread_at=(32, 0, 0)),
    Planted("named_alone", "deadlock", "at named_barrier(2, 64)", thread_at=(0, 0, 0)),
    Planted("meet", "grid", "only a cooperative launch", ("counter", "y"), grid=4, n=256, thread_at=(0, 0, 0)),
    Planted("meet", "grid", "only 128 are resident", ("counter", "y"), grid=129, n=256, cooperative=True),
    Planted("meet_one_missing", "grid", "the counter is 3, must reach 4", ("counter", "y"), grid=4, n=256,
            cooperative=True, thread_at=(0, 0, 0)),
    Planted("spins_for_nobody", "grid", "memory that nobody changes", ("counter", "y"), grid=2, cooperative=True),
    Planted("whole_grid", "grid", "not cooperative", thread_at=(0, 0, 0)),
    Planted("huge_locals", "stack", "bytes of stack"),
    Planted("hangs", "timeout", "still running after 0.5 s", ("counter", "y"), thread_at=(0, 0, 0),
            options={"timeout_s": 0.5}),
    Planted("traps", "trap", "__trap()", thread_at=(7, 0, 0)),
    Planted("divides_by_zero", "crash", "divided by zero", ("counter", np.int32(0)), thread_at=(0, 0, 0)),
)  # fmt: skip


def run(planted: Planted, workers: int) -> None:
    host = Host(SOURCE, workers=workers, **planted.options)
    tensors = {
        "x": host.tensor(torch.rand(planted.n), name="x"),
        "y": host.empty(planted.n, name="y"),
        "counter": host.tensor([0] * 64, torch.int32, name="counter"),
    }
    arguments = (tensors.get(a, a) if isinstance(a, str) else a for a in planted.arguments)
    host.launch(planted.kernel, planted.grid, planted.block, *arguments, shared_bytes=planted.shared_bytes,
                cooperative=planted.cooperative)  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED, ids=str)
def test_planted_fault_is_found_and_named(planted: Planted) -> None:
    with pytest.raises(HostFault) as caught:
        run(planted, workers=1)
    fault = caught.value
    assert (fault.kind, fault.kernel) == (planted.kind, planted.kernel), str(fault)
    assert planted.words in str(fault)
    assert planted.kernel in str(fault) and "block" in str(fault) and "thread" in str(fault)
    assert fault.block == planted.block_at, str(fault)
    assert planted.thread_at is None or fault.thread == planted.thread_at, str(fault)


@pytest.mark.parametrize("kernel", ["meet_one_missing", "spins_for_nobody"])
def test_deadlock_over_several_workers_is_found(kernel: str) -> None:
    planted = next(p for p in PLANTED if p.kernel == kernel)
    with pytest.raises(HostFault, match="grid barrier that cannot be passed"):
        run(planted, workers=2)


def test_line_of_a_fault_is_a_line_of_the_source() -> None:
    host = Host(SOURCE)
    with pytest.raises(HostFault) as caught:
        host.launch("never_arrives", 1, 64, host.empty(64))
    line = SOURCE.split("\n")[caught.value.line - 1]
    assert "barrier_wait(&full, 0)" in line, (caught.value.line, line)


def test_unwritten_output_stays_poison() -> None:
    host = Host(SOURCE)
    y = host.empty(64)
    host.launch("forgets_one", 1, 64, y, N64)
    assert poisoned(y).nonzero().flatten().tolist() == [63]
    assert torch.isnan(y[63])


def test_process_survives_a_fault_and_launches_again() -> None:
    host = Host(SOURCE)
    with pytest.raises(HostFault):
        host.launch("traps", 1, 64, host.empty(64))
    counter, y = host.tensor([0], torch.int32), host.empty(256)
    host.launch("meet", 4, 64, counter, y, cooperative=True)
    assert counter.item() == 4 and bool((y == 1).all())
