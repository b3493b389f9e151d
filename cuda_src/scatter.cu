// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// scatter: exact sums of the rows of source [n, columns] that share a group; order lists the rows group by group, those of
// group g at offsets[g] up to offsets[g + 1].
//
// Small groups: one thread sums a group's column. Groups of many rows are summed before, by scatter_large, into states of
// their own; place_of_group says where, or -1. Launch: THREADS threads.

#include "certified_rounding.cuh"
#include "exact_sum.cuh"
#include "rounding.cuh"

constexpr int THREADS = 128;
using Column = DigitColumn<THREADS>;

// The float32 patterns of TERMS rows of a column, from the k-th of the order on.
struct Rows {
    const void* source;
    const int64* order;
    int64 columns;
    int format;

    __device__ __forceinline__ uint32 bits(int64 k, int64 column) const {
        return float32_bits(load_bits(source, order[k] * columns + column, format), format);
    }

    __device__ __forceinline__ void load(int64 first, int64 last, int64 column, uint32 (&terms)[TERMS]) const {
#pragma unroll
        for (int v = 0; v < TERMS; v++) terms[v] = first + v < last ? bits(first + v, column) : 0;
    }
};

// state = the canonical sum of a group's column, by way of a zeroed column of digits.
__device__ __forceinline__ void sum_group(Column digits, const Rows& rows, int64 first, int64 last, int64 column, int64* state) {
    for (int place = 0; place < NB; place++) digits[place] = 0;
    for (int64 k = first; k < last; k += TERMS) {
        uint32 terms[TERMS];
        rows.load(k, last, column, terms);
        add_terms(digits, terms);
    }
    for (int place = 0; place < NB; place++) state[place] = digits[place];
    normalise(state);
}

// states[l, c] += the sum of group large[l]. Grid (large groups * ceil(columns / THREADS), chunks); states zero at entry.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_large(
    const void* source, int64 format, int64 columns, const int64* order, const int64* offsets, const int64* large,
    int64* states
) {
    __shared__ int64 memory[NB * THREADS];
    Column digits{memory + threadIdx.x};
    int64 blocks_a_row = (columns + THREADS - 1) / THREADS;
    int64 number = blockIdx.x / blocks_a_row, column = blockIdx.x % blocks_a_row * THREADS + threadIdx.x;
    if (column >= columns) return;
    Rows rows{source, order, columns, static_cast<int>(format)};
    int64 group = large[number], last = offsets[group + 1];
    for (int place = 0; place < NB; place++) digits[place] = 0;
    for (int64 k = offsets[group] + blockIdx.y * int64(TERMS); k < last; k += gridDim.y * int64(TERMS)) {
        uint32 terms[TERMS];
        rows.load(k, last, column, terms);
        add_terms(digits, terms);
    }
    for (int place = 0; place < NB; place++)
        if (digits[place]) add_digit_atomically(states + (number * columns + column) * NB + place, digits[place]);
}

// digits[g, c] += the canonical sum of group g. digits: int64 [groups, columns, NB].
extern "C" __global__ void __launch_bounds__(THREADS) scatter_add(
    const void* source, int64 format, int64 columns, const int64* order, const int64* offsets, const int64* place_of_group,
    const int64* large_states, int64* digits, int64 items
) {
    __shared__ int64 memory[NB * THREADS];
    int64 item = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= items) return;
    int64 group = item / columns, column = item % columns, first = offsets[group], last = offsets[group + 1];
    if (first == last) return;
    int64 state[NB];
    int64 large = place_of_group[group];
    if (large >= 0) {
        for (int place = 0; place < NB; place++) state[place] = large_states[(large * columns + column) * NB + place];
    } else {
        sum_group({memory + threadIdx.x}, {source, order, columns, static_cast<int>(format)}, first, last, column, state);
    }
    for (int place = 0; place < NB; place++) digits[item * NB + place] += state[place];
}

// out[g, c] = more[g, c] + the sum of group g, rounded once to out_format; more: float32, or null.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_round(
    const void* source, int64 format, int64 columns, const int64* order, const int64* offsets, const int64* place_of_group,
    const int64* large_states, const void* more, int64 more_format, void* out, int64 out_format, int64 items
) {
    __shared__ int64 memory[NB * THREADS];
    int64 item = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (item >= items) return;
    int64 group = item / columns, column = item % columns, first = offsets[group], last = offsets[group + 1];
    int out_code = static_cast<int>(out_format), more_code = static_cast<int>(more_format);
    Rows rows{source, order, columns, static_cast<int>(format)};
    uint32 extra = more ? float32_bits(load_bits(more, item, more_code), more_code) : 0;
    int64 terms = last - first;
    if (out_code == FLOAT32 && terms + (more != nullptr) <= 1) {  // a sum of one term: no negative zero, one NaN
        uint32 bits = terms ? rows.bits(first, column) : extra;
        uint32 magnitude = bits & 0x7fffffff;
        store_bits(out, item, FLOAT32, magnitude > FLOAT32_INFINITY ? 0x7fc00000 : magnitude ? bits : 0);
        return;
    }
    if (terms < TERMS) {
        uint32 few[TERMS];
        rows.load(first, last, column, few);
        if (more) few[TERMS - 1] = extra;
        double sum;
        if (sum_exactly(few, sum)) {
            uint32 bits = 0;
            if (out_code == FLOAT32) {
                bits = __float_as_uint(__double2float_rn(sum + 0.0));  // no negative zero
            } else if (sum != 0.0) {
                uint64 pattern = static_cast<uint64>(__double_as_longlong(sum));  // a normal number
                __int128 significand = static_cast<int64>((pattern & ((1ull << 52) - 1)) | 1ull << 52);
                int exponent = static_cast<int>(pattern >> 52 & 0x7ff) - 1075;
                round_within(sum < 0.0 ? -significand : significand, exponent, 0.0f, format_of(out_code), bits);
            }
            store_bits(out, item, out_code, bits);
            return;
        }
    }
    int64 state[NB];
    int64 large = terms ? place_of_group[group] : -1;
    if (large >= 0) {
        for (int place = 0; place < NB; place++) state[place] = large_states[(large * columns + column) * NB + place];
    } else {
        sum_group({memory + threadIdx.x}, rows, first, last, column, state);
    }
    if (more) add_term(state, decode(extra, format_of(FLOAT32)));
    store_bits(out, item, out_code, finalize(state, 1, format_of(out_code)));
}
