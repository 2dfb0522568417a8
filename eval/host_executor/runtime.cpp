// Runs one kernel launch: worker processes, blocks, fibers, faults. What threads do to each other is in device.cpp.
//
// Workers are forked processes, so a fault of a kernel costs the launch and not the caller, and shared memory can be
// an ordinary per-process address. Tensors live in MAP_SHARED memory and are seen by all.
#include "runtime.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <link.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

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
static constexpr size_t STACK_BYTES = 32 << 10, PAGE = 4096;
static constexpr uint64_t STACK_MARK = 0x5afe57ac5afe57acull;  // at the lowest address of each stack
static size_t resident;

// ---- faults ----
static void die()
{
    _exit(3);
}

void fault(Kind kind, int line, const char* format, ...)
{
    int expected = 0;
    if (__atomic_compare_exchange_n(&report->failed, &expected, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        report->kind = kind;
        report->line = line;
        report->block = blockIdx;
        report->thread = threadIdx;
        va_list list;
        va_start(list, format);
        vsnprintf(report->text, sizeof report->text, format, list);
        va_end(list);
        __atomic_store_n(&report->failed, 2, __ATOMIC_SEQ_CST);
    }
    die();
    __builtin_unreachable();
}

static void on_signal(int number, siginfo_t* info, void* context)
{
    const auto* registers = &static_cast<ucontext_t*>(context)->uc_mcontext;
    const auto* address = static_cast<unsigned char*>(info->si_addr);
    if (number == SIGILL)
        fault(MISALIGNED, 0, "a vector was loaded or stored at an address that its size does not divide");
    if (number == SIGFPE)
        fault(CRASH, 0, "an integer was divided by zero");
    report->address = reinterpret_cast<uint64_t>(address);
    report->write = registers->gregs[REG_ERR] >> 1 & 1;
    const char* verb = report->write ? "wrote" : "read";
    if (block && current < block->threads) {  // a frame that reaches below its stack
        const unsigned char* stack = block->fibers[current].stack;
        if (stack && address < stack && address + (1 << 20) > stack)
            fault(STACK, 0, "the thread's local variables take more than %zu bytes of stack", STACK_BYTES);
    }
    if (block && address >= block->dynamic_end && address < block->dynamic_end + PAGE)
        fault(SHARED, 0, "%s dynamic shared memory at byte %td of %u", verb, address - block->dynamic_base, launch->shared_bytes);
    if (block && address >= block->static_end && address < block->static_end + PAGE)
        fault(SHARED, 0, "%s %td bytes past the end of static shared memory", verb, address - block->static_end);
    fault(MEMORY, 0, "%s", verb);
}

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

static void begin(Block& b, unsigned number)
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

enum Pass { ENDED, STUCK };

// Until the block has ended, or none of its threads goes on and nothing asynchronous is left. A thread that pauses
// again where it paused before did not go on. `*moved` is set when some thread did.
static Pass run(Block& b, bool* moved)
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

static bool waits_for_other_blocks(const Block& b, bool* spins)
{
    bool any = false;
    for (const Fiber& f : b.fibers) {
        any |= f.state == AT_GRID || f.state == AT_SPIN;
        *spins |= f.state == AT_SPIN;
    }
    return any;
}

// What a worker does between rounds over blocks in which no thread went on. A deadlock is certain once every worker
// has been idle over two complete rounds in which nobody woke: then nobody is left to change what they wait for. (A
// thread at spin_pause() may look at several places in turn, so that many more rounds are asked of it.)
class Idle {
public:
    void round(const Block& stuck, bool spins)
    {
        auto& mine = report->worker[me];
        __atomic_store_n(&mine.idle, 1, __ATOMIC_SEQ_CST);
        __atomic_fetch_add(&mine.polls, 1u, __ATOMIC_SEQ_CST);
        const unsigned rounds = spins ? 2000 : 2;
        const unsigned wakes = __atomic_load_n(&report->wakes, __ATOMIC_SEQ_CST);
        bool all_idle = true, all_looked = true;
        for (unsigned w = 0; w < launch->workers; w++) {
            const auto& other = report->worker[w];
            const int state = __atomic_load_n(&other.idle, __ATOMIC_SEQ_CST);
            all_idle &= state != 0;
            all_looked &= state == 2 || __atomic_load_n(&other.polls, __ATOMIC_SEQ_CST) - seen_polls[w] >= rounds;
        }
        if (watching && all_idle && all_looked && wakes == seen_wakes)
            report_deadlock(stuck);
        if (!watching || !all_idle || wakes != seen_wakes) {
            watching = all_idle;
            seen_wakes = wakes;
            for (unsigned w = 0; w < launch->workers; w++)
                seen_polls[w] = __atomic_load_n(&report->worker[w].polls, __ATOMIC_SEQ_CST);
        }
        if (++turns > 4000)
            usleep(50);
        else
            sched_yield();
    }

    void wake()
    {
        if (turns == 0)
            return;
        turns = 0;
        watching = false;
        __atomic_fetch_add(&report->wakes, 1u, __ATOMIC_SEQ_CST);
        __atomic_store_n(&report->worker[me].idle, 0, __ATOMIC_SEQ_CST);
    }

private:
    unsigned seen_wakes = 0, seen_polls[64] = {}, turns = 0;
    bool watching = false;
};

size_t resident_blocks()
{
    return resident;
}

// ---- workers ----
static void run_until_done(std::vector<Block*>& blocks)
{
    Idle idle;
    while (!blocks.empty()) {
        std::vector<Block*> waiting;
        bool moved = false, spins = false;
        for (Block* b : blocks)
            if (run(*b, &moved) == STUCK) {
                if (!waits_for_other_blocks(*b, &spins))
                    report_deadlock(*b);
                waiting.push_back(b);
            }
        blocks.swap(waiting);
        if (moved)
            idle.wake();
        else if (!blocks.empty())
            idle.round(*blocks.front(), spins);
    }
    idle.wake();
}

static void work(unsigned number)
{
    me = number;
    _mm_setcsr(0x1f80);  // round to nearest, subnormals kept, whatever the caller had set
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    static unsigned char signal_stack[64 << 10];
    stack_t alternate = {};
    alternate.ss_sp = signal_stack;
    alternate.ss_size = sizeof signal_stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int s : {SIGSEGV, SIGBUS, SIGILL, SIGFPE})
        sigaction(s, &action, nullptr);
    for (int s : {SIGINT, SIGTERM})
        signal(s, SIG_DFL);

    const unsigned total = launch->grid.x * launch->grid.y * launch->grid.z;
    const unsigned threads = launch->block.x * launch->block.y * launch->block.z;
    const size_t mine = launch->cooperative ? (total - number + launch->workers - 1) / launch->workers : 1;
    resident = launch->cooperative ? total : launch->workers;
    for (unsigned t = 0; t < threads; t++)
        thread_indices[t] = Dim{t % launch->block.x, t / launch->block.x % launch->block.y, t / (launch->block.x * launch->block.y)};
    blockDim = launch->block;
    gridDim = launch->grid;
    const size_t stacks = mine * threads;
    auto* memory = static_cast<unsigned char*>(mmap(nullptr, stacks * STACK_BYTES, PROT_READ | PROT_WRITE,
                                                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory == MAP_FAILED)
        fault(CRASH, 0, "no memory for the stacks of %zu threads", stacks);
    for (size_t i = stacks; i-- > 0;)
        free_stacks.push_back(memory + i * STACK_BYTES);

    std::vector<Block> own(mine);
    std::vector<Block*> blocks;
    if (launch->cooperative) {
        for (size_t i = 0; i < mine; i++) {
            begin(own[i], number + (unsigned)i * launch->workers);
            blocks.push_back(&own[i]);
        }
        run_until_done(blocks);
    } else {
        const Order order = make_order(total, launch->seed, ~0ull);
        const unsigned stride = std::max(1u, std::min(64u, total / (launch->workers * 8)));
        for (;;) {
            const unsigned first = __atomic_fetch_add(&report->next_block, stride, __ATOMIC_SEQ_CST);
            if (first >= total || __atomic_load_n(&report->failed, __ATOMIC_RELAXED))
                break;
            for (unsigned i = first; i < std::min(total, first + stride); i++) {
                begin(own[0], order.at(i));
                blocks.assign(1, &own[0]);
                run_until_done(blocks);
            }
        }
    }
    __atomic_store_n(&report->worker[me].idle, 2, __ATOMIC_SEQ_CST);
    _exit(0);
}

// Bytes of the TLS segment (= static shared memory) of the library that holds `symbol`.
extern "C" size_t kbsub_static_bytes(const void* symbol)
{
    struct Search {
        uintptr_t symbol;
        size_t bytes;
    } search = {reinterpret_cast<uintptr_t>(symbol), 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto* s = static_cast<Search*>(data);
            size_t bytes = 0;
            bool here = false;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto& p = info->dlpi_phdr[i];
                if (p.p_type == PT_TLS)
                    bytes = p.p_memsz;
                if (p.p_type == PT_LOAD)
                    here |= s->symbol - (info->dlpi_addr + p.p_vaddr) < p.p_memsz;
            }
            if (here)
                s->bytes = bytes;
            return here ? 1 : 0;
        },
        &search);
    return search.bytes;
}

extern "C" size_t kbsub_report_bytes()
{
    return sizeof(Report);
}

static double now_s()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// Runs the launch; returns 0, or 1 with *result filled in (a fault), or -1 when the caller was interrupted.
extern "C" int kbsub_launch(const Launch* order, Report* result)
{
    launch = order;
    report = result;
    pid_t child[64];
    int ends[2];
    if (order->workers < 1 || order->workers > 64 || pipe(ends))
        return -2;
    unsigned started = 0;
    for (; started < order->workers; started++) {
        child[started] = fork();
        if (child[started] == 0) {
            close(ends[0]);
            work(started);
        }
        if (child[started] < 0)
            break;
    }
    close(ends[1]);  // the read end sees the end of file when the last worker is gone
    bool interrupted = false;
    if (started < order->workers)
        report->failed = 1;
    const double deadline = now_s() + order->timeout_s;
    for (;;) {
        pollfd wait = {ends[0], POLLIN, 0};
        const int ready = poll(&wait, 1, 20);
        interrupted = ready < 0;
        if (ready != 0 || __atomic_load_n(&report->failed, __ATOMIC_SEQ_CST))
            break;
        if (now_s() > deadline) {
            report->failed = 2;
            report->kind = TIMEOUT;
            report->block = report->worker[0].block;
            report->thread = report->worker[0].thread;
            snprintf(report->text, sizeof report->text, "still running after %g s", order->timeout_s);
            break;
        }
    }
    const bool stop = interrupted || __atomic_load_n(&report->failed, __ATOMIC_SEQ_CST);
    if (stop && report->failed == 1)
        usleep(20000);  // whoever claimed the report is still writing it
    for (unsigned w = 0; w < started; w++) {
        if (stop)
            kill(child[w], SIGKILL);
        int status = 0;
        while (waitpid(child[w], &status, 0) < 0 && errno == EINTR)
            continue;
        const bool clean = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (!stop && !clean && !report->failed) {
            report->failed = 2;
            report->kind = CRASH;
            report->block = report->worker[w].block;
            report->thread = report->worker[w].thread;
            snprintf(report->text, sizeof report->text, "the worker process ended with status %#x", status);
        }
    }
    close(ends[0]);
    if (interrupted)
        return -1;
    return report->failed ? 1 : 0;
}
