// Rows of floats to residues and to what their rounding needs to know (see residue_rows.cuh).
#pragma once

#include "residue_places.cuh"

// The float32 patterns of the terms k .. k + CHUNK - 1 of a row; zeros beyond its end.
__device__ __forceinline__ void load_chunk(
    const char* row, int format, int64 k, int64 depth, uint32 (&bits)[CHUNK]
) {
    bool whole = k + CHUNK <= depth && (reinterpret_cast<uint64>(row) & 15) == 0;
    if (whole && format == FLOAT32) {
        const uint4* from = reinterpret_cast<const uint4*>(row + 4 * k);
#pragma unroll
        for (int q = 0; q < CHUNK / 4; q++) {
            uint4 four = __ldg(from + q);
            bits[4 * q] = four.x, bits[4 * q + 1] = four.y, bits[4 * q + 2] = four.z, bits[4 * q + 3] = four.w;
        }
    } else if (whole) {
        const uint4* from = reinterpret_cast<const uint4*>(row + 2 * k);
#pragma unroll
        for (int q = 0; q < CHUNK / 8; q++) {
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

// Over the `team` threads of a row, a power of two up to THREADS, by their lanes: every one of them gets the result.
template <class T, class F>
__device__ __forceinline__ T over_lanes(T value, int team, F combine) {
    for (int distance = team / 2; distance > 0; distance /= 2)
        value = combine(value, __shfl_xor_sync(ALL_LANES, value, distance));
    return value;
}

// The same from one value a warp, in shared memory, for a team of several warps.
template <class T, class F>
__device__ __forceinline__ T over_warps(const T* shared, int team, F combine) {
    int warps = team / 32, first = threadIdx.x / team * warps;
    return over_lanes(shared[first + threadIdx.x % warps], warps, combine);
}

// Names those of CHUNK terms from number k on of which something is cut off.
__device__ __noinline__ void name_rests(Rests* rests, int k, const uint32 (&bits)[CHUNK], double scale) {
#pragma unroll 1
    for (int v = 0; v < CHUNK; v++) {
        double scaled = static_cast<double>(__uint_as_float(bits[v])) * scale;
        if (scaled == rint(scaled)) continue;
        int place = atomicAdd(&rests->count, 1);
        if (place < Rests::MOST) rests->term[place] = k + v;
        Term term = decode(bits[v], format_of(FLOAT32));
        atomicMin(&rests->lowest, term.exponent + __ffs(static_cast<int>(term.significand)) - 1);
    }
}

// Residues and facts of the rows first_row, first_row + 1, ... of an operand, a team of threads a row. place_of(padded
// row) says where they go. NORMS: the norm of the residues is wanted too; a team then is within a warp, and has a thread for
// each CHUNK terms. NAMED: the terms of which something is cut off are named in o.rests. Between two calls of a block stands a barrier. Requires: fewer than 2^31 rows of all batches.
template <bool NORMS, bool NAMED, class PlaceOf>
__device__ __forceinline__ void convert(const Operand& o, int team, int64 first_row, PlaceOf place_of) {
    constexpr int WARPS = THREADS / 32;
    __shared__ double shared_squares[WARPS];
    __shared__ uint32 shared_largest[WARPS];
    __shared__ float shared_cut[WARPS];
    int lane = threadIdx.x % team;
    uint32 row = static_cast<uint32>(first_row) + threadIdx.x / team, rows = static_cast<uint32>(o.rows);
    bool exists = row < static_cast<uint32>(o.batches) * rows;
    uint32 batch = exists && o.batches > 1 ? row / rows : 0;
    uint32 in_batch = exists ? row - batch * rows : 0;
    int element_bytes = o.format == FLOAT32 ? 4 : 2;
    const char* from = o.data + (batch * o.batch_stride + in_batch * o.row_stride) * element_bytes;

    uint32 bits[CHUNK] = {};
    uint32 largest = 0;
    double squares = 0;
    int filled = exists ? static_cast<int>((o.depth + CHUNK - 1) / CHUNK) : 0;
    for (int c = lane; c < filled; c += team) {
        load_chunk(from, o.format, static_cast<int64>(c) * CHUNK, o.depth, bits);
        // The squares of these terms in float32, scaled so that the largest term is near 1, every rounding upwards.
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
    auto larger = [](uint32 a, uint32 b) { return max(a, b); };
    auto sum = [](double a, double b) { return a + b; };
    largest = over_lanes(largest, min(team, 32), larger);
    squares = over_lanes(squares, min(team, 32), sum);
    if (!NORMS && team > 32) {
        if (threadIdx.x % 32 == 0) shared_largest[threadIdx.x / 32] = largest, shared_squares[threadIdx.x / 32] = squares;
        __syncthreads();
        largest = over_warps(shared_largest, team, larger);
        squares = over_warps(shared_squares, team, sum);
    }

    // The smallest exponent with 4^exponent >= norm_scale * squares.
    bool finite = largest < 0x7f800000;
    int exponent = 0;
    if (finite && largest) {
        int field = static_cast<int>(__double_as_longlong(squares * o.norm_scale) >> 52 & 0x7ff);
        exponent = (field - 1021) >> 1;
    }
    int64 padded_row = static_cast<int64>(batch) * o.padded_rows + in_batch;
    auto place = place_of(padded_row);
    int chunks = exists ? static_cast<int>(place.chunks) : 0;
    double scale = power_of_two(-exponent);
    double cut = 0.0;
    Rests* rests = NAMED ? o.rests + padded_row : nullptr;
    if (NAMED) {
        if (lane == 0 && exists) rests->count = 0, rests->lowest = exponent;
        __syncthreads();
    }
    uint32 lanes = __ballot_sync(ALL_LANES, exists);
    int longest = 0;
    for (int c = lane; c < chunks; c += team) {
        int8* to = place.of(c);
        if (!NORMS && c >= filled) {
            clear_chunk(place, to);
            continue;
        }
        if (chunks > team) load_chunk(from, o.format, static_cast<int64>(c) * CHUNK, o.depth, bits);
        uint32 low[CHUNK], high[CHUNK];
        double cut_here = 0.0;
#pragma unroll
        for (int v = 0; v < CHUNK; v++)
            integer_of(finite ? static_cast<double>(__uint_as_float(bits[v])) : 0.0, scale, low[v], high[v], cut_here);
        cut += cut_here;
        if (NAMED && cut_here != 0.0) name_rests(rests, c * CHUNK, bits, scale);
        store_chunk<NORMS>(place, to, low, high, o.constants, team, lanes, longest);
    }
    auto sum_upwards = [](float a, float b) { return __fadd_ru(a, b); };
    float cut_off = over_lanes(__double2float_ru(cut * (1.0 + 0x1p-20)), min(team, 32), sum_upwards);
    if (!NORMS && team > 32) {
        if (threadIdx.x % 32 == 0) shared_cut[threadIdx.x / 32] = cut_off;
        __syncthreads();
        cut_off = over_warps(shared_cut, team, sum_upwards);
    }
    if (lane == 0 && exists) {
        Row fact = {exponent, 0.0f, 0.0f, 0.0f};
        if (!finite) {
            fact.doubt = __int_as_float(0x7f800000);
            fact.largest = 1.0f;
        } else if (largest) {
            fact.doubt = cut_off;
            fact.largest = __double2float_ru(static_cast<double>(__uint_as_float(largest)) * scale + 1.0);
            fact.norm = __fsqrt_ru(__int2float_ru(longest));
        }
        o.facts[padded_row] = fact;
    }
}
