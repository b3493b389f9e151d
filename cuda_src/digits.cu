// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// digits: carry, add and round digit arrays. digits: int64 [count, 21]. Launch: one thread an item.

#include "long_accumulator.cuh"
#include "rounding.cuh"

__device__ int64 item_index() { return static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// In place: canonical digits of the same value.
// Requires: |digit 17| < 2^62.
extern "C" __global__ void digits_normalise(int64* digits, int64 count) {
    if (item_index() < count) normalise(digits + item_index() * NB);
}

// accumulator += addend, place by place: exact, and all that combining states needs. count: places, 21 a state.
// Requires: no place leaves [-2^63, 2^63); sums of 2^31 canonical states do not.
extern "C" __global__ void digits_add(int64* accumulator, const int64* addend, int64 count) {
    if (item_index() < count) accumulator[item_index()] += addend[item_index()];
}

// out[i] = value of digits[i, :] / denominator, one rounding, to the format of out.
// Requires: 0 <= denominator < 2^63; digits in any state.
extern "C" __global__ void digits_finalize(
    const int64* digits, int64 denominator, void* out, int64 out_format, int64 count
) {
    if (item_index() >= count) return;
    int code = static_cast<int>(out_format);
    uint32 bits = finalize(digits + item_index() * NB, denominator, format_of(code));
    store_bits(out, item_index(), code, bits);
}
