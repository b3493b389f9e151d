// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// sum: digits[o, i, :] += exact sum over l of x[o, l, i] (or of x[o, l, i]^2), x: [outer, length, inner] contiguous.
//
// Launch: THREADS threads; grid (outer * ceil(inner / THREADS), chunks). The chunks of one sum meet in the digits through
// integer atomics, so neither their number nor their order can be seen. digits_normalise then carries.
//
// Sixteen terms at a time are added in float64, exactly: those within 2^24 of the largest, which share 53 bits. That sum,
// and each term that is smaller, goes into the thread's digits.

#include "long_accumulator.cuh"

constexpr int THREADS = 256;
constexpr int TERMS = 16;
using Column = DigitColumn<THREADS>;

// The pattern of a float32 with the same value.
__device__ __forceinline__ uint32 float32_bits(uint32 bits, int format) {
    if (format == FLOAT32) return bits;
    if (format == BFLOAT16) return bits << 16;
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return __float_as_uint(value);
}

// Out of line: few terms come here, and it is inlined sixteen times otherwise.
__device__ __noinline__ void add_alone(Column digits, uint32 bits) {
    add_term(digits, decode(bits, format_of(FLOAT32)));
}

// digits += sum of the floats. Each digit moves by less than 2^37.
__device__ __forceinline__ void add_terms(Column digits, const uint32 (&bits)[TERMS]) {
    constexpr uint32 INFINITY_BITS = 0x7f800000;
    // The last place of a float within 2^24 of the largest lies 47 bits or less below the largest's exponent, and the sum
    // of sixteen reaches 5 bits above it.
    constexpr uint32 WINDOW = 24u << 23;
    uint32 top = 0;
#pragma unroll
    for (int v = 0; v < TERMS; v++) top = max(top, bits[v] & INFINITY_BITS);
    bool special = top == INFINITY_BITS;
    uint32 least = special ? INFINITY_BITS + 1 : top > WINDOW ? top - WINDOW : 0;
    double sum = 0.0;
    uint32 outside = 0;
#pragma unroll
    for (int v = 0; v < TERMS; v++) {
        bool inside = (bits[v] & INFINITY_BITS) >= least;
        sum += static_cast<double>(__uint_as_float(inside ? bits[v] : 0));
        outside |= static_cast<uint32>(!inside && bits[v] << 1 != 0) << v;
    }
    if (sum != 0.0) {
        uint64 pattern = static_cast<uint64>(__double_as_longlong(sum));  // a normal number
        uint64 significand = (pattern & ((1ull << 52) - 1)) | 1ull << 52;
        add_integer(digits, significand, static_cast<int>(pattern >> 52 & 0x7ff) - 1075, sum < 0.0);
    }
    if (outside) {
#pragma unroll
        for (int v = 0; v < TERMS; v++)
            if (outside >> v & 1) add_alone(digits, bits[v]);
    }
}

__device__ __noinline__ void add_square(Column digits, uint32 bits) {
    Term term = decode(bits, format_of(FLOAT32));
    add_product(digits, term, term);
}

__device__ __forceinline__ void add_squares(Column digits, const uint32 (&bits)[TERMS]) {
#pragma unroll
    for (int v = 0; v < TERMS; v++)
        if (bits[v] << 1) add_square(digits, bits[v]);
}

template <bool SQUARES>
__device__ __forceinline__ void add(Column digits, const uint32 (&bits)[TERMS]) {
    if constexpr (SQUARES) add_squares(digits, bits);
    else add_terms(digits, bits);
}

// One sum over contiguous terms, by all threads of the blocks that share it.
template <bool SQUARES>
__device__ __forceinline__ void add_row(Column digits, const char* row, int format, int64 length) {
    bool aligned = (reinterpret_cast<uint64>(row) & 15) == 0;
    int64 stride = static_cast<int64>(gridDim.y) * THREADS;
    int64 groups = (length + TERMS - 1) / TERMS;
    uint32 bits[TERMS];
    for (int64 group = static_cast<int64>(blockIdx.y) * THREADS + threadIdx.x; group < groups; group += stride) {
        int64 first = group * TERMS;
        if (aligned && first + TERMS <= length) {
            // Which terms meet in a thread does not matter, so the threads of a warp take neighbouring 16 bytes where
            // they all can.
            int64 of_warp = group - threadIdx.x % 32;
            bool whole_warp = (of_warp + 32) * TERMS <= length;
            const uint4* from = reinterpret_cast<const uint4*>(row);
            if (format == FLOAT32) {
#pragma unroll
                for (int q = 0; q < 4; q++) {
                    uint4 four = __ldcs(from + (whole_warp ? of_warp * 4 + q * 32 + threadIdx.x % 32 : group * 4 + q));
                    bits[4 * q] = four.x, bits[4 * q + 1] = four.y, bits[4 * q + 2] = four.z, bits[4 * q + 3] = four.w;
                }
            } else {
#pragma unroll
                for (int q = 0; q < 2; q++) {
                    uint4 eight = __ldcs(from + (whole_warp ? of_warp * 2 + q * 32 + threadIdx.x % 32 : group * 2 + q));
                    uint32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
                    for (int v = 0; v < 8; v++)
                        bits[8 * q + v] = float32_bits(words[v / 2] >> (v % 2 * 16) & 0xffff, format);
                }
            }
        } else {
#pragma unroll
            for (int v = 0; v < TERMS; v++)
                bits[v] = first + v < length ? float32_bits(load_bits(row, first + v, format), format) : 0;
        }
        add<SQUARES>(digits, bits);
    }
}

// A sum a column: neighbouring threads take neighbouring columns; `lanes` threads share one.
template <bool SQUARES>
__device__ __forceinline__ void add_column(
    Column digits, const char* column, int format, int64 length, int64 inner, int lanes, int lane
) {
    uint32 bits[TERMS];
    int64 stride = static_cast<int64>(gridDim.y) * lanes * TERMS;
    for (int64 first = (static_cast<int64>(blockIdx.y) * lanes + lane) * TERMS; first < length; first += stride) {
#pragma unroll
        for (int v = 0; v < TERMS; v++)
            bits[v] = first + v < length ? float32_bits(load_bits(column, (first + v) * inner, format), format) : 0;
        add<SQUARES>(digits, bits);
    }
}

// Requires: length < 2^31; digits canonical (zero, say) at entry.
template <bool SQUARES>
__device__ __forceinline__ void add_sum(const void* x, int format, int64* digits, int64 length, int64 inner) {
    __shared__ int64 memory[NB * THREADS];
    Column own{memory + threadIdx.x};
    for (int place = 0; place < NB; place++) own[place] = 0;
    int64 element_bytes = format == FLOAT32 ? 4 : 2;
    const char* data = static_cast<const char*>(x);
    if (inner == 1) {
        add_row<SQUARES>(own, data + blockIdx.x * length * element_bytes, format, length);
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
    int64 blocks_a_row = (inner + THREADS - 1) / THREADS;
    int64 outer = blockIdx.x / blocks_a_row;
    int width = static_cast<int>(min(inner, static_cast<int64>(THREADS)));
    int lanes = THREADS / width, lane = threadIdx.x / width;
    int64 column = blockIdx.x % blocks_a_row * THREADS + threadIdx.x % width;
    if (lane >= lanes || column >= inner) return;
    add_column<SQUARES>(own, data + (outer * length * inner + column) * element_bytes, format, length, inner, lanes, lane);
    for (int place = 0; place < NB; place++)
        if (own[place]) add_digit_atomically(digits + (outer * inner + column) * NB + place, own[place]);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_partial(
    const void* x, int64 x_format, int64* digits, int64 length, int64 inner
) {
    add_sum<false>(x, static_cast<int>(x_format), digits, length, inner);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares_partial(
    const void* x, int64 x_format, int64* digits, int64 length, int64 inner
) {
    add_sum<true>(x, static_cast<int>(x_format), digits, length, inner);
}
