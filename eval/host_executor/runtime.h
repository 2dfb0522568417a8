// What the files of the host runtime share: one worker process runs blocks; a block's threads are fibers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <numeric>
#include <string>
#include <vector>

struct Dim {
    unsigned x, y, z;
};

// Read and written from Python (ctypes): keep executor.py in step.
struct Launch {
    void (*call)(void**);  // the kernel, taking the addresses of its arguments
    void** arguments;
    const char* kernel;
    Dim grid, block;
    unsigned shared_bytes;    // dynamic
    unsigned static_bytes;    // the library's TLS segment
    unsigned workers;
    unsigned cooperative;     // 1: all blocks live at once
    uint64_t seed;            // 0: threads in order; 1: in reverse; else pseudo-random, anew at each pass
    double timeout_s;
};

// One shared page a launch: what the workers tell the parent and each other.
struct Report {
    int failed;               // set once, by whoever faults first
    int kind;                 // Kind
    int write;                // memory fault: 1 when it was a store
    int line;                 // in CUDA_SOURCE, 0 when unknown
    uint64_t address;         // memory fault: where
    Dim block, thread;
    char text[3000];
    unsigned next_block;
    unsigned grid_arrivals;   // blocks that came to a grid_barrier(), over the whole launch
    unsigned wakes;           // how often a worker left the idle state
    struct alignas(64) {      // a cache line each
        int idle;             // 1: all its threads wait for other blocks; 2: it has ended
        unsigned polls;       // rounds over its blocks in which no thread went on
        Dim block, thread;    // what it ran last
    } worker[64];
};

enum Kind { NONE, MEMORY, MISALIGNED, DEADLOCK, DIVERGENCE, GRID, BARRIER, SHARED, STACK, TRAP, TIMEOUT, CRASH };

enum State : uint8_t { FRESH, READY, AT_SYNC, AT_NAMED, AT_WARP, AT_BARRIER, AT_GRID, AT_SPIN, DONE };

struct Copy {
    unsigned char* to;
    const unsigned char* from;
    unsigned bytes;
    int line;
};

template <class T>
class Queue {  // a std::deque would cost half a kilobyte in each of 100,000 threads
public:
    void push_back(const T& value) { items.push_back(value); }
    const T& front() const { return items[head]; }
    size_t size() const { return items.size() - head; }
    void pop_front()
    {
        if (++head == items.size())
            clear();
    }
    void clear()
    {
        items.clear();
        head = 0;
    }

private:
    std::vector<T> items;
    size_t head = 0;
};

struct Fiber {
    void* stack_pointer;
    unsigned char* stack;
    State state;
    int line;                 // of the wait
    // AT_WARP
    int op, argument, width;
    unsigned mask;
    uint64_t value, result;
    // AT_BARRIER, AT_GRID
    const void* wait_on;
    unsigned wait_for, grid_rounds;
    // copies issued by this thread and not yet done, oldest first; groups[i] = how many of them closed groups hold
    Queue<Copy> copies;
    Queue<size_t> groups;
    size_t issued, finished;  // counts since the block began
};

// Something asynchronous that will reach a barrier: a noinc arrival (all copies of `thread` up to `upto`) or a bulk copy.
struct Event {
    unsigned thread;
    size_t upto;
    uint64_t* barrier;
    Copy bulk;                // bytes == 0: not a bulk copy
};

// An order of `count` threads or blocks: as they are, reversed, or along a random stride coprime to the count.
struct Order {
    unsigned offset, stride, count;
    unsigned at(unsigned i) const { return (unsigned)((offset + (uint64_t)stride * i) % count); }
};
Order make_order(unsigned count, uint64_t seed, uint64_t pass);

struct Block {
    Dim index;
    Order order;
    unsigned threads, live, at_sync, started;
    int sync_line;
    struct {
        unsigned arrived, threads;
        int line;
    } named[16];              // bar.sync id, threads
    uint64_t pass;
    std::vector<Fiber> fibers;
    std::deque<Event> events;
    unsigned char *static_base, *static_end, *dynamic_base, *dynamic_end;  // *_end: the guard page
};

extern const Launch* launch;
extern Report* report;
extern Block* block;          // the one that runs now
extern unsigned current;      // its thread that runs now
extern "C" {
extern Dim threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char *kbsub_static_base, *kbsub_dynamic_base;
}

enum Pass { ENDED, STUCK };

// faults.cpp
[[noreturn]] void die();
void catch_signals();
[[noreturn]] void fault(Kind kind, int line, const char* format, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void report_deadlock(const Block& stuck);
// blocks.cpp
void prepare(unsigned worker, size_t stacks);   // of this process, before its first block
void begin(Block& b, unsigned number);
Pass run(Block& b, bool* moved);
bool waits_for_other_blocks(const Block& b, bool* spins);
Dim thread_index(unsigned thread);
void poison(void* at, size_t bytes);
void wait_here(State state, int line);          // leave this fiber until its state says it may go on
// device.cpp
extern const char* const OP_NAMES[];
std::string place(const void* barrier);
bool complete_one_event();                      // of the running block; true when a barrier's phase completed
bool phase_completed(const uint64_t* barrier, unsigned parity);
void barrier_numbers(const uint64_t* barrier, unsigned* pending, unsigned* expected, int* bytes);
void warp_lane_exited(unsigned thread);
// launch.cpp
size_t resident_blocks();

constexpr size_t STACK_BYTES = 32 << 10;        // of a thread
constexpr uint32_t POISON = 0xfffbfffbu;        // a NaN as fp32 and fp64, and each half a NaN as fp16 and bf16
