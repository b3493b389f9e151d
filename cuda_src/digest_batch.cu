// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// digest_batch: the lanes of many tensors, or of many ranks' shares of tensors, in one launch.
//
// table: int64 [tensors][7]: address, element code, count of elements, first, run, stride, blocks of this tensor and of all
// before it. The elements lie in runs of `run`; element e of the share is number first + e / run * stride + e % run of the
// tensor. A block digests FOURS fours a thread of one tensor.
// Launch: as many blocks as the table says in its last row, 256 threads each; lanes: uint64 [tensors][2], zeroed.

#include "tensor_digest.cuh"

constexpr int ROW = 7;
constexpr int64 BLOCK_ELEMENTS = 4ll * FOURS * THREADS;

// The tensor that block number `block` works on: the first whose last column exceeds it.
__device__ __forceinline__ int64 tensor_of_block(const int64* table, int64 tensors, int64 block) {
    int64 low = 0, high = tensors - 1;
    while (low < high) {
        int64 middle = (low + high) / 2;
        if (table[middle * ROW + 6] > block) high = middle;
        else low = middle + 1;
    }
    return low;
}

template <int CODE>
__device__ __forceinline__ void digest_block(
    const void* data, int64 start, int64 stop, int64 first, int64 run, int64 stride, bool whole, Lanes& lanes
) {
    if (whole) digest_part<CODE>(data, start / 4, stop / 4, first, THREADS, lanes);
    else digest_part_of_runs<CODE>(data, start / 4, stop / 4, first, run, stride, lanes);
}

extern "C" __global__ void __launch_bounds__(THREADS, 5) digest_batch(const int64* table, int64 tensors, uint64* lanes) {
    int64 tensor = tensor_of_block(table, tensors, blockIdx.x);
    const int64* row = table + tensor * ROW;
    const void* data = reinterpret_cast<const void*>(row[0]);
    int code = static_cast<int>(row[1]);
    int64 count = row[2], first = row[3], run = row[4], stride = row[5];
    int64 start = (blockIdx.x - (tensor > 0 ? row[6 - ROW] : 0)) * BLOCK_ELEMENTS, stop = min(start + BLOCK_ELEMENTS, count);
    bool whole = run >= count;
    int64 end = whole ? first + count : first + (count / run) * stride + run;
    Lanes sums;
    int64 done = start;
    if (code != FLOAT64 && code != BYTES_8 && (row[0] & 15) == 0 && end <= 1ll << 32 && first % 4 == 0
        && (whole || (run % 4 == 0 && stride % 4 == 0))) {
        done = stop / 4 * 4;
        if (code == FLOAT32) digest_block<FLOAT32>(data, start, done, first, run, stride, whole, sums);
        else if (code == BYTES_4) digest_block<BYTES_4>(data, start, done, first, run, stride, whole, sums);
        else if (code == BFLOAT16) digest_block<BFLOAT16>(data, start, done, first, run, stride, whole, sums);
        else if (code == FLOAT16) digest_block<FLOAT16>(data, start, done, first, run, stride, whole, sums);
        else if (code == BYTES_2) digest_block<BYTES_2>(data, start, done, first, run, stride, whole, sums);
        else digest_block<BYTES_1>(data, start, done, first, run, stride, whole, sums);
    }
    for (int64 e = done + threadIdx.x; e < stop; e += blockDim.x) {
        mix_element(data, e, whole ? first + e : first + e / run * stride + e % run, code, sums.first, sums.second);
    }
    add_lanes_of_block(sums.first, sums.second, lanes + 2 * tensor);
}
