// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// sum: digits[o, i, :] += exact sum over l of x[o, l, i] (or of its square, or of x[o, l, i] * w[o, l, i]); x, w:
// [outer, length, inner] contiguous.
//
// Launch: THREADS threads; grid (outer * ceil(inner / THREADS), chunks). The chunks of one sum meet in the digits through
// integer atomics, so neither their number nor their order can be seen. digits_normalise then carries.

#include "exact_sum.cuh"

constexpr int THREADS = 256;
using Column = DigitColumn<THREADS>;

// The float32 patterns of 16 terms of a contiguous row: of one thread, or of a warp that shares 512 where they all exist.
// Which terms meet in a thread does not matter, so the threads of a warp then take neighbouring 16 bytes.
__device__ __forceinline__ void load_terms(
    const char* row, int format, int64 group, int64 length, bool aligned, uint32 (&bits)[TERMS]
) {
    int64 of_warp = group - threadIdx.x % 32, first = group * TERMS;
    bool whole_warp = (of_warp + 32) * TERMS <= length;
    const uint4* from = reinterpret_cast<const uint4*>(row);
    if (aligned && whole_warp && format == FLOAT32) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint4 four = __ldcs(from + of_warp * 4 + q * 32 + threadIdx.x % 32);
            bits[4 * q] = four.x, bits[4 * q + 1] = four.y, bits[4 * q + 2] = four.z, bits[4 * q + 3] = four.w;
        }
    } else if (aligned && whole_warp) {
#pragma unroll
        for (int q = 0; q < 4; q++) {  // 8 bytes, so that a thread holds the same terms as of a float32 row
            uint2 half = __ldcs(reinterpret_cast<const uint2*>(row) + of_warp * 4 + q * 32 + threadIdx.x % 32);
            uint32 words[2] = {half.x, half.y};
#pragma unroll
            for (int v = 0; v < 4; v++) bits[4 * q + v] = float32_bits(words[v / 2] >> (v % 2 * 16) & 0xffff, format);
        }
    } else {
#pragma unroll
        for (int v = 0; v < TERMS; v++)
            bits[v] = first + v < length ? float32_bits(load_bits(row, first + v, format), format) : 0;
    }
}

enum SumKind { SUM, SQUARES, PRODUCTS };

struct Operand {
    const char* data;
    int format;
    __device__ Operand(const void* at, int64 code) : data(static_cast<const char*>(at)), format(static_cast<int>(code)) {}
    __device__ const char* element(int64 index) const { return data + index * (format == FLOAT32 ? 4 : 2); }
};

// What a thread adds up: terms, or products. `finish` brings the rest into the digits.
template <int KIND>
struct Adder {
    Column digits;
    PendingTerms terms;
    PendingProducts products;

    template <class Load>
    __device__ __forceinline__ void add(Operand x, Operand w, Load load) {
        uint32 of_x[TERMS];
        load(x, of_x);
        if constexpr (KIND == SUM) {
            if (x.format == BFLOAT16) terms.add_bfloat16(digits, of_x);
            else if (x.format == FLOAT16) terms.add_float16(digits, of_x);
            else add_terms(digits, of_x);
        } else if constexpr (KIND == SQUARES) {
            products.add(digits, of_x, of_x);
        } else {
            uint32 of_w[TERMS];
            load(w, of_w);
            products.add(digits, of_x, of_w);
        }
    }

    __device__ __forceinline__ void finish() {
        if constexpr (KIND == SUM) terms.flush(digits);
        else products.flush(digits);
    }
};

// Requires: length < 2^31; digits canonical (zero, say) at entry.
template <int KIND>
__device__ __forceinline__ void add_sum(Operand x, Operand w, int64* digits, int64 length, int64 inner) {
    __shared__ int64 memory[NB * THREADS];
    Column own{memory + threadIdx.x};
    for (int place = 0; place < NB; place++) own[place] = 0;
    Adder<KIND> adder{own};
    if (inner == 1) {  // one sum over contiguous terms, by all threads of the blocks that share it
        int64 row = blockIdx.x * length;
        uint64 addresses = reinterpret_cast<uint64>(x.element(row)) | reinterpret_cast<uint64>(w.element(row));
        bool aligned = (addresses & 15) == 0;
        int64 groups = (length + TERMS - 1) / TERMS, stride = static_cast<int64>(gridDim.y) * THREADS;
        for (int64 group = static_cast<int64>(blockIdx.y) * THREADS + threadIdx.x; group < groups; group += stride)
            adder.add(x, w, [&](Operand from, uint32 (&bits)[TERMS]) {
                load_terms(from.element(row), from.format, group, length, aligned, bits);
            });
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
    for (int64 first = (static_cast<int64>(blockIdx.y) * lanes + lane) * TERMS; first < length; first += stride)
        adder.add(x, w, [&](Operand from, uint32 (&bits)[TERMS]) {
            const char* at = from.element(outer * length * inner + column);
#pragma unroll
            for (int v = 0; v < TERMS; v++)
                bits[v] = first + v < length ? float32_bits(load_bits(at, (first + v) * inner, from.format), from.format) : 0;
        });
    adder.finish();
    for (int place = 0; place < NB; place++)
        if (own[place]) add_digit_atomically(digits + (outer * inner + column) * NB + place, own[place]);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_partial(
    const void* x, int64 x_format, const void* w, int64 w_format, int64* digits, int64 length, int64 inner
) {
    add_sum<SUM>({x, x_format}, {w, w_format}, digits, length, inner);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_squares_partial(
    const void* x, int64 x_format, const void* w, int64 w_format, int64* digits, int64 length, int64 inner
) {
    add_sum<SQUARES>({x, x_format}, {w, w_format}, digits, length, inner);
}

extern "C" __global__ void __launch_bounds__(THREADS) sum_of_products_partial(
    const void* x, int64 x_format, const void* w, int64 w_format, int64* digits, int64 length, int64 inner
) {
    add_sum<PRODUCTS>({x, x_format}, {w, w_format}, digits, length, inner);
}
