// The exact sum of the products of two rows in a long accumulator, by a team of threads.
#pragma once

#include "long_accumulator.cuh"

// One row of an operand.
struct Terms {
    const char* first;
    int format;
    __device__ Terms(const void* data, int64 code, int64 offset)
        : first(static_cast<const char*>(data) + offset * (code == FLOAT32 ? 4 : 2)), format(static_cast<int>(code)) {}
    __device__ uint32 operator[](int64 k) const { return float32_bits(load_bits(first, k, format), format); }
};

__device__ __forceinline__ Term term_of(uint32 float32_pattern) { return decode(float32_pattern, format_of(FLOAT32)); }

// For blocks of BLOCK_THREADS threads; memory: int64 [NB * BLOCK_THREADS], shared.
template <int BLOCK_THREADS>
struct LongProduct {
    static constexpr int LANES = 32;
    static constexpr int WARPS = BLOCK_THREADS / LANES;
    static constexpr int AHEAD = 8;
    using Column = DigitColumn<BLOCK_THREADS>;

    int64* memory;

    __device__ __forceinline__ static void synchronise(int team) {
        if (team == LANES) __syncwarp();
        else __syncthreads();
    }

    // The sum over k of x[k] * w[k], and of one more term, as not yet carried digits, for the team's first thread to read.
    // Thread l takes k = l, l + team, ... into its own digits, then the digits of the team are added.
    // Requires: depth < 2^31 - 1; the whole team calls it, team = LANES or BLOCK_THREADS.
    __device__ __forceinline__ Column operator()(
        Terms x, Terms w, int64 depth, const void* bias, int64 bias_format, int64 column, int team
    ) const {
        int lane = threadIdx.x % LANES, thread = threadIdx.x % team;
        Column digits{memory + threadIdx.x};
        synchronise(team);  // the last result has been read
        for (int place = 0; place < NB; place++) digits[place] = 0;
        for (int64 first = thread; first < depth; first += AHEAD * team) {
            // All loads before the first use: they wait for memory together.
            uint32 a[AHEAD], b[AHEAD];
#pragma unroll
            for (int v = 0; v < AHEAD; v++) {
                int64 k = first + v * team;
                a[v] = k < depth ? x[k] : 0;
                b[v] = k < depth ? w[k] : 0;
            }
#pragma unroll 1
            for (int v = 0; v < AHEAD; v++) {
                add_product(digits, term_of(a[0]), term_of(b[0]));
#pragma unroll
                for (int u = 0; u + 1 < AHEAD; u++) a[u] = a[u + 1], b[u] = b[u + 1];
            }
        }
        if (bias != nullptr && thread == 0) add_term(digits, term_of(Terms(bias, bias_format, 0)[column]));
        __syncwarp();
        // Lane p adds place p of its warp, each lane starting at another bank.
        int64* warps_own = memory + threadIdx.x / LANES * LANES;
        int64 sum = 0;
        if (lane < NB)
            for (int l = 0; l < LANES; l++) sum += warps_own[lane * BLOCK_THREADS + (lane + l) % LANES];
        __syncwarp();
        if (lane < NB) warps_own[lane * BLOCK_THREADS] = sum;
        synchronise(team);
        if (team == LANES) return Column{warps_own};
        if (threadIdx.x < NB)
            for (int other = 1; other < WARPS; other++)
                memory[threadIdx.x * BLOCK_THREADS] += memory[threadIdx.x * BLOCK_THREADS + other * LANES];
        __syncthreads();
        return Column{memory};
    }
};

template <class Column>
__device__ __forceinline__ void copy_digits(int64* digits, Column from) {
    for (int place = 0; place < NB; place++) digits[place] = from[place];
}
