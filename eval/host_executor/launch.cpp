// Runs one kernel launch in forked worker processes and tells the caller how it ended.
//
// A fault of a kernel so costs the launch and not the caller, and shared memory can be an ordinary address of its
// process. Tensors live in MAP_SHARED memory and are seen by all.
#include "runtime.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <ctime>
#include <link.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xmmintrin.h>

static unsigned me;  // this worker's number
static size_t resident;

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
    catch_signals();

    const unsigned total = launch->grid.x * launch->grid.y * launch->grid.z;
    const unsigned threads = launch->block.x * launch->block.y * launch->block.z;
    const size_t mine = launch->cooperative ? (total - number + launch->workers - 1) / launch->workers : 1;
    resident = launch->cooperative ? total : launch->workers;
    prepare(number, mine * threads);

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
