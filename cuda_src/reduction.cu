// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// sum: digits[o, i, :] += exact sum over l of x[o, l, i] (or of x[o, l, i]^2), x: [outer, length, inner] contiguous.
//
// Launch: grid (outer * inner, chunks), any block that is a multiple of 32 threads. The chunks of one sum meet in the
// digits through integer atomics, so neither their number nor their order can be seen. digits_normalise then carries.

#include "long_accumulator.cuh"

constexpr int LANES = 32;

// Requires: length < 2^31; digits canonical (zero, say) at entry; `shared` holds 21 places.
__device__ void add_sum(
    const void* x, int x_format, int64* digits, int64 length, int64 inner, bool squares, int64* shared
) {
    int64 sum[NB];
    for (int place = 0; place < NB; place++) sum[place] = 0;
    for (int place = threadIdx.x; place < NB; place += blockDim.x) shared[place] = 0;
    __syncthreads();

    int64 first = blockIdx.x / inner * length * inner + blockIdx.x % inner;
    int64 stride = static_cast<int64>(gridDim.y) * blockDim.x;
    for (int64 l = static_cast<int64>(blockIdx.y) * blockDim.x + threadIdx.x; l < length; l += stride) {
        Term term = load_term(x, first + l * inner, x_format);
        if (squares) add_product(sum, term, term);
        else add_term(sum, term);
    }
    add_digits_over_warp(sum);
    if (threadIdx.x % LANES == 0) {
        for (int place = 0; place < NB; place++) add_digit_atomically(shared + place, sum[place]);
    }
    __syncthreads();
    for (int place = threadIdx.x; place < NB; place += blockDim.x) {
        add_digit_atomically(digits + static_cast<int64>(blockIdx.x) * NB + place, shared[place]);
    }
}

extern "C" __global__ void sum_partial(const void* x, int x_format, int64* digits, int64 length, int64 inner) {
    __shared__ int64 shared[NB];
    add_sum(x, x_format, digits, length, inner, false, shared);
}

extern "C" __global__ void sum_of_squares_partial(
    const void* x, int x_format, int64* digits, int64 length, int64 inner
) {
    __shared__ int64 shared[NB];
    add_sum(x, x_format, digits, length, inner, true, shared);
}
