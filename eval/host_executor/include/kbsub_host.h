// The CUDA dialect of this repository's kernels, on a CPU. Force-included (-include) in front of an unedited
// CUDA_SOURCE; KBSUB_HOST is defined by the compiler command. It must not include a system header: a kernel sees the
// same names as under NVRTC, and a name that is missing here fails the host build loudly.
//
// What each thing becomes:
//   __shared__        thread_local: implies static storage, and combines with `extern`. The library brings its own
//                     __tls_get_addr, so "thread-local" memory is the shared memory of the block that runs now
//                     (poisoned at its start, ended by a guard page).
//   a block's threads fibers of one process (blocks.cpp): a thread runs until it waits, then another one does.
//   __syncthreads, *_sync, barrier_wait, grid_wait, grid_barrier, spin_pause    the places where a thread can wait.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __constant__ static
#define __shared__ thread_local
#define __grid_constant__

typedef __SIZE_TYPE__ size_t;

#include "kbsub_host_types.h"
#include "kbsub_host_math.h"

extern "C" {
// Set by blocks.cpp each time a thread is resumed.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
extern unsigned char* kbsub_static_base;   // static shared memory of the running block
extern unsigned char* kbsub_dynamic_base;  // dynamic shared memory of the running block

unsigned long long kbsub_warp(int op, unsigned mask, unsigned long long value, int argument, int width, int line);
void kbsub_syncthreads(int line);
void kbsub_copy_async(void* to, const void* from, unsigned bytes, int line);
void kbsub_copies_commit();
void kbsub_copies_wait(int newest_groups_in_flight);
void kbsub_copies_arrive(unsigned long long* barrier, int line);
void kbsub_bulk_copy(void* to, const void* from, unsigned bytes, unsigned long long* barrier, int line);
void kbsub_barrier_init(unsigned long long* barrier, unsigned count, int line);
void kbsub_barrier_arrive(unsigned long long* barrier, unsigned expect_bytes, int line);
void kbsub_barrier_wait(unsigned long long* barrier, unsigned parity, int line);
bool kbsub_barrier_test(const unsigned long long* barrier, unsigned parity, int line);
void kbsub_grid_wait(const unsigned* counter, unsigned target, int line);
void kbsub_grid_barrier(int line);
void kbsub_spin_pause(int line);
void kbsub_named_barrier(int id, int threads, int line);
void kbsub_trap(int line);
}

constexpr int warpSize = 32;

// ---- shared memory ----
struct kbsub_tls_index {
    unsigned long module, offset;
};
extern "C" __attribute__((visibility("hidden"))) unsigned long kbsub_dynamic_offset;
extern "C" __attribute__((visibility("hidden"))) void* __tls_get_addr(kbsub_tls_index* index);

// ---- threads of a block and of a warp ----
// The last, defaulted argument is the line in CUDA_SOURCE that a fault names.
inline void __syncthreads(int line = __builtin_LINE()) { kbsub_syncthreads(line); }

// The same numbers in device.cpp.
enum { KBSUB_SYNC, KBSUB_SHFL, KBSUB_SHFL_UP, KBSUB_SHFL_DOWN, KBSUB_SHFL_XOR, KBSUB_BALLOT,
       KBSUB_ADD, KBSUB_MIN, KBSUB_MAX, KBSUB_MIN_SIGNED, KBSUB_MAX_SIGNED, KBSUB_AND, KBSUB_OR, KBSUB_XOR };

template <class T>
T kbsub_exchange(int op, unsigned mask, T value, int argument, int width, int line)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    unsigned long long bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = kbsub_warp(op, mask, bits, argument, width, line);
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}

inline void __syncwarp(unsigned mask = 0xffffffffu, int line = __builtin_LINE())
{
    kbsub_warp(KBSUB_SYNC, mask, 0, 0, 32, line);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32, int line = __builtin_LINE())
{
    return kbsub_exchange(KBSUB_SHFL, mask, value, lane, width, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE())
{
    return kbsub_exchange(KBSUB_SHFL_UP, mask, value, (int)delta, width, line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE())
{
    return kbsub_exchange(KBSUB_SHFL_DOWN, mask, value, (int)delta, width, line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE())
{
    return kbsub_exchange(KBSUB_SHFL_XOR, mask, value, lanes, width, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE())
{
    return (unsigned)kbsub_warp(KBSUB_BALLOT, mask, predicate != 0, 0, 32, line);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE())
{
    return kbsub_warp(KBSUB_BALLOT, mask, predicate != 0, 0, 32, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE())
{
    return kbsub_warp(KBSUB_BALLOT, mask, predicate == 0, 0, 32, line) == 0;
}
#define KBSUB_REDUCE(name, type, op) \
    inline type name(unsigned mask, type value, int line = __builtin_LINE()) \
    { return (type)kbsub_warp(op, mask, (unsigned)value, 0, 32, line); }
KBSUB_REDUCE(__reduce_add_sync, unsigned, KBSUB_ADD)
KBSUB_REDUCE(__reduce_add_sync, int, KBSUB_ADD)
KBSUB_REDUCE(__reduce_min_sync, unsigned, KBSUB_MIN)
KBSUB_REDUCE(__reduce_min_sync, int, KBSUB_MIN_SIGNED)
KBSUB_REDUCE(__reduce_max_sync, unsigned, KBSUB_MAX)
KBSUB_REDUCE(__reduce_max_sync, int, KBSUB_MAX_SIGNED)
KBSUB_REDUCE(__reduce_and_sync, unsigned, KBSUB_AND)
KBSUB_REDUCE(__reduce_or_sync, unsigned, KBSUB_OR)
KBSUB_REDUCE(__reduce_xor_sync, unsigned, KBSUB_XOR)
#undef KBSUB_REDUCE

// ---- memory ----
// Device and block scope are one here: every fence orders everything.
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> void __stcs(T* p, T value) { *p = value; }
template <class T> void __stcg(T* p, T value) { *p = value; }

template <class T, class F>
T kbsub_atomic(T* p, F next)
{
    T old, wanted;
    __atomic_load(p, &old, __ATOMIC_SEQ_CST);
    do
        wanted = next(old);
    while (!__atomic_compare_exchange(p, &old, &wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
template <class T> struct kbsub_same { typedef T type; };  // the value converts to the pointer's type, as in CUDA
template <class T> T atomicAdd(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return (T)(o + v); }); }
template <class T> T atomicSub(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return (T)(o - v); }); }
template <class T> T atomicExch(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T) { return v; }); }
template <class T> T atomicMax(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return o > v ? o : v; }); }
template <class T> T atomicMin(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return o < v ? o : v; }); }
template <class T> T atomicAnd(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return (T)(o & v); }); }
template <class T> T atomicOr(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return (T)(o | v); }); }
template <class T> T atomicXor(T* p, typename kbsub_same<T>::type v) { return kbsub_atomic(p, [=](T o) { return (T)(o ^ v); }); }
template <class T>
T atomicCAS(T* p, typename kbsub_same<T>::type expected, typename kbsub_same<T>::type wanted)
{
    __atomic_compare_exchange(p, &expected, &wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}

inline void __trap(int line = __builtin_LINE()) { kbsub_trap(line); }

// ---- the device-only functions that candidates define under #ifndef KBSUB_HOST ----
typedef unsigned long long Barrier;

inline void copy16_async(void* to, const void* from, int line = __builtin_LINE()) { kbsub_copy_async(to, from, 16, line); }
inline void copy16_async_keep(void* to, const void* from, int line = __builtin_LINE()) { kbsub_copy_async(to, from, 16, line); }
inline void copy8_async(void* to, const void* from, int line = __builtin_LINE()) { kbsub_copy_async(to, from, 8, line); }
inline void copies_commit() { kbsub_copies_commit(); }
template <int N> void copies_wait() { kbsub_copies_wait(N); }
inline void copies_arrive_noinc(Barrier* b, int line = __builtin_LINE()) { kbsub_copies_arrive(b, line); }
inline void bulk_copy_async(void* to, const void* from, unsigned bytes, Barrier* b, int line = __builtin_LINE())
{
    kbsub_bulk_copy(to, from, bytes, b, line);
}
inline void barrier_init(Barrier* b, unsigned count, int line = __builtin_LINE()) { kbsub_barrier_init(b, count, line); }
inline void barrier_arrive(Barrier* b, int line = __builtin_LINE()) { kbsub_barrier_arrive(b, 0, line); }
inline void barrier_expect_bytes(Barrier* b, unsigned bytes, int line = __builtin_LINE()) { kbsub_barrier_arrive(b, bytes, line); }
inline void barrier_wait(Barrier* b, unsigned parity, int line = __builtin_LINE()) { kbsub_barrier_wait(b, parity, line); }
inline bool barrier_test(Barrier* b, unsigned parity, int line = __builtin_LINE()) { return kbsub_barrier_test(b, parity, line); }
inline void grid_barrier(int line = __builtin_LINE()) { kbsub_grid_barrier(line); }
inline void spin_pause(int line = __builtin_LINE()) { kbsub_spin_pause(line); }
inline ulonglong2 read_pair(const ulonglong2* p)
{
    ulonglong2 v;
    v.x = __atomic_load_n(&p->x, __ATOMIC_SEQ_CST);
    v.y = __atomic_load_n(&p->y, __ATOMIC_SEQ_CST);
    return v;
}
inline void write_pair(ulonglong2* p, ulonglong2 v)
{
    __atomic_store_n(&p->x, v.x, __ATOMIC_SEQ_CST);
    __atomic_store_n(&p->y, v.y, __ATOMIC_SEQ_CST);
}
inline void prefetch_to_l2(const void*, unsigned) {}  // a hint about a cache: nothing here
inline void wait_clocks(int) {}                       // time is no part of a result
inline void named_barrier(int id, int threads, int line = __builtin_LINE()) { kbsub_named_barrier(id, threads, line); }
inline void forget_unpacked(uint4&) {}  // an empty asm on the device, for the register allocator
inline void grid_arrive(unsigned* counter) { __atomic_fetch_add(counter, 1u, __ATOMIC_SEQ_CST); }
inline void grid_wait(unsigned* counter, unsigned target, int line = __builtin_LINE()) { kbsub_grid_wait(counter, target, line); }
