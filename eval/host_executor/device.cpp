// What threads of a kernel do to each other: barriers, warp exchanges, asynchronous copies.
#include "runtime.h"

#include <cstdio>
#include <cstring>
#include <string>

static constexpr uint64_t POISON_VALUE = (uint64_t)POISON << 32 | POISON;

static Fiber& self()
{
    return block->fibers[current];
}

// ---- __syncthreads ----
extern "C" void kbsub_syncthreads(int line)
{
    if (block->at_sync && block->sync_line != line)
        fault(DIVERGENCE, line, "__syncthreads() of line %d, while other threads of the block wait at the one of line %d", line, block->sync_line);
    block->sync_line = line;
    if (++block->at_sync < block->live) {
        wait_here(AT_SYNC, line);
        return;
    }
    for (Fiber& f : block->fibers)  // the last one to come lets all go and goes on itself
        if (f.state == AT_SYNC)
            f.state = READY;
    block->at_sync = 0;
}

// bar.sync id, threads: a part of the block, which may come from different lines (that is its use).
extern "C" void kbsub_named_barrier(int id, int threads, int line)
{
    if (id < 1 || id > 15 || threads < 32 || threads % 32 || (unsigned)threads > (block->threads + 31) / 32 * 32)
        fault(BARRIER, line, "named_barrier(%d, %d): the id must be 1 to 15, the threads whole warps of the block", id, threads);
    auto& b = block->named[id];
    if (b.arrived && b.threads != (unsigned)threads)
        fault(DIVERGENCE, line, "named_barrier(%d, %d), while %u threads wait at line %d for %u", id, threads, b.arrived, b.line, b.threads);
    b.threads = (unsigned)threads;
    b.line = line;
    if (++b.arrived < b.threads) {
        self().wait_for = (unsigned)id;
        wait_here(AT_NAMED, line);
        return;
    }
    for (Fiber& f : block->fibers)
        if (f.state == AT_NAMED && f.wait_for == (unsigned)id)
            f.state = READY;
    b.arrived = 0;
}

// ---- warp exchanges: the numbers of kbsub_host.h ----
enum { SYNC, SHFL, SHFL_UP, SHFL_DOWN, SHFL_XOR, BALLOT, ADD, MIN, MAX, MIN_SIGNED, MAX_SIGNED, AND, OR, XOR };
const char* const OP_NAMES[] = {"__syncwarp", "__shfl_sync", "__shfl_up_sync", "__shfl_down_sync", "__shfl_xor_sync",
    "__ballot/any/all_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_max_sync", "__reduce_min_sync",
    "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync", "__reduce_xor_sync"};

static int source_lane(const Fiber& f, int lane)
{
    const int first = lane & ~(f.width - 1);
    int from = lane;
    if (f.op == SHFL)
        from = first + (f.argument & (f.width - 1));
    else if (f.op == SHFL_UP)
        from = lane - f.argument < first ? lane : lane - f.argument;
    else if (f.op == SHFL_DOWN)
        from = lane + f.argument >= first + f.width ? lane : lane + f.argument;
    else if (f.op == SHFL_XOR)
        from = (lane ^ f.argument) >= first + f.width ? lane : lane ^ f.argument;
    return from;
}

static uint64_t folded(int op, uint64_t a, uint64_t b)
{
    const auto x = (uint32_t)a, y = (uint32_t)b;
    switch (op) {
    case ADD: return x + y;
    case MIN: return x < y ? x : y;
    case MAX: return x > y ? x : y;
    case MIN_SIGNED: return (int32_t)x < (int32_t)y ? x : y;
    case MAX_SIGNED: return (int32_t)x > (int32_t)y ? x : y;
    case AND: return x & y;
    case OR: return x | y;
    default: return x ^ y;
    }
}

// All lanes of the mask are here: give each its result.
static void exchange(Fiber* lanes, unsigned mask, int op)
{
    uint64_t all = 0;
    bool first = true;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) {
            if (op == BALLOT)
                all |= (lanes[lane].value & 1) << lane;
            else if (op >= ADD)
                all = first ? (uint32_t)lanes[lane].value : folded(op, all, lanes[lane].value);
            first = false;
        }
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) {
            Fiber& f = lanes[lane];
            f.result = all;
            if (op >= SHFL && op <= SHFL_XOR) {
                const int from = source_lane(f, lane);
                f.result = mask >> from & 1 ? lanes[from].value : POISON_VALUE;  // undefined on the device
            }
            if (f.state == AT_WARP)
                f.state = READY;
        }
}

extern "C" uint64_t kbsub_warp(int op, unsigned mask, uint64_t value, int argument, int width, int line)
{
    const unsigned first = current & ~31u, lane = current & 31u;
    const unsigned count = block->threads - first < 32 ? block->threads - first : 32;
    Fiber* lanes = &block->fibers[first];
    Fiber& f = lanes[lane];
    const unsigned named = count < 32 ? mask & ((1u << count) - 1) : mask;  // lanes that never existed do not count
    if (!(mask >> lane & 1))
        fault(DIVERGENCE, line, "%s: the mask %#x does not name the calling lane %u", OP_NAMES[op], mask, lane);
    if (width < 1 || width > 32 || (width & (width - 1)))
        fault(DIVERGENCE, line, "%s: the width %d is not a power of two up to 32", OP_NAMES[op], width);
    f.op = op, f.mask = mask, f.value = value, f.argument = argument, f.width = width, f.line = line;
    bool complete = true;
    for (unsigned other = 0; other < count; other++) {
        if (other == lane || !(named >> other & 1))
            continue;
        const Fiber& o = lanes[other];
        if (o.state == DONE)
            fault(DIVERGENCE, line, "divergent %s: the mask %#x names lane %u, which has left the kernel", OP_NAMES[op], mask, other);
        const bool same = o.state == AT_WARP && o.op == op && o.mask == mask && o.line == line;
        complete &= same;
        if (!same && o.state == AT_WARP && o.mask >> lane & 1)  // it waits for this lane, and this lane for it
            fault(DIVERGENCE, line, "divergent %s (line %d, mask %#x): lane %u is at %s (line %d, mask %#x)", OP_NAMES[op], line, mask,
                  other, OP_NAMES[o.op], o.line, o.mask);
    }
    if (!complete) {
        wait_here(AT_WARP, line);
        return f.result;
    }
    exchange(lanes, named, op);
    return f.result;
}

void warp_lane_exited(unsigned thread)
{
    const unsigned first = thread & ~31u, lane = thread & 31u;
    for (unsigned other = first; other < first + 32 && other < block->threads; other++) {
        const Fiber& o = block->fibers[other];
        if (o.state == AT_WARP && o.mask >> lane & 1)
            fault(DIVERGENCE, o.line, "divergent %s: lane %u waits with mask %#x, and lane %u, named there, left the kernel", OP_NAMES[o.op],
                  other & 31u, o.mask, lane);
    }
}

// ---- mbarrier: an opaque 64-bit word in shared memory ----
// bit 63..62: 01 once initialised; 61: parity of the current phase; 60..41: bytes still expected, signed;
// 40..21: arrivals still pending; 20..0: arrivals of a phase.
struct Word {
    bool initialised;
    unsigned parity, pending, expected;
    int bytes;
};
static Word unpack(const uint64_t* b)
{
    uint64_t w;
    memcpy(&w, b, 8);
    return Word{w >> 62 == 1, (unsigned)(w >> 61 & 1), (unsigned)(w >> 21 & 0xfffff), (unsigned)(w & 0x1fffff), (int)((int64_t)(w << 3) >> 44)};
}
static void pack(uint64_t* b, const Word& v)
{
    const uint64_t w = 1ull << 62 | (uint64_t)v.parity << 61 | ((uint64_t)v.bytes & 0xfffff) << 41 | (uint64_t)v.pending << 21 | v.expected;
    memcpy(b, &w, 8);
}

std::string place(const void* p)
{
    const auto* at = static_cast<const unsigned char*>(p);
    char text[80];
    if (at >= block->dynamic_base && at < block->dynamic_end)
        snprintf(text, sizeof text, "the barrier at byte %td of dynamic shared memory", at - block->dynamic_base);
    else if (at >= block->static_base && at < block->static_end)
        snprintf(text, sizeof text, "the barrier at byte %td of static shared memory", at - block->static_base);
    else
        snprintf(text, sizeof text, "the barrier at %p, which is not in shared memory", p);
    return text;
}

static Word checked(const uint64_t* b, int line)
{
    const auto* at = reinterpret_cast<const unsigned char*>(b);
    const bool shared = (at >= block->dynamic_base && at < block->dynamic_end) || (at >= block->static_base && at < block->static_end);
    if (!shared || reinterpret_cast<uintptr_t>(b) % 8)
        fault(BARRIER, line, "%s: a barrier is 8 aligned bytes of shared memory", place(b).c_str());
    const Word w = unpack(b);
    if (!w.initialised)
        fault(BARRIER, line, "%s is used before barrier_init (is a __syncthreads() missing after it?)", place(b).c_str());
    return w;
}

static bool settle(uint64_t* b, Word w)  // true when the phase completed
{
    const bool completed = w.pending == 0 && w.bytes == 0;
    if (completed) {
        w.parity ^= 1;
        w.pending = w.expected;
    }
    pack(b, w);
    return completed;
}

static bool arrive(uint64_t* b, int line)
{
    Word w = checked(b, line);
    if (w.pending == 0)
        fault(BARRIER, line, "%s: more arrivals than the %u of a phase", place(b).c_str(), w.expected);
    w.pending--;
    return settle(b, w);
}

extern "C" void kbsub_barrier_init(uint64_t* b, unsigned count, int line)
{
    if (count < 1 || count > 0xfffff)
        fault(BARRIER, line, "%s: a count of %u arrivals", place(b).c_str(), count);
    pack(b, Word{true, 0, count, count, 0});
    checked(b, line);
}

extern "C" void kbsub_barrier_arrive(uint64_t* b, unsigned expect_bytes, int line)
{
    Word w = checked(b, line);
    w.bytes += (int)expect_bytes;
    pack(b, w);
    arrive(b, line);
}

void barrier_numbers(const uint64_t* b, unsigned* pending, unsigned* expected, int* bytes)
{
    const Word w = unpack(b);
    *pending = w.pending, *expected = w.expected, *bytes = w.bytes;
}

bool phase_completed(const uint64_t* b, unsigned parity)
{
    return unpack(b).parity != (parity & 1);
}

extern "C" void kbsub_barrier_wait(uint64_t* b, unsigned parity, int line)
{
    checked(b, line);
    if (phase_completed(b, parity))
        return;
    self().wait_on = b;
    self().wait_for = parity & 1;
    wait_here(AT_BARRIER, line);
}

extern "C" void kbsub_grid_wait(const unsigned* counter, unsigned target, int line)
{
    if (__atomic_load_n(counter, __ATOMIC_SEQ_CST) >= target)
        return;
    self().wait_on = counter;
    self().wait_for = target;
    wait_here(AT_GRID, line);
}

extern "C" bool kbsub_barrier_test(const uint64_t* b, unsigned parity, int line)
{
    checked(b, line);
    return phase_completed(b, parity);
}

extern "C" void kbsub_grid_barrier(int line)
{
    if (!launch->cooperative)
        fault(GRID, line, "grid_barrier() in a launch that is not cooperative: its blocks need not be resident together");
    const Dim &g = launch->grid, &t = threadIdx;
    kbsub_syncthreads(line);
    if (t.x == 0 && t.y == 0 && t.z == 0)
        __atomic_fetch_add(&report->grid_arrivals, 1u, __ATOMIC_SEQ_CST);
    kbsub_grid_wait(&report->grid_arrivals, ++self().grid_rounds * g.x * g.y * g.z, line);
}

extern "C" void kbsub_spin_pause(int line)
{
    wait_here(AT_SPIN, line);
}

// ---- asynchronous copies ----
static void check_copy(const void* to, const void* from, unsigned bytes, unsigned alignment, int line)
{
    const auto* at = static_cast<const unsigned char*>(to);
    const bool in_dynamic = at >= block->dynamic_base && at + bytes <= block->dynamic_base + launch->shared_bytes;
    const bool in_static = at >= block->static_base && at + bytes <= block->static_end;
    if (!in_dynamic && !in_static)
        fault(SHARED, line, "an asynchronous copy of %u bytes to byte %td of %u of dynamic shared memory", bytes, at - block->dynamic_base,
              launch->shared_bytes);
    if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % alignment)
        fault(MISALIGNED, line, "an asynchronous copy of %u bytes whose addresses or size %u does not divide", bytes, alignment);
}

extern "C" void kbsub_copy_async(void* to, const void* from, unsigned bytes, int line)
{
    check_copy(to, from, bytes, bytes, line);
    poison(to, bytes);  // what is there until the copy completes
    Fiber& f = self();
    f.copies.push_back(Copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, line});
    f.issued++;
}

static void perform(const Copy& c)
{
    memcpy(c.to, c.from, c.bytes);
}

static void finish_copies(Fiber& f, size_t upto)
{
    while (f.finished < upto) {
        perform(f.copies.front());
        f.copies.pop_front();
        f.finished++;
    }
}

extern "C" void kbsub_copies_commit()
{
    self().groups.push_back(self().issued);
}

extern "C" void kbsub_copies_wait(int newest)
{
    Fiber& f = self();
    while (f.groups.size() > (size_t)newest) {
        finish_copies(f, f.groups.front());
        f.groups.pop_front();
    }
}

extern "C" void kbsub_copies_arrive(uint64_t* b, int line)
{
    checked(b, line);
    block->events.push_back(Event{current, self().issued, b, Copy{nullptr, nullptr, 0, line}});
}

extern "C" void kbsub_bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* b, int line)
{
    check_copy(to, from, bytes, 16, line);
    checked(b, line);
    poison(to, bytes);
    block->events.push_back(Event{current, 0, b, Copy{static_cast<unsigned char*>(to), static_cast<const unsigned char*>(from), bytes, line}});
}

bool complete_one_event()
{
    auto& events = block->events;
    if (launch->seed > 1)  // any order may happen; noinc arrivals of one thread carry their copies with them
        std::swap(events.front(), events[(launch->seed * 0x9e3779b97f4a7c15ull ^ block->pass * 0xbf58476d1ce4e5b9ull) % events.size()]);
    const Event e = events.front();
    events.pop_front();
    current = e.thread;  // a fault in here is this thread's
    threadIdx = thread_index(current);
    if (e.bulk.bytes) {
        perform(e.bulk);
        Word w = checked(e.barrier, e.bulk.line);
        w.bytes -= (int)e.bulk.bytes;
        return settle(e.barrier, w);
    }
    finish_copies(block->fibers[e.thread], e.upto);
    return arrive(e.barrier, e.bulk.line);
}

extern "C" void kbsub_trap(int line)
{
    fault(TRAP, line, "__trap() was executed");
}
