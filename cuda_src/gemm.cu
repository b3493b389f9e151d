// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// gemm: out[i, j] = round(sum over k of x[i, k] * w[j, k] + bias[j]), one rounding.
// The long-accumulator engine: exact on every input.
//
// One warp a result: lane l takes k = l, l + 32, ... into its own digits, then the digits of the lanes are added.
// Launch: blocks of 128 threads, ceil(rows * columns / 4) blocks. x: [rows, depth], w: [columns, depth], contiguous.

#include "long_accumulator.cuh"
#include "rounding.cuh"

constexpr int LANES = 32;

__device__ int64 result_index() {
    return (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) / LANES;
}

// digits := exact sum over k of x[row, k] * w[column, k], the same in every lane, not yet carried.
// Requires: depth < 2^31 - 1 (room for one more term, the bias).
__device__ void accumulate(
    int64* digits, const void* x, int x_format, const void* w, int w_format, int64 row, int64 column, int depth
) {
    for (int place = 0; place < NB; place++) digits[place] = 0;
    for (int64 k = threadIdx.x % LANES; k < depth; k += LANES) {
        add_product(digits, load_term(x, row * depth + k, x_format), load_term(w, column * depth + k, w_format));
    }
    add_digits_over_warp(digits);
}

// digits[i, j, :] = canonical digits of the exact sum. digits: int64 [rows, columns, 21].
extern "C" __global__ void gemm_partial(
    const void* x, int x_format, const void* w, int w_format, int64* digits, int64 rows, int64 columns, int depth
) {
    int64 result = result_index();
    if (result >= rows * columns) return;
    int64 sum[NB];
    accumulate(sum, x, x_format, w, w_format, result / columns, result % columns, depth);
    normalise(sum);
    if (threadIdx.x % LANES == 0) {
        for (int place = 0; place < NB; place++) digits[result * NB + place] = sum[place];
    }
}

// out[i, j] = the exact sum, with bias[j] as one more term of it, rounded once. bias: [columns] or null.
extern "C" __global__ void gemm(
    const void* x, int x_format, const void* w, int w_format, const void* bias, int bias_format,
    void* out, int out_format, int64 rows, int64 columns, int depth
) {
    int64 result = result_index();
    if (result >= rows * columns) return;
    int64 sum[NB];
    accumulate(sum, x, x_format, w, w_format, result / columns, result % columns, depth);
    if (bias != nullptr) add_term(sum, load_term(bias, result % columns, bias_format));
    if (threadIdx.x % LANES == 0) store_bits(out, result, out_format, finalize(sum, 1, format_of(out_format)));
}
