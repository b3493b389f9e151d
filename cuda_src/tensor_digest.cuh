// What the kernels that digest tensors share: the mix of a word, and of many words at once. Mirrors
// arithmetic/tensor_digest.py.
//
// Element codes, as the launchers pass them: 0 float32, 1 bfloat16, 2 float16, 3 float64; other data by width alone:
// 4 of 8 bits, 5 of 16 bits, 6 of 32 bits, 7 of 64 bits. A complex tensor goes in as its real view.

#pragma once

#include "formats.cuh"

constexpr int THREADS = 256;
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

// For the four words in a row from place j on, a multiple of 4: mix() with fewer instructions.
// With z = high:low before the first step, high = j + v: z ^ z >> 30 has the upper half high ^ high >> 30 = j + (v ^ j >> 30),
// and the lower half low ^ low >> 30 ^ (j << 2) + 4 v. So what the upper half adds to the first product is a sum of
// j FIRST and one of four numbers that only change with j >> 30: they are `offsets`.
struct Lanes {
    uint64 first = 0, second = 0;

    // high:low * factor, in three instructions.
    template <uint64 FACTOR>
    __device__ __forceinline__ static uint64 times(uint32 low, uint32 high) {
        uint64 product;
        asm("{ .reg .u32 l, h; mul.wide.u32 %0, %1, %3; mov.b64 {l, h}, %0; mad.lo.u32 h, %1, %4, h; "
            "mad.lo.u32 h, %2, %3, h; mov.b64 %0, {l, h}; }"
            : "=&l"(product)
            : "r"(low), "r"(high), "n"(static_cast<uint32>(FACTOR)), "n"(static_cast<uint32>(FACTOR >> 32)));
        return product;
    }

    template <uint64 FACTOR>
    __device__ __forceinline__ static uint64 times(uint64 z) {
        return times<FACTOR>(static_cast<uint32>(z), static_cast<uint32>(z >> 32));
    }

    __device__ __forceinline__ static void set_offsets(uint32 j, uint32 (&offsets)[4]) {
#pragma unroll
        for (int v = 0; v < 4; v++) offsets[v] = (v ^ j >> 30) * static_cast<uint32>(SPLITMIX_FIRST);
    }

    // What one word adds, from the lower half of z ^ z >> 30 and the upper half times SPLITMIX_FIRST.
    __device__ __forceinline__ static void mix(uint32 low, uint32 of_high, uint64& z, uint64& y) {
        asm("{ .reg .u32 l, h; mul.wide.u32 %0, %1, %3; mov.b64 {l, h}, %0; add.u32 h, h, %2; mad.lo.u32 h, %1, %4, h; "
            "mov.b64 %0, {l, h}; }"
            : "=&l"(z)
            : "r"(low), "r"(of_high), "n"(static_cast<uint32>(SPLITMIX_FIRST)),
              "n"(static_cast<uint32>(SPLITMIX_FIRST >> 32)));
        z = times<SPLITMIX_SECOND>(z ^ z >> 27);
        z ^= z >> 31;
        y = times<SECOND_LANE_FACTOR>(z);
        y = times<SECOND_LANE_MULTIPLIER>(y ^ y >> 32);
        y ^= y >> 29;
    }

    // Requires: words without a NaN that is not canonical, if they are floats; j < 2^32; offsets as set_offsets(j) gives.
    __device__ __forceinline__ void mix_four(uint32 j, const uint32 (&offsets)[4], const uint32 (&words)[4]) {
        uint32 shifted = j << 2, product = j * static_cast<uint32>(SPLITMIX_FIRST);
        uint64 z[4], y[4];
#pragma unroll
        for (int v = 0; v < 4; v++) {
            mix(words[v] ^ (shifted + (words[v] >> 30)) ^ 4 * v, product + offsets[v], z[v], y[v]);
        }
#pragma unroll
        for (int v = 0; v < 4; v += 2) first += z[v] + z[v + 1], second += y[v] + y[v + 1];
    }
};

// Whether one of these float32 may be a NaN: no for finite ones.
template <int FOURS_AT_ONCE>
__device__ __forceinline__ bool maybe_nan(const uint32 (&words)[FOURS_AT_ONCE][4]) {
    float zeros[2] = {0.0f, 0.0f};
#pragma unroll
    for (int k = 0; k < FOURS_AT_ONCE; k++) {
#pragma unroll
        for (int v = 0; v < 4; v++) zeros[v % 2] = __fmaf_rn(__uint_as_float(words[k][v]), 0.0f, zeros[v % 2]);
    }
    return !(zeros[0] + zeros[1] == 0.0f);
}

// Four elements from number i on, as words.
__device__ __forceinline__ void load_four(const void* data, int64 i, int code, uint32 (&words)[4]) {
    if (code == FLOAT32 || code == BYTES_4) {
        uint4 four = __ldcs(static_cast<const uint4*>(data) + i / 4);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if (code == BYTES_1) {
        uint32 four = __ldcs(static_cast<const uint32*>(data) + i / 4);
#pragma unroll
        for (int v = 0; v < 4; v++) words[v] = four >> (8 * v) & 0xff;
    } else {
        uint2 four = __ldcs(static_cast<const uint2*>(data) + i / 4);
        words[0] = four.x & 0xffff, words[1] = four.x >> 16, words[2] = four.y & 0xffff, words[3] = four.y >> 16;
    }
}

// Not inlined, so that a branch leads around it: it is rare.
__device__ __noinline__ uint4 canonical_four(uint4 words) {
    constexpr Format form = format_of(FLOAT32);
    return make_uint4(canonical_bits(words.x, form), canonical_bits(words.y, form), canonical_bits(words.z, form),
                      canonical_bits(words.w, form));
}

template <int CODE, int FOURS_AT_ONCE>
__device__ __forceinline__ void canonicalise(uint32 (&words)[FOURS_AT_ONCE][4]) {
    if (CODE == FLOAT32 && !maybe_nan(words)) return;
#pragma unroll
    for (int k = 0; k < FOURS_AT_ONCE; k++) {
        if (CODE == FLOAT32) {
            uint4 four = canonical_four(make_uint4(words[k][0], words[k][1], words[k][2], words[k][3]));
            words[k][0] = four.x, words[k][1] = four.y, words[k][2] = four.z, words[k][3] = four.w;
        } else if (CODE == BFLOAT16 || CODE == FLOAT16) {
#pragma unroll
            for (int v = 0; v < 4; v++) words[k][v] = canonical_bits(words[k][v], format_of(CODE));
        }
    }
}

constexpr int FOURS = 32;

// lanes += those of the fours [start, stop) of data, taken by the `threads` threads of a block in turn. Four number i is
// elements 4 i to 4 i + 3; their places are first + 4 i and so on, below 2^32 and multiples of 4.
template <int CODE>
__device__ __forceinline__ void digest_part(
    const void* data, int64 start, int64 stop, int64 first, int threads, Lanes& lanes
) {
    constexpr int TOGETHER = 4;
    while (start < stop) {
        int64 place = first + 4 * start, end = min(stop, start + ((1 << 30) - (place & ((1 << 30) - 1))) / 4);
        uint32 offsets[4];
        Lanes::set_offsets(static_cast<uint32>(place), offsets);  // the same up to `end`
        int64 i = start + threadIdx.x;
        uint32 j = static_cast<uint32>(first + 4 * i);
        for (; i + (TOGETHER - 1) * threads < end; i += TOGETHER * threads) {
            uint32 words[TOGETHER][4];
#pragma unroll
            for (int k = 0; k < TOGETHER; k++) load_four(data, 4 * (i + k * threads), CODE, words[k]);
            canonicalise<CODE>(words);
#pragma unroll
            for (int k = 0; k < TOGETHER; k++, j += 4 * threads) lanes.mix_four(j, offsets, words[k]);
        }
        for (; i < end; i += threads, j += 4 * threads) {
            uint32 words[1][4];
            load_four(data, 4 * i, CODE, words[0]);
            canonicalise<CODE>(words);
            lanes.mix_four(j, offsets, words[0]);
        }
        start = end;
    }
}

// As digest_part, for elements that lie in runs of `run`, `stride` places apart: all three multiples of 4.
template <int CODE>
__device__ __forceinline__ void digest_part_of_runs(
    const void* data, int64 start, int64 stop, int64 first, int64 run, int64 stride, Lanes& lanes
) {
    for (int64 i = start + threadIdx.x; i < stop; i += blockDim.x) {
        uint32 j = static_cast<uint32>(first + 4 * i / run * stride + 4 * i % run), words[1][4], offsets[4];
        Lanes::set_offsets(j, offsets);
        load_four(data, 4 * i, CODE, words[0]);
        canonicalise<CODE>(words);
        lanes.mix_four(j, offsets, words[0]);
    }
}

// lanes[0], lanes[1] += the sums of lane0 and lane1 over the threads of a block.
__device__ __forceinline__ void add_lanes_of_block(uint64 lane0, uint64 lane1, uint64* lanes) {
    for (int distance = 16; distance > 0; distance /= 2) {
        lane0 += __shfl_xor_sync(0xffffffffu, lane0, distance);
        lane1 += __shfl_xor_sync(0xffffffffu, lane1, distance);
    }
    __shared__ uint64 of_warps[2][THREADS / 32];
    if (threadIdx.x % 32 == 0) of_warps[0][threadIdx.x / 32] = lane0, of_warps[1][threadIdx.x / 32] = lane1;
    __syncthreads();
    if (threadIdx.x < 2) {
        uint64 sum = 0;
        for (int warp = 0; warp < blockDim.x / 32; warp++) sum += of_warps[threadIdx.x][warp];
        atomicAdd(lanes + threadIdx.x, sum);
    }
}
