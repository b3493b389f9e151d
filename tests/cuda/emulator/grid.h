// A grid of threads on a host: one block after another, each thread a coroutine that runs until it waits for others.
//
// `disorder` says in which order: 0, by their numbers; other numbers, another order each time, of odd ones the last block
// first, and copies to shared memory that come as late as they may. Results that depend on it are those of a race.
#pragma once

#include "host.h"

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

struct Place { unsigned x = 0, y = 0, z = 0; };
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace grid {

constexpr int STACK_BYTES = 1 << 17;

// Contexts begin threads; jumps, which ask nothing of the kernel, go on with them.
struct Thread {
    ucontext_t context;
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool begun, ended;
};

// Threads that wait until `size` of them have come.
struct Barrier {
    unsigned arrived = 0, generation = 0;
};

static std::vector<Thread> threads;
static jmp_buf scheduler;
static std::function<void()> body;
static std::map<uint64_t, Barrier> barriers;  // of some lanes of a warp
static Barrier barrier_of_block, barriers_of_warps[32];
static char* shared = nullptr;  // the block's dynamic shared memory
static unsigned disorder = 0;
static std::minstd_rand random_order;
static bool moved;  // whether any thread got further since all were resumed

// Where a kernel first did what a GPU does in another way than a host; null if it did nothing of that kind.
struct SourceLocation {
    const char* file;
    unsigned line, column;
};
static const SourceLocation* fault = nullptr;

inline void note_fault(const SourceLocation* at) {
    if (!fault) fault = at;
}

inline void yield() {
    if (!_setjmp(threads[threadIdx.x].place)) _longjmp(scheduler, 1);
}

inline void wait(Barrier& barrier, unsigned size) {
    unsigned generation = barrier.generation;
    moved = true;
    if (++barrier.arrived == size) {
        barrier.arrived = 0, barrier.generation++;
        return;
    }
    while (barrier.generation == generation) yield();
    moved = true;
}

constexpr unsigned WHOLE_WARP = 0xffffffffu;

// Of a warp's lanes named by `mask`.
inline Barrier& barrier_of_lanes(unsigned mask) {
    unsigned warp = threadIdx.x / 32;
    return mask == WHOLE_WARP ? barriers_of_warps[warp] : barriers[static_cast<uint64_t>(warp) << 32 | mask];
}

inline void wait_for_lanes(unsigned mask) { wait(barrier_of_lanes(mask), static_cast<unsigned>(__popc(mask))); }

// read(what each lane of the warp gave). A whole warp takes two places in turn, so that nobody waits for the slowest reader.
template <class T, class Read>
auto with_lanes(const T& own, unsigned mask, Read read) {
    static T given[3][1024];
    T* place = given[mask == WHOLE_WARP ? barrier_of_lanes(mask).generation % 2 : 2];
    place[threadIdx.x] = own;
    wait_for_lanes(mask);
    auto result = read(const_cast<const T*>(place) + threadIdx.x / 32 * 32);
    if (mask != WHOLE_WARP) wait_for_lanes(mask);
    return result;
}

inline void start() {
    body();
    threads[threadIdx.x].ended = true;
    _longjmp(scheduler, 1);
}

__attribute__((noinline)) inline void resume(Thread& thread) {
    if (_setjmp(scheduler)) return;
    if (thread.begun) _longjmp(thread.place, 1);
    thread.begun = moved = true;
    setcontext(&thread.context);
}

inline void run_block(unsigned count) {
    barriers.clear();
    barrier_of_block = {};
    for (Barrier& barrier : barriers_of_warps) barrier = {};
    if (threads.size() < count) threads.resize(count);
    for (unsigned n = 0; n < count; n++) {
        Thread& thread = threads[n];
        if (!thread.stack) thread.stack.reset(new char[STACK_BYTES]);
        thread.begun = thread.ended = false;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, start, 0);
    }
    random_order.seed(disorder);
    for (unsigned left = count; left;) {
        moved = false;
        unsigned first = disorder ? random_order() % count : 0, step = 1;
        if (disorder)
            do step = random_order() % count;
            while (std::gcd(step, count) != 1);
        for (unsigned n = 0; n < count; n++) {
            unsigned chosen = (first + n * step) % count;
            if (threads[chosen].ended) continue;
            threadIdx.x = chosen;
            resume(threads[chosen]);
            left -= threads[chosen].ended;
        }
        if (!moved) std::fputs("a block of the emulator waits for threads that will not come\n", stderr), std::abort();
    }
}

// The value that another lane of the warp gives.
template <class T>
T exchange(unsigned mask, T value, unsigned lane) {
    return with_lanes(value, mask, [=](const T* lanes) { return lanes[lane]; });
}

}  // namespace grid

inline void __syncthreads() { grid::wait(grid::barrier_of_block, blockDim.x); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { grid::wait_for_lanes(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) { return grid::exchange(mask, value, static_cast<unsigned>(lane)); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return grid::exchange(mask, value, threadIdx.x % 32 ^ static_cast<unsigned>(distance));
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
    return grid::with_lanes(value, mask, [=](const bool* lanes) {
        unsigned all = 0;
        for (unsigned lane = 0; lane < 32; lane++)
            if (mask >> lane & 1) all |= static_cast<unsigned>(lanes[lane]) << lane;
        return all;
    });
}
template <class T, class U>
T atomicAdd(T* at, U value) {
    T before = *at;
    *at = before + static_cast<T>(value);
    return before;
}
template <class T>
T atomicMin(T* at, T value) {
    T before = *at;
    *at = value < before ? value : before;
    return before;
}
template <class T>
T atomicMax(T* at, T value) {
    T before = *at;
    *at = value > before ? value : before;
    return before;
}
inline bool __any_sync(unsigned mask, bool value) { return __ballot_sync(mask, value) != 0; }

// Called by what the compiler puts before pointers that may not be aligned, shifts by more than there are bits, and indices.
extern "C" {
__attribute__((used)) void __ubsan_handle_type_mismatch_v1(grid::SourceLocation* at, uintptr_t) { grid::note_fault(at); }
__attribute__((used)) void __ubsan_handle_shift_out_of_bounds(grid::SourceLocation* at, uintptr_t, uintptr_t) { grid::note_fault(at); }
__attribute__((used)) void __ubsan_handle_out_of_bounds(grid::SourceLocation* at, uintptr_t) { grid::note_fault(at); }

__attribute__((used)) const char* fault() {
    static char text[512];
    if (!grid::fault) return nullptr;
    std::snprintf(text, sizeof text, "%s:%u", grid::fault->file, grid::fault->line);
    grid::fault = nullptr;
    return text;
}
}
