// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// tensor_digest: the two 64-bit lanes of a digest, sums modulo 2^64 over a tensor's 32-bit words.
//
// Launch: any grid, blocks of 32, 64, ... or 256 threads; lanes: uint64 [2], zeroed by the caller.

#include "tensor_digest.cuh"

// Blocks take parts of FOURS fours a thread, one after another: many more than run at once, so that none waits for the last.
template <int CODE>
__device__ __forceinline__ void digest_fours(
    const void* data, int64 count, int64 first, uint64& lane0, uint64& lane1
) {
    Lanes lanes;
    int64 fours = count / 4, part = static_cast<int64>(blockDim.x) * FOURS;
    for (int64 start = blockIdx.x * part; start < fours; start += gridDim.x * part) {
        digest_part<CODE>(data, start, min(start + part, fours), first, blockDim.x, lanes);
    }
    lane0 += lanes.first;
    lane1 += lanes.second;
}

// lanes += the lanes of data[0 .. count), whose first element is number first_element of the tensor: shards add up.
extern "C" __global__ void __launch_bounds__(THREADS, 5) tensor_digest(
    const void* data, int64 element_code, int64 count, int64 first_element, uint64* lanes
) {
    int code = static_cast<int>(element_code);
    uint64 lane0 = 0;
    uint64 lane1 = 0;
    int64 stride = static_cast<int64>(gridDim.x) * blockDim.x;
    int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64 done = 0;
    if (code != FLOAT64 && code != BYTES_8 && (reinterpret_cast<uint64>(data) & 15) == 0 && first_element % 4 == 0) {
        int64 below = max((1ll << 32) - first_element, 0ll);
        done = min(count, below) / 4 * 4;
        if (code == FLOAT32) digest_fours<FLOAT32>(data, done, first_element, lane0, lane1);
        else if (code == BYTES_4) digest_fours<BYTES_4>(data, done, first_element, lane0, lane1);
        else if (code == BFLOAT16) digest_fours<BFLOAT16>(data, done, first_element, lane0, lane1);
        else if (code == FLOAT16) digest_fours<FLOAT16>(data, done, first_element, lane0, lane1);
        else if (code == BYTES_2) digest_fours<BYTES_2>(data, done, first_element, lane0, lane1);
        else digest_fours<BYTES_1>(data, done, first_element, lane0, lane1);
    }
    for (int64 i = done + thread; i < count; i += stride) mix_element(data, i, first_element + i, code, lane0, lane1);
    add_lanes_of_block(lane0, lane1, lanes);
}
