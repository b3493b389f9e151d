// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// tensor_digest: the two 64-bit lanes of a digest, sums modulo 2^64 over a tensor's 32-bit words.
// Mirrors arithmetic/tensor_digest.py.
//
// Element codes, as the launcher passes them: 0 float32, 1 bfloat16, 2 float16, 3 float64; other data by width alone:
// 4 of 8 bits, 5 of 16 bits, 6 of 32 bits, 7 of 64 bits. A complex tensor goes in as its real view.
// Launch: any grid, any block that is a multiple of 32 threads; lanes: uint64 [2], zeroed by the caller.

#include "formats.cuh"

constexpr int FLOAT64 = 3;
constexpr int BYTES_1 = 4;
constexpr int BYTES_2 = 5;
constexpr int BYTES_4 = 6;
constexpr int BYTES_8 = 7;

// Processors differ in the bits of a NaN: the digest sees the canonical one.
__device__ uint32 canonical_bits(uint32 bits, Format format) {
    bool is_nan = (bits & (format.sign_bit() - 1)) > format.infinity_bits();
    return is_nan ? format.nan_bits() : bits;
}

__device__ uint64 canonical_float64_bits(uint64 bits) {
    bool is_nan = (bits & 0x7fffffffffffffffull) > 0x7ff0000000000000ull;
    return is_nan ? 0x7ff8000000000000ull : bits;
}

constexpr uint64 SPLITMIX_FIRST = 0xBF58476D1CE4E5B9ull;
constexpr uint64 SPLITMIX_SECOND = 0x94D049BB133111EBull;
constexpr uint64 HIGH_INDEX_FACTOR = 0xD6E8FEB86659FD93ull;
constexpr uint64 SECOND_LANE_FACTOR = 0x9E3779B97F4A7C15ull;
constexpr uint64 SECOND_LANE_MULTIPLIER = 0xD6E8FEB86659FD93ull;

// Each step is a bijection of 64 bits: one changed word changes both lanes.
__device__ __forceinline__ void mix_word(uint64 z, uint64& lane0, uint64& lane1) {
    z = (z ^ z >> 30) * SPLITMIX_FIRST;
    z = (z ^ z >> 27) * SPLITMIX_SECOND;
    z ^= z >> 31;
    uint64 y = z * SECOND_LANE_FACTOR;
    y = (y ^ y >> 32) * SECOND_LANE_MULTIPLIER;
    lane0 += z;
    lane1 += y ^ y >> 29;
}

// Adds the word `bits` at place j to both lanes.
__device__ __forceinline__ void mix(uint64 j, uint32 bits, uint64& lane0, uint64& lane1) {
    mix_word((j << 32 | bits) + (j >> 32) * HIGH_INDEX_FACTOR, lane0, lane1);
}

__device__ void mix_element(
    const void* data, int64 index, int64 position, int code, uint64& lane0, uint64& lane1
) {
    uint64 j = static_cast<uint64>(position);
    if (code == FLOAT64 || code == BYTES_8) {
        uint64 bits = static_cast<const uint64*>(data)[index];
        if (code == FLOAT64) bits = canonical_float64_bits(bits);
        mix(2 * j, static_cast<uint32>(bits), lane0, lane1);
        mix(2 * j + 1, static_cast<uint32>(bits >> 32), lane0, lane1);
        return;
    }
    uint32 bits = code == BYTES_1 ? static_cast<const unsigned char*>(data)[index]
        : code == BYTES_2 ? static_cast<const unsigned short*>(data)[index]
        : code == BYTES_4 ? static_cast<const uint32*>(data)[index]
        : canonical_bits(load_bits(data, index, code), format_of(code));
    mix(j, bits, lane0, lane1);
}

// The lanes of four words in a row, the first at place j. Requires: j a multiple of 4.
__device__ __forceinline__ void mix_four(uint64 j, uint4 four, int code, uint64& lane0, uint64& lane1) {
    uint64 first = (j << 32) + (j >> 32) * HIGH_INDEX_FACTOR;  // the four places share their upper halves
    uint32 words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int v = 0; v < 4; v++) {
        uint32 word = code == FLOAT32 ? canonical_bits(words[v], format_of(FLOAT32)) : words[v];
        mix_word(first + (static_cast<uint64>(v) << 32 | word), lane0, lane1);
    }
}

// lanes += the lanes of data[0 .. count), whose first element is number first_element of the tensor: shards add up.
extern "C" __global__ void tensor_digest(
    const void* data, int64 element_code, int64 count, int64 first_element, uint64* lanes
) {
    int code = static_cast<int>(element_code);
    uint64 lane0 = 0;
    uint64 lane1 = 0;
    int64 stride = static_cast<int64>(gridDim.x) * blockDim.x;
    int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64 done = 0;
    if ((code == FLOAT32 || code == BYTES_4) && (reinterpret_cast<uint64>(data) & 15) == 0 && first_element % 4 == 0) {
        const uint4* fours = static_cast<const uint4*>(data);
        for (int64 i = thread; i < count / 4; i += stride)
            mix_four(static_cast<uint64>(first_element + 4 * i), __ldcs(fours + i), code, lane0, lane1);
        done = count / 4 * 4;
    }
    for (int64 i = done + thread; i < count; i += stride) mix_element(data, i, first_element + i, code, lane0, lane1);
    for (int distance = 16; distance > 0; distance /= 2) {
        lane0 += __shfl_xor_sync(0xffffffffu, lane0, distance);
        lane1 += __shfl_xor_sync(0xffffffffu, lane1, distance);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(lanes, lane0);
        atomicAdd(lanes + 1, lane1);
    }
}
