// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_convert: rows of floats to residues and to what their rounding needs to know (see residue_rows.cuh).

#include "residue_rows.cuh"

constexpr int THREADS = 256;
constexpr int CHUNK = 16;
constexpr uint32 ALL_LANES = 0xffffffffu;

// The float32 patterns of terms k .. k + 15 of a row; zeros beyond its end.
__device__ __forceinline__ void load_chunk(
    const char* row, int format, int64 k, int64 depth, uint32 (&bits)[CHUNK]
) {
    bool whole = k + CHUNK <= depth && (reinterpret_cast<uint64>(row) & 15) == 0;
    if (whole && format == FLOAT32) {
        const uint4* from = reinterpret_cast<const uint4*>(row + 4 * k);
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint4 four = __ldg(from + q);
            bits[4 * q] = four.x, bits[4 * q + 1] = four.y, bits[4 * q + 2] = four.z, bits[4 * q + 3] = four.w;
        }
    } else if (whole) {
        const uint4* from = reinterpret_cast<const uint4*>(row + 2 * k);
#pragma unroll
        for (int q = 0; q < 2; q++) {
            uint4 eight = __ldg(from + q);
            uint32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int v = 0; v < 8; v++)
                bits[8 * q + v] = float32_bits(words[v / 2] >> (v % 2 * 16) & 0xffff, format);
        }
    } else {
#pragma unroll
        for (int v = 0; v < CHUNK; v++)
            bits[v] = k + v < depth ? float32_bits(load_bits(row, k + v, format), format) : 0;
    }
}

// The integer nearest to value * scale, plus OFFSET, as two words; adds what was cut off to `cut`.
// Requires: |value * scale| < 2^51, or < 2^62 if not AS_FLOAT64; value a float32, scale a power of two: products are exact.
__device__ __forceinline__ void integer_of(double value, double scale, uint32& low, uint32& high, double& cut) {
    if constexpr (AS_FLOAT64) {
        double shifted = __fma_rn(value, scale, ROUND_BITS);
        cut += fabs(__fma_rn(value, scale, ROUND_BITS - shifted));
        low = static_cast<uint32>(__double2loint(shifted));
        high = static_cast<uint32>(__double2hiint(shifted));
    } else {
        double scaled = value * scale;
        int64 integer = __double2ll_rn(scaled);
        cut += fabs(scaled - __ll2double_rn(integer));
        uint64 offset = static_cast<uint64>(integer) + OFFSET;
        low = static_cast<uint32>(offset);
        high = static_cast<uint32>(offset >> 32);
    }
}

template <bool FOLDED>
__device__ __forceinline__ void store_residues(
    const uint32 (&low)[CHUNK], const uint32 (&high)[CHUNK], int8* to, int64 plane_bytes
) {
    unrolled<0, MODULI>([&](auto index) {
        constexpr int i = decltype(index)::value;
        uint32 words[4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
            uint32 first = __byte_perm(
                residue<i, FOLDED>(low[4 * q], high[4 * q]), residue<i, FOLDED>(low[4 * q + 1], high[4 * q + 1]), 0x0040
            );
            uint32 second = __byte_perm(
                residue<i, FOLDED>(low[4 * q + 2], high[4 * q + 2]), residue<i, FOLDED>(low[4 * q + 3], high[4 * q + 3]),
                0x0040
            );
            words[q] = __byte_perm(first, second, 0x5410);
        }
        *reinterpret_cast<uint4*>(to + i * plane_bytes) = make_uint4(words[0], words[1], words[2], words[3]);
    });
}

// Sums over the `team` threads of a row (a power of two from 8 to THREADS); every one of them gets the result.
template <class T, class F>
__device__ __forceinline__ T over_team(T value, int team, T* shared, F combine) {
    for (int distance = min(team, 32) / 2; distance > 0; distance /= 2)
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
    if (team <= 32) return value;
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    int first = threadIdx.x / team * (team / 32);
    value = shared[first];
    for (int w = 1; w < team / 32; w++) value = combine(value, shared[first + w]);
    return value;
}

// Residues and facts of the rows of one operand: [batches, rows, depth], unit stride in the last dimension.
template <bool FOLDED>
__device__ __forceinline__ void convert(
    const char* data, int format, int64 rows, int64 row_stride, int64 batch_stride, int64 padded_rows, int8* residues,
    Row* facts, int64 batches, int64 depth, int64 depth_blocks, int team, double capacity, int64 first_row
) {
    __shared__ double shared_squares[THREADS / 32];
    __shared__ uint32 shared_largest[THREADS / 32];
    __shared__ double shared_cut[THREADS / 32];
    int lane = threadIdx.x % team;
    int64 row = first_row + threadIdx.x / team;
    bool exists = row < batches * rows;
    int64 batch = exists ? row / rows : 0;
    int64 in_batch = exists ? row % rows : 0;
    int64 element_bytes = format == FLOAT32 ? 4 : 2;
    const char* from = data + (batch * batch_stride + in_batch * row_stride) * element_bytes;
    int64 chunks = exists ? depth_blocks * (BLOCK / CHUNK) : 0;

    uint32 bits[CHUNK];
    uint32 largest = 0;
    double squares = 0;
    int64 filled = exists ? (depth + CHUNK - 1) / CHUNK : 0;
    for (int64 c = lane; c < filled; c += team) {
        load_chunk(from, format, c * CHUNK, depth, bits);
        // The squares of 16 terms in float32, scaled so that the largest term is near 1, every rounding upwards.
        uint32 largest_here = 0;
#pragma unroll
        for (int v = 0; v < CHUNK; v++) largest_here = max(largest_here, bits[v] & 0x7fffffff);
        largest = max(largest, largest_here);
        int scale_field = max(254 - static_cast<int>(largest_here >> 23), 1);
        float scale = __int_as_float(scale_field << 23);
        float sum = 0.0f;
#pragma unroll
        for (int v = 0; v < CHUNK; v++) {
            float scaled = __fmul_ru(fabsf(__uint_as_float(bits[v])), scale);
            sum = __fmaf_ru(scaled, scaled, sum);
        }
        squares += static_cast<double>(sum) * power_of_two(2 * (127 - scale_field));
    }
    largest = over_team(largest, team, shared_largest, [](uint32 a, uint32 b) { return max(a, b); });
    squares = over_team(squares, team, shared_squares, [](double a, double b) { return a + b; });

    // 2^exponent >= norm / (capacity - sqrt(depth) / 2): rounding to integers lengthens a row by sqrt(depth) / 2 at most.
    // The float64 sum of squares is below the true one by less than 2^-20 of it.
    bool finite = largest < 0x7f800000;
    int exponent = 0;
    if (finite && largest) {
        double norm = __dsqrt_ru(squares) * (1.0 + 0x1p-20);
        double ratio = norm / (capacity - 0.5 * __dsqrt_ru(static_cast<double>(depth)));
        exponent = static_cast<int>(__double_as_longlong(ratio) >> 52 & 0x7ff) - 1022;
    }
    int64 padded_row = batch * padded_rows + in_batch;
    int64 plane_bytes = batches * padded_rows * depth_blocks * BLOCK;
    int8* block = residues + padded_row / BLOCK * depth_blocks * BLOCK_BYTES + padded_row % BLOCK * BLOCK;
    double scale = power_of_two(-exponent);
    double cut = 0.0;
    for (int64 c = lane; c < chunks; c += team) {
        int8* to = block + c / 8 * BLOCK_BYTES + static_cast<int>(c % 8 ^ padded_row % 8) * CHUNK;
        if (c * CHUNK >= depth) {
#pragma unroll
            for (int i = 0; i < MODULI; i++) *reinterpret_cast<uint4*>(to + i * plane_bytes) = make_uint4(0, 0, 0, 0);
            continue;
        }
        if (chunks > team) load_chunk(from, format, c * CHUNK, depth, bits);
        uint32 low[CHUNK], high[CHUNK];
#pragma unroll
        for (int v = 0; v < CHUNK; v++)
            integer_of(finite ? static_cast<double>(__uint_as_float(bits[v])) : 0.0, scale, low[v], high[v], cut);
        store_residues<FOLDED>(low, high, to, plane_bytes);
    }
    cut = over_team(cut, team, shared_cut, [](double a, double b) { return a + b; });
    if (lane == 0 && exists) {
        Row fact = {exponent, 0.0f, 1.0f, 0.0f};
        if (!finite) {
            fact.doubt = __int_as_float(0x7f800000);
        } else if (largest) {
            fact.doubt = __double2float_ru(cut * (1.0 + 0x1p-20));
            fact.largest = __double2float_ru(static_cast<double>(__uint_as_float(largest)) * scale + 1.0);
        }
        facts[padded_row] = fact;
    }
}

// Launch: THREADS threads; ceil(batches * x_rows * team / THREADS) blocks for x (x_blocks), then as many for w.
// *flagged := 0. Requires: capacity_x * capacity_w <= P / 4, each above sqrt(depth); depth < 2^31.
extern "C" __global__ void __launch_bounds__(THREADS, 3) residue_convert(
    const char* x, int64 x_format, int64 x_rows, int64 x_row_stride, int64 x_batch_stride, int64 x_padded_rows,
    int8* x_residues, Row* x_facts, double x_capacity, const char* w, int64 w_format, int64 w_rows, int64 w_row_stride,
    int64 w_batch_stride, int64 w_padded_rows, int8* w_residues, Row* w_facts, double w_capacity, int64 batches,
    int64 depth, int64 depth_blocks, int64 team, int64 x_blocks, uint32* flagged
) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *flagged = 0;
    int64 rows_a_block = THREADS / team;
    if (blockIdx.x < x_blocks) {
        convert<false>(x, static_cast<int>(x_format), x_rows, x_row_stride, x_batch_stride, x_padded_rows, x_residues,
                       x_facts, batches, depth, depth_blocks, static_cast<int>(team), x_capacity,
                       blockIdx.x * rows_a_block);
    } else {
        convert<true>(w, static_cast<int>(w_format), w_rows, w_row_stride, w_batch_stride, w_padded_rows, w_residues,
                      w_facts, batches, depth, depth_blocks, static_cast<int>(team), w_capacity,
                      (blockIdx.x - x_blocks) * rows_a_block);
    }
}
