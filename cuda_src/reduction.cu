// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// sum: digits[o, i, :] += exact sum over l of x[o, l, i] (or of its square, or of x[o, l, i] * w[o, l, i]); x, w:
// [outer, length, inner] contiguous.
//
// A cubin is for x of format X_FORMAT and w of W_FORMAT. Launch: THREADS threads; grid (outer * ceil(inner / THREADS), chunks). The chunks of one sum meet in the digits through
// integer atomics, so neither their number nor their order can be seen. digits_normalise then carries.

#ifndef X_FORMAT
#define X_FORMAT 0
#endif
#ifndef W_FORMAT
#define W_FORMAT X_FORMAT
#endif

#include "exact_sum.cuh"

constexpr int THREADS = 256;
using Column = DigitColumn<THREADS>;

enum SumKind { SUM, SQUARES, PRODUCTS };

template <int FORMAT>
struct Operand {
    static constexpr int BYTES = FORMAT == FLOAT32 ? 4 : 2;
    const char* data;
    __device__ __forceinline__ Operand(const void* at) : data(static_cast<const char*>(at)) {}
    __device__ __forceinline__ const char* at(int64 index) const { return data + index * BYTES; }
    __device__ __forceinline__ uint32 bits(int64 index) const { return float32_bits(load_bits(data, index, FORMAT), FORMAT); }

    // The float32 patterns of 16 terms of a contiguous row that begins at `row`: of one thread, or of a warp that shares
    // 512 where they all exist. Which terms meet in a thread does not matter, so the threads of a warp then take
    // neighbouring words; the same ones of every format.
    __device__ __forceinline__ void load_row(int64 row, int64 group, int64 length, bool aligned, uint32 (&terms)[TERMS]) const {
        int64 of_warp = group - threadIdx.x % 32, first = group * TERMS;
        if (aligned && (of_warp + 32) * TERMS <= length) {
#pragma unroll
            for (int q = 0; q < 4; q++) {
                int64 four = of_warp * 4 + q * 32 + threadIdx.x % 32;
                if constexpr (FORMAT == FLOAT32) {
                    uint4 words = __ldcs(reinterpret_cast<const uint4*>(at(row)) + four);
                    terms[4 * q] = words.x, terms[4 * q + 1] = words.y, terms[4 * q + 2] = words.z, terms[4 * q + 3] = words.w;
                } else {
                    uint2 pair = __ldcs(reinterpret_cast<const uint2*>(at(row)) + four);
                    uint32 words[2] = {pair.x, pair.y};
#pragma unroll
                    for (int v = 0; v < 4; v++) terms[4 * q + v] = float32_bits(words[v / 2] >> (v % 2 * 16) & 0xffff, FORMAT);
                }
            }
        } else {
#pragma unroll
            for (int v = 0; v < TERMS; v++) terms[v] = first + v < length ? bits(row + first + v) : 0;
        }
    }

    // 16 terms `inner` apart.
    __device__ __forceinline__ void load_column(int64 from, int64 first, int64 length, int64 inner, uint32 (&terms)[TERMS]) const {
#pragma unroll
        for (int v = 0; v < TERMS; v++) terms[v] = first + v < length ? bits(from + (first + v) * inner) : 0;
    }
};

using X = Operand<X_FORMAT>;
using W = Operand<W_FORMAT>;

// What a thread adds up: terms, or products. `finish` brings the rest into the digits.
template <int KIND>
struct Adder {
    Column digits;
    PendingTerms terms;
    PendingProducts products;

    __device__ __forceinline__ void add(const uint32 (&of_x)[TERMS], const uint32 (&of_w)[TERMS]) {
        if constexpr (KIND != SUM) products.add(digits, of_x, of_w);
        else if constexpr (X_FORMAT == BFLOAT16) terms.add_bfloat16(digits, of_x);
        else if constexpr (X_FORMAT == FLOAT16) terms.add_float16(digits, of_x);
        else add_terms(digits, of_x);
    }

    __device__ __forceinline__ void finish() {
        if constexpr (KIND == SUM) terms.flush(digits);
        else products.flush(digits);
    }
};

// Requires: length < 2^31; digits canonical (zero, say) at entry.
template <int KIND>
__device__ __forceinline__ void add_sum(X x, W w, int64* digits, int64 length, int64 inner) {
    __shared__ int64 memory[NB * THREADS];
    Column own{memory + threadIdx.x};
    for (int place = 0; place < NB; place++) own[place] = 0;
    Adder<KIND> adder{own};
    if (inner == 1) {  // one sum over contiguous terms, by all threads of the blocks that share it
        int64 row = blockIdx.x * length;
        uint64 addresses = reinterpret_cast<uint64>(x.at(row)) | reinterpret_cast<uint64>(w.at(row));
        bool aligned = (addresses & 15) == 0;
        int64 groups = (length + TERMS - 1) / TERMS, stride = static_cast<int64>(gridDim.y) * THREADS;
        for (int64 group = static_cast<int64>(blockIdx.y) * THREADS + threadIdx.x; group < groups; group += stride) {
            uint32 of_x[TERMS], of_w[TERMS];
            x.load_row(row, group, length, aligned, of_x);
            if constexpr (KIND == PRODUCTS) w.load_row(row, group, length, aligned, of_w);
            adder.add(of_x, KIND == PRODUCTS ? of_w : of_x);
        }
        adder.finish();
        __syncthreads();
        // A warp a place.
        for (int place = threadIdx.x / 32; place < NB; place += THREADS / 32) {
            int64 sum = 0;
            for (int t = threadIdx.x % 32; t < THREADS; t += 32) sum += memory[place * THREADS + t];
            for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            if (threadIdx.x % 32 == 0 && sum) add_digit_atomically(digits + blockIdx.x * int64(NB) + place, sum);
        }
        return;
    }
    // A sum a column: neighbouring threads take neighbouring columns; `lanes` threads share one.
    int64 blocks_a_row = (inner + THREADS - 1) / THREADS;
    int64 outer = blockIdx.x / blocks_a_row;
    int width = static_cast<int>(min(inner, static_cast<int64>(THREADS)));
    int lanes = THREADS / width, lane = threadIdx.x / width;
    int64 column = blockIdx.x % blocks_a_row * THREADS + threadIdx.x % width;
    if (lane >= lanes || column >= inner) return;
    int64 stride = static_cast<int64>(gridDim.y) * lanes * TERMS;
    int64 from = outer * length * inner + column;
    for (int64 first = (static_cast<int64>(blockIdx.y) * lanes + lane) * TERMS; first < length; first += stride) {
        uint32 of_x[TERMS], of_w[TERMS];
        x.load_column(from, first, length, inner, of_x);
        if constexpr (KIND == PRODUCTS) w.load_column(from, first, length, inner, of_w);
        adder.add(of_x, KIND == PRODUCTS ? of_w : of_x);
    }
    adder.finish();
    for (int place = 0; place < NB; place++)
        if (own[place]) add_digit_atomically(digits + (outer * inner + column) * NB + place, own[place]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) sum_partial(
    const void* x, const void* w, int64* digits, int64 length, int64 inner
) {
    add_sum<SUM>(x, w, digits, length, inner);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) sum_of_squares_partial(
    const void* x, const void* w, int64* digits, int64 length, int64 inner
) {
    add_sum<SQUARES>(x, w, digits, length, inner);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_products_partial(
    const void* x, const void* w, int64* digits, int64 length, int64 inner
) {
    add_sum<PRODUCTS>(x, w, digits, length, inner);
}
