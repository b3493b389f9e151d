// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// tensor_digest: the two 64-bit lanes of a digest, sums modulo 2^64 over a tensor's 32-bit words.
// Mirrors arithmetic/tensor_digest.py.
//
// Element codes, as the launcher passes them: 0 float32, 1 bfloat16, 2 float16, 3 float64; other data by width alone:
// 4 of 8 bits, 5 of 16 bits, 6 of 32 bits, 7 of 64 bits. A complex tensor goes in as its real view.
// Launch: any grid, blocks of 32, 64, ... or 256 threads; lanes: uint64 [2], zeroed by the caller.

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
// With z = high:low before the first step, high = j + v: z ^ z >> 30 has the upper half high ^ high >> 30, in which v only
// changes the two lowest bits, and the lower half low ^ low >> 30 ^ high << 2.
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

    // What one word adds, from the two halves of z ^ z >> 30.
    __device__ __forceinline__ static void mix(uint32 low, uint32 high, uint64& z, uint64& y) {
        z = times<SPLITMIX_FIRST>(low, high);
        z = times<SPLITMIX_SECOND>(z ^ z >> 27);
        z ^= z >> 31;
        y = times<SECOND_LANE_FACTOR>(z);
        y = times<SECOND_LANE_MULTIPLIER>(y ^ y >> 32);
        y ^= y >> 29;
    }

    // Requires: words without a NaN that is not canonical, if they are floats; j < 2^32.
    __device__ __forceinline__ void mix_four(uint32 j, const uint32 (&words)[4]) {
        uint32 high = j ^ j >> 30;
        uint64 z[4], y[4];
#pragma unroll
        for (int v = 0; v < 4; v++) mix(words[v] ^ __funnelshift_r(words[v], j, 30) ^ v << 2, high ^ v, z[v], y[v]);
#pragma unroll
        for (int v = 0; v < 4; v += 2) first += z[v] + z[v + 1], second += y[v] + y[v + 1];
    }
};

constexpr int bytes_of_four(int code) { return code == FLOAT32 || code == BYTES_4 ? 16 : code == BYTES_1 ? 4 : 8; }

// The four elements number 4 i, 4 i + 1, ..., as words.
__device__ __forceinline__ void load_four(const void* data, int64 i, int code, uint32 (&words)[4]) {
    if (code == FLOAT32 || code == BYTES_4) {
        uint4 four = __ldcs(static_cast<const uint4*>(data) + i);
        words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
    } else if (code == BYTES_1) {
        uint32 four = __ldcs(static_cast<const uint32*>(data) + i);
#pragma unroll
        for (int v = 0; v < 4; v++) words[v] = four >> (8 * v) & 0xff;
    } else {
        uint2 four = __ldcs(static_cast<const uint2*>(data) + i);
        words[0] = four.x & 0xffff, words[1] = four.x >> 16, words[2] = four.y & 0xffff, words[3] = four.y >> 16;
    }
}

// Not inlined, so that a branch leads around it: it is rare.
__device__ __noinline__ uint4 canonical_four(uint4 words) {
    constexpr Format form = format_of(FLOAT32);
    return make_uint4(canonical_bits(words.x, form), canonical_bits(words.y, form), canonical_bits(words.z, form),
                      canonical_bits(words.w, form));
}

template <int N>
__device__ __forceinline__ void canonicalise(uint32 (&words)[N][4], int code) {
    if (code == BFLOAT16 || code == FLOAT16) {
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < 4; v++) words[n][v] = canonical_bits(words[n][v], format_of(code));
    }
    if (code == FLOAT32) {
        // 0 for finite numbers.
        float zero = 0.0f;
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int v = 0; v < 4; v++) zero = __fmaf_rn(__uint_as_float(words[n][v]), 0.0f, zero);
        if (zero == 0.0f) return;
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint4 four = canonical_four(make_uint4(words[n][0], words[n][1], words[n][2], words[n][3]));
            words[n][0] = four.x, words[n][1] = four.y, words[n][2] = four.z, words[n][3] = four.w;
        }
    }
}

constexpr int FOURS = 32;  // that a thread takes of a part

// lanes += those of a whole part for blocks of THREADS threads. from: this thread's first four; j: its place. Fours are taken
// BATCH at a time, the next of them under way while some are mixed.
template <int CODE>
__device__ __forceinline__ void digest_part(const char* from, uint32 j, Lanes& lanes) {
    constexpr int BATCH = 2;
    constexpr int BYTES = THREADS * bytes_of_four(CODE);
    uint32 words[BATCH][4], next[BATCH][4];
#pragma unroll
    for (int b = 0; b < BATCH; b++) load_four(from + b * BYTES, 0, CODE, next[b]);
#pragma unroll 2
    for (int n = 0; n < FOURS; n += BATCH, j += 4 * BATCH * THREADS) {
#pragma unroll
        for (int b = 0; b < BATCH; b++)
#pragma unroll
            for (int v = 0; v < 4; v++) words[b][v] = next[b][v];
        from += BATCH * BYTES;
        if (n + BATCH < FOURS) {
#pragma unroll
            for (int b = 0; b < BATCH; b++) load_four(from + b * BYTES, 0, CODE, next[b]);
        }
        canonicalise(words, CODE);
#pragma unroll
        for (int b = 0; b < BATCH; b++) lanes.mix_four(j + 4 * b * THREADS, words[b]);
    }
}

// lanes += those of the elements first + 0, 1, 2, ... of data[0 .. count), in fours, which are aligned and whose places are
// multiples of 4 below 2^32; the caller takes the rest. Blocks take parts of FOURS fours a thread, one after another: many
// more than run at once, so that none waits for the last.
template <int CODE>
__device__ __forceinline__ void digest_fours(
    const void* data, int64 count, int64 first, uint64& lane0, uint64& lane1
) {
    Lanes lanes;
    int64 fours = count / 4, part = static_cast<int64>(blockDim.x) * FOURS;
    for (int64 start = blockIdx.x * part; start < fours; start += gridDim.x * part) {
        int64 i = start + threadIdx.x, end = min(start + part, fours);
        uint32 j = static_cast<uint32>(first + 4 * i);
        if (blockDim.x == THREADS && end == start + part) {
            digest_part<CODE>(static_cast<const char*>(data) + i * bytes_of_four(CODE), j, lanes);
            continue;
        }
#pragma unroll 1
        for (; i < end; i += blockDim.x, j += 4 * blockDim.x) {
            uint32 words[1][4];
            load_four(data, i, CODE, words[0]);
            canonicalise(words, CODE);
            lanes.mix_four(j, words[0]);
        }
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
