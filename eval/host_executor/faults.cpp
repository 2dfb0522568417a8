// How a fault becomes words: who, where, and for a deadlock what each thread waits for.
#include "runtime.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <ucontext.h>
#include <unistd.h>

static constexpr size_t PAGE = 4096;

void die()
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

void catch_signals()
{
    static unsigned char signal_stack[64 << 10];  // the faulting thread's own may be what overflowed
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
}

// ---- deadlock ----
static std::string waits_for(const Block& b, unsigned thread)
{
    const Fiber& f = b.fibers[thread];
    char text[300];
    switch (f.state) {
    case AT_SYNC:
        snprintf(text, sizeof text, "at __syncthreads() (line %d)", f.line);
        return text;
    case AT_NAMED:
        snprintf(text, sizeof text, "at named_barrier(%u, %u) (line %d), where %u have come", f.wait_for, b.named[f.wait_for].threads, f.line,
                 b.named[f.wait_for].arrived);
        return text;
    case AT_WARP: {
        std::string missing;
        for (unsigned lane = 0; lane < 32 && (thread & ~31u) + lane < b.threads; lane++) {
            const Fiber& o = b.fibers[(thread & ~31u) + lane];
            if (f.mask >> lane & 1 && o.state != AT_WARP)
                missing += (missing.empty() ? "" : ",") + std::to_string(lane);
        }
        snprintf(text, sizeof text, "at a divergent %s (line %d, mask %#x) for lanes %s", OP_NAMES[f.op], f.line, f.mask, missing.c_str());
        return text;
    }
    case AT_BARRIER: {
        unsigned pending, expected;
        int bytes;
        barrier_numbers(static_cast<const uint64_t*>(f.wait_on), &pending, &expected, &bytes);
        snprintf(text, sizeof text, "at barrier_wait (line %d), parity %u, on %s: %u of %u arrivals and %d bytes missing", f.line, f.wait_for,
                 place(f.wait_on).c_str(), pending, expected, bytes);
        return text;
    }
    case AT_GRID:
        snprintf(text, sizeof text, "at %s (line %d): the counter is %u, must reach %u",
                 f.wait_on == &report->grid_arrivals ? "grid_barrier" : "grid_wait", f.line, *static_cast<const unsigned*>(f.wait_on), f.wait_for);
        return text;
    case AT_SPIN:
        snprintf(text, sizeof text, "at spin_pause() (line %d) for memory that nobody changes", f.line);
        return text;
    default:
        return "";
    }
}

void report_deadlock(const Block& stuck)
{
    std::map<std::string, std::pair<unsigned, unsigned>> reasons;  // text -> how many threads, the first of them
    bool grid = false, divergent = false;
    int line = 0;
    unsigned first = stuck.threads;
    block = const_cast<Block*>(&stuck);
    blockIdx = stuck.index;
    for (unsigned t = 0; t < stuck.threads; t++) {
        const Fiber& f = stuck.fibers[t];
        if (f.state == DONE)
            continue;
        grid |= f.state == AT_GRID || f.state == AT_SPIN;
        divergent |= f.state == AT_WARP;
        auto& entry = reasons.try_emplace(waits_for(stuck, t), 0, t).first->second;
        entry.first++;
        // The thread to name: one that waits for what cannot come, rather than for the rest of its block.
        const bool better = first == stuck.threads || (stuck.fibers[first].state == AT_SYNC && f.state != AT_SYNC);
        if (better)
            first = t, line = f.line;
    }
    std::string text = grid ? "grid barrier that cannot be passed" : divergent ? "divergent warp, deadlocked" : "deadlock";
    if (grid && !launch->cooperative)
        text += " (" + std::to_string(resident_blocks()) + " blocks are resident: only a cooperative launch has all of them at once)";
    text += ": no thread of the block can go on.";
    for (const auto& [reason, who] : reasons) {
        const Dim t = thread_index(who.second);
        char head[100];
        snprintf(head, sizeof head, " %u thread(s), first (%u,%u,%u), wait ", who.first, t.x, t.y, t.z);
        text += head + reason + ".";
    }
    threadIdx = thread_index(first);
    fault(grid ? GRID : divergent ? DIVERGENCE : DEADLOCK, line, "%s", text.c_str());
}
