// The threads of a block as fibers, and a block from its poisoned start to its end. One block runs at a time in a
// worker process; several may be alive (a cooperative launch). What threads do to each other is in device.cpp.
#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>

const Launch* launch;
Report* report;
Block* block;
unsigned current;
extern "C" {
Dim threadIdx, blockIdx, blockDim, gridDim;
unsigned char *kbsub_static_base, *kbsub_dynamic_base;
}

static unsigned me;                             // this worker's number
static void* scheduler_stack_pointer;
static std::vector<unsigned char*> free_stacks;
static constexpr size_t PAGE = 4096;
static constexpr uint64_t STACK_MARK = 0x5afe57ac5afe57acull;  // at the lowest address of each stack

// ---- fibers ----
asm(R"(
.text
.globl kbsub_switch
.hidden kbsub_switch
.type kbsub_switch,@function
kbsub_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
)");
extern "C" void kbsub_switch(void** save, void* load);

static Dim thread_indices[1024];
Dim thread_index(unsigned thread)
{
    return thread_indices[thread];
}

static void enter_thread(unsigned thread)
{
    current = thread;
    threadIdx = thread_index(thread);
    report->worker[me].thread = threadIdx;
}

void poison(void* at, size_t bytes)
{
    auto* p = static_cast<unsigned char*>(at);
    const uint32_t word = POISON;
    for (size_t i = 0; i < bytes; i += 4)
        memcpy(p + i, &word, std::min<size_t>(4, bytes - i));
}

Order make_order(unsigned count, uint64_t seed, uint64_t pass)
{
    if (seed == 0)
        return Order{0, 1, count};
    if (seed == 1)
        return Order{count - 1, count - 1, count};  // minus one, modulo the count
    uint64_t h = (seed * 0x9e3779b97f4a7c15ull) ^ (pass * 0xbf58476d1ce4e5b9ull);
    h = (h ^ h >> 31) * 0x94d049bb133111ebull;
    h ^= h >> 29;
    unsigned stride = (unsigned)(h >> 32) % count | 1;
    while (std::gcd(stride, count) != 1)
        stride += 2;
    return Order{(unsigned)h % count, stride, count};
}

static void check_stack(const Fiber& f)
{
    if (*reinterpret_cast<uint64_t*>(f.stack) != STACK_MARK)
        fault(STACK, f.line, "the thread's local variables take more than %zu bytes of stack", STACK_BYTES);
}

static void thread_finished()
{
    Fiber& f = block->fibers[current];
    check_stack(f);
    f.state = DONE;
    block->live--;
    warp_lane_exited(current);
    if (block->at_sync && block->at_sync == block->live) {
        for (Fiber& other : block->fibers)
            if (other.state == AT_SYNC)
                other.state = READY;
        block->at_sync = 0;
    }
}

// A fiber runs threads one after another as long as none of them waits: most kernels then never switch at all.
static void fiber_main()
{
    for (;;) {
        launch->call(launch->arguments);
        thread_finished();
        if (block->started == block->threads)
            break;
        unsigned char* stack = block->fibers[current].stack;
        enter_thread(block->order.at(block->started++));
        Fiber& next = block->fibers[current];
        next.state = READY;
        next.stack = stack;
    }
    free_stacks.push_back(block->fibers[current].stack);
    void* unused;
    kbsub_switch(&unused, scheduler_stack_pointer);
    __builtin_unreachable();
}

static void resume(unsigned thread)
{
    Fiber& f = block->fibers[thread];
    enter_thread(thread);
    if (f.state == FRESH) {
        if (free_stacks.empty())
            fault(CRASH, 0, "no stack left for this thread: an error of the host executor");
        f.stack = free_stacks.back();
        free_stacks.pop_back();
        *reinterpret_cast<uint64_t*>(f.stack) = STACK_MARK;
        auto** top = reinterpret_cast<void**>(f.stack + STACK_BYTES) - 1;
        *--top = reinterpret_cast<void*>(fiber_main);  // popped by `ret`: the stack is then aligned as after a call
        top -= 6;
        f.stack_pointer = top;
    }
    f.state = READY;
    kbsub_switch(&scheduler_stack_pointer, f.stack_pointer);
}

void wait_here(State state, int line)
{
    Fiber& f = block->fibers[current];
    f.state = state;
    f.line = line;
    check_stack(f);
    kbsub_switch(&f.stack_pointer, scheduler_stack_pointer);
}

// ---- blocks ----
static bool may_run(const Fiber& f)
{
    switch (f.state) {
    case READY:
    case AT_SPIN:
        return true;
    case AT_BARRIER:
        return phase_completed(static_cast<const uint64_t*>(f.wait_on), f.wait_for);
    case AT_GRID:
        return __atomic_load_n(static_cast<const unsigned*>(f.wait_on), __ATOMIC_SEQ_CST) >= f.wait_for;
    default:
        return false;
    }
}

static unsigned char* guarded(size_t bytes, size_t alignment, unsigned char** end)
{
    const size_t pages = (bytes + alignment + PAGE - 1) / PAGE * PAGE;
    auto* at = static_cast<unsigned char*>(
        mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (at == MAP_FAILED || mprotect(at + pages, PAGE, PROT_NONE))
        fault(CRASH, 0, "no memory for %zu bytes of shared memory", bytes);
    *end = at + pages;
    return at + (pages - bytes) / alignment * alignment;
}

static void enter_block(Block& b)
{
    block = &b;
    blockIdx = b.index;
    report->worker[me].block = b.index;
    kbsub_static_base = b.static_base;
    kbsub_dynamic_base = b.dynamic_base;
}

void begin(Block& b, unsigned number)
{
    const Dim& g = launch->grid;
    b.index = Dim{number % g.x, number / g.x % g.y, number / (g.x * g.y)};
    b.threads = b.live = launch->block.x * launch->block.y * launch->block.z;
    b.at_sync = b.started = 0;
    b.pass = (uint64_t)number << 32;
    b.order = make_order(b.threads, launch->seed, b.pass);
    b.events.clear();
    memset(b.named, 0, sizeof b.named);
    if (b.fibers.empty()) {
        b.fibers.resize(b.threads);
        b.static_base = guarded(launch->static_bytes, 16, &b.static_end);
        b.dynamic_base = guarded(launch->shared_bytes, 128, &b.dynamic_end);
    }
    for (Fiber& f : b.fibers) {
        f.state = FRESH;
        f.line = 0;
        f.grid_rounds = 0;
        if (f.issued) {
            f.copies.clear();
            f.groups.clear();
            f.issued = f.finished = 0;
        }
    }
    poison(b.static_base, b.static_end - b.static_base);
    poison(b.dynamic_base, b.dynamic_end - b.dynamic_base);
    enter_block(b);
}

static void finish(Block& b)
{
    while (!b.events.empty())
        complete_one_event();
    const uint32_t word = POISON;
    for (unsigned char* p = b.dynamic_base + launch->shared_bytes; p + 4 <= b.dynamic_end; p += 4)
        if (memcmp(p, &word, 4))
            fault(SHARED, 0, "a thread of this block wrote dynamic shared memory at byte %td of %u", p - b.dynamic_base, launch->shared_bytes);
}

// Until the block has ended, or none of its threads goes on and nothing asynchronous is left. A thread that pauses
// again where it paused before did not go on. `*moved` is set when some thread did.
Pass run(Block& b, bool* moved)
{
    enter_block(b);
    for (;;) {
        bool progress = b.started < b.threads;
        while (b.started < b.threads)
            resume(b.order.at(b.started++));
        b.order = make_order(b.threads, launch->seed, ++b.pass);
        for (unsigned i = 0; b.live && i < b.threads; i++) {
            const unsigned thread = b.order.at(i);
            Fiber& f = b.fibers[thread];
            if (f.state == DONE || !may_run(f))
                continue;
            const int paused_at = f.state == AT_SPIN ? f.line : -1;
            resume(thread);
            progress |= f.state != AT_SPIN || f.line != paused_at;
        }
        *moved |= progress;
        if (!b.live) {
            finish(b);
            return ENDED;
        }
        if (__atomic_load_n(&report->failed, __ATOMIC_RELAXED))
            die();
        if (!progress) {
            if (b.events.empty())
                return STUCK;
            while (!complete_one_event() && !b.events.empty())  // as late as the model allows: only when nobody
                continue;                                       // can do without it
            *moved = true;
        }
    }
}

bool waits_for_other_blocks(const Block& b, bool* spins)
{
    bool any = false;
    for (const Fiber& f : b.fibers) {
        any |= f.state == AT_GRID || f.state == AT_SPIN;
        *spins |= f.state == AT_SPIN;
    }
    return any;
}

void prepare(unsigned worker, size_t stacks)
{
    me = worker;
    const unsigned threads = launch->block.x * launch->block.y * launch->block.z;
    for (unsigned t = 0; t < threads; t++)
        thread_indices[t] = Dim{t % launch->block.x, t / launch->block.x % launch->block.y, t / (launch->block.x * launch->block.y)};
    blockDim = launch->block;
    gridDim = launch->grid;
    auto* memory = static_cast<unsigned char*>(mmap(nullptr, stacks * STACK_BYTES, PROT_READ | PROT_WRITE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED)
        fault(CRASH, 0, "no memory for the stacks of %zu threads", stacks);
    for (size_t i = stacks; i-- > 0;)
        free_stacks.push_back(memory + i * STACK_BYTES);
}
