// A grid of threads on a host: one block after another, each thread a coroutine that runs until it waits for others.
#pragma once

#include "host.h"

#include <ucontext.h>

#include <functional>
#include <map>
#include <memory>
#include <vector>

struct Place { unsigned x = 0, y = 0, z = 0; };
static Place threadIdx, blockIdx, blockDim, gridDim;

namespace grid {

constexpr int STACK_BYTES = 1 << 17;

struct Thread {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    bool ended = false;
};

// Threads that wait until `size` of them have come.
struct Barrier {
    unsigned arrived = 0, generation = 0;
};

static std::vector<Thread> threads;
static ucontext_t scheduler;
static std::function<void()> body;
static std::map<uint64_t, Barrier> barriers;
static uint64_t values[1024];
static char* shared = nullptr;  // the block's dynamic shared memory

inline void yield() {
    unsigned own = threadIdx.x;
    swapcontext(&threads[own].context, &scheduler);
}

inline void wait(uint64_t key, unsigned size) {
    Barrier& barrier = barriers[key];
    unsigned generation = barrier.generation;
    if (++barrier.arrived == size) {
        barrier.arrived = 0, barrier.generation++;
        return;
    }
    while (barrier.generation == generation) yield();
}

// Of a warp's lanes named by `mask`.
inline void wait_for_lanes(unsigned mask) {
    wait(static_cast<uint64_t>(threadIdx.x / 32 + 1) << 32 | mask, static_cast<unsigned>(__popc(mask)));
}

inline void start() {
    body();
    threads[threadIdx.x].ended = true;
    swapcontext(&threads[threadIdx.x].context, &scheduler);
}

inline void run_block(unsigned count) {
    barriers.clear();
    threads = std::vector<Thread>(count);
    for (Thread& thread : threads) {
        thread.stack = std::make_unique<char[]>(STACK_BYTES);
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.get(), thread.context.uc_stack.ss_size = STACK_BYTES;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, start, 0);
    }
    for (unsigned left = count; left;)
        for (unsigned n = 0; n < count; n++) {
            if (threads[n].ended) continue;
            threadIdx.x = n;
            swapcontext(&scheduler, &threads[n].context);
            left -= threads[n].ended;
        }
}

// The value that another lane of the warp gives.
template <class T>
T exchange(unsigned mask, T value, unsigned lane) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    values[threadIdx.x] = bits;
    wait_for_lanes(mask);
    bits = values[threadIdx.x / 32 * 32 + lane];
    wait_for_lanes(mask);
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace grid

inline void __syncthreads() { grid::wait(0, blockDim.x); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { grid::wait_for_lanes(mask); }
template <class T>
T __shfl_sync(unsigned mask, T value, int lane) { return grid::exchange(mask, value, static_cast<unsigned>(lane)); }
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return grid::exchange(mask, value, threadIdx.x % 32 ^ static_cast<unsigned>(distance));
}
inline unsigned __ballot_sync(unsigned mask, bool value) {
    grid::values[threadIdx.x] = value;
    grid::wait_for_lanes(mask);
    unsigned all = 0;
    for (unsigned lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) all |= static_cast<unsigned>(grid::values[threadIdx.x / 32 * 32 + lane]) << lane;
    grid::wait_for_lanes(mask);
    return all;
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
