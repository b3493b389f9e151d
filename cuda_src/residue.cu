// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue: the two ends of the exact product on int8 tensor cores. residue_convert makes residues of float rows,
// residue_gemm multiplies them, residue_round and residue_digits rebuild each sum and round it once or add it to digits.
//
// A row is cut: x[k] = X[k] 2^exponent + rest[k] with |rest| <= 2^(exponent - 1), the exponent chosen so that no sum of
// products can leave the moduli (Cauchy and Schwarz). What was cut off is bounded, row by row, in units of
// 2^exponent: `doubt` >= sum of |rest|, `largest` >= |x| and |X|. A sum over k of x w then lies within
//     doubt_x largest_w + largest_x doubt_w
// units of sum X W. Where that bound leaves the rounding open, the element is flagged and gemm_flagged computes it from
// the operands themselves: a cut costs time, never a bit.
//
// Memory of residues: planes of one modulus, in them blocks of 128 rows by 128 terms (16 KiB), rows of 128 bytes whose
// 16-byte chunks stand at chunk ^ (row % 8): the swizzle of the tensor cores' shared memory, so that a block is copied
// as it lies. Rows of a batch are padded to whole blocks; terms are padded with zeros.
// Memory of products: units of 16 rows by 32 columns (512 bytes). Lane l of a warp owns 16 bytes of a unit: for the
// four groups of 8 columns, rows l/4 and l/4 + 8 with columns 2 (l%4) and 2 (l%4) + 1, as the tensor cores leave them.

#include "certified_rounding.cuh"
#include "residue.cuh"

constexpr int THREADS = 256;
constexpr int CHUNK = 16;
constexpr int BLOCK = 128;
constexpr int BLOCK_BYTES = BLOCK * BLOCK;
constexpr uint32 ALL_LANES = 0xffffffffu;

struct __align__(16) Row {
    int exponent;
    float doubt;
    float largest;
    float unused;
};

__device__ __forceinline__ uint32 float32_bits(uint32 bits, int format) {
    if (format == BFLOAT16) return bits << 16;
    if (format == FLOAT32) return bits;
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<unsigned short>(bits)));
    return __float_as_uint(value);
}

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

__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<int64>(exponent + 1023) << 52);
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

// value += the bias, in units of 2^exponent, as far as it fits; what does not fit goes into the doubt.
// Requires: |value| <= 2^124. Ensures: |value| < 2^126.
__device__ __forceinline__ void add_bias(int128& value, float& doubt, int exponent, uint32 bits) {
    if ((bits & 0x7fffffff) == 0) return;
    int field = bits >> 23 & 0xff;
    int shift = max(field, 1) - 150 - exponent;
    int64 significand = (bits & 0x7fffff) | (field ? 0x800000 : 0);
    if (field == 0xff || shift > 100) {
        doubt = __int_as_float(0x7f800000);
        return;
    }
    int128 term;
    if (shift >= 0) {
        term = static_cast<int128>(significand) << shift;
    } else {
        int down = min(-shift, 40);
        term = significand >> down;
        if (significand & ((1ll << down) - 1)) doubt = __fadd_ru(doubt, 1.0f);
    }
    value += static_cast<int>(bits) < 0 ? -term : term;
}

struct Sums {
    int u[GROUPS];
};

// A sum of products from its residues, (sum + error) * 2^exponent with |error| <= doubt, with a float32 as one more
// term, rounded once on integers. Returns whether the doubt leaves the rounding open.
__device__ __noinline__ bool round_integer_sum(Sums sums, int exponent, float doubt, uint32 bias, int code, uint32& bits) {
    int128 value = reconstruct(sums.u);
    add_bias(value, doubt, exponent, bias);
    return round_within(value, exponent, doubt, format_of(code), bits);
}

// The float of a 16-bit format nearest to value: to odd at 24 bits first, so that nothing looks like a tie that is none.
__device__ __forceinline__ uint32 narrow(double value, int code) {
    float odd = __double2float_rz(value);
    if (static_cast<double>(odd) != value) odd = __uint_as_float(__float_as_uint(odd) | 1);
    unsigned short bits;
    if (code == BFLOAT16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(odd));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(odd));
    return bits;
}

// As round_integer_sum, in float64 where both ends of what the sum can be round alike, which ties never do. PLAIN: to
// float32, without a bias.
template <bool PLAIN>
__device__ __forceinline__ bool round_sum(
    const int (&u)[GROUPS], int exponent, float doubt, uint32 bias, bool has_bias, int code, uint32& bits
) {
    double scale = power_of_two(exponent);
    double value = approximate(u) * scale;
    double size = fabs(value);
    if (!PLAIN && has_bias) {
        double term = static_cast<double>(__uint_as_float(bias));
        value += term;
        size += fabs(term);
    }
    // Four roundings of at most 2^-53 of the size, and the error's own.
    double error = __fma_rn((static_cast<double>(doubt) + APPROXIMATION_ERROR) * scale, 1.0 + 0x1p-40, size * 0x1p-50);
    double low = value - error, high = value + error;
    uint32 other;
    if (PLAIN || code == FLOAT32) {
        bits = __float_as_uint(__double2float_rn(low));
        other = __float_as_uint(__double2float_rn(high));
    } else {
        bits = narrow(low, code);
        other = narrow(high, code);
    }
    if (bits == other && low == low) return true;
    Sums sums;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) sums.u[g] = u[g];
    uint32 exact;
    bool decided = round_integer_sum(sums, exponent, doubt, has_bias ? bias : 0, code, exact);
    bits = exact;
    return decided;
}

// emit(row in batch, column, batch, sums of the groups, exponent, doubt) -> whether the element is done, for the 16
// elements of one lane; what is not done is flagged, one bit an element in flags[unit, lane], and listed at
// listed[*flagged] while there is room: as 512 unit + 16 lane + bit.
template <class Emit>
__device__ __forceinline__ void rebuild_unit(
    const int8* products, const Row* x_facts, const Row* w_facts, int64 batches, int64 rows, int64 padded_rows,
    int64 columns, int64 padded_columns, unsigned short* flags, int64* listed, int64 list_size, uint32* flagged, Emit emit
) {
    int lane = threadIdx.x % 32;
    int64 row_units = batches * padded_rows / 16, column_units = padded_columns / 32;
    int64 unit = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (unit >= row_units * column_units) return;
    int64 first_row = unit / column_units * 16;
    int64 batch = first_row / padded_rows;
    int64 row = first_row % padded_rows + lane / 4;
    int64 column = unit % column_units * 32 + lane % 4 * 2;
    if (first_row % padded_rows >= rows || unit % column_units * 32 >= columns) {
        flags[unit * 32 + lane] = 0;
        return;
    }
    uint32 words[MODULI][4];
#pragma unroll
    for (int i = 0; i < MODULI; i++) {
        uint4 four = __ldcs(reinterpret_cast<const uint4*>(products + (i * row_units * column_units + unit) * 512) + lane);
        words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
    }
    Row of_row[2];
    of_row[0] = x_facts[batch * padded_rows + row];
    of_row[1] = x_facts[batch * padded_rows + row + 8];
    uint32 undone = 0;
    unrolled<0, 4>([&](auto group) {
        constexpr int g = decltype(group)::value;
        Row of_column[2];
        of_column[0] = w_facts[batch * padded_columns + column + 8 * g];
        of_column[1] = w_facts[batch * padded_columns + column + 8 * g + 1];
        unrolled<0, 4>([&](auto element) {
            constexpr int v = decltype(element)::value;
            int u[GROUPS];
            group_sums<v>([&](int i) { return words[i][g]; }, u);
            const Row& a = of_row[v / 2];
            const Row& b = of_column[v % 2];
            float doubt = __fadd_ru(__fmul_ru(a.doubt, b.largest), __fmul_ru(a.largest, b.doubt));
            int64 i = row + v / 2 * 8, j = column + 8 * g + v % 2;
            bool inside = i < rows && j < columns;
            bool done = emit(i, j, batch, u, a.exponent + b.exponent, doubt, inside);
            undone |= static_cast<uint32>(inside && !done) << (4 * g + v);
        });
    });
    flags[unit * 32 + lane] = static_cast<unsigned short>(undone);
    if (undone) {
        uint32 place = atomicAdd(flagged, __popc(undone));
        for (uint32 left = undone; left; left &= left - 1, place++)
            if (place < list_size) listed[place] = unit * 512 + lane * 16 + __ffs(static_cast<int>(left)) - 1;
    }
}

template <bool PLAIN>
__device__ __forceinline__ void round_all(
    const int8* products, const Row* x_facts, const Row* w_facts, int64 batches, int64 rows, int64 padded_rows,
    int64 columns, int64 padded_columns, unsigned short* flags, int64* listed, int64 list_size, uint32* flagged,
    const void* bias, int64 bias_format, void* out, int64 out_format, int64 out_stride, int64 out_batch_stride
) {
    int code = static_cast<int>(out_format), bias_code = static_cast<int>(bias_format);
    rebuild_unit(products, x_facts, w_facts, batches, rows, padded_rows, columns, padded_columns, flags, listed, list_size,
        flagged, [&](int64 i, int64 j, int64 batch, const int (&u)[GROUPS], int exponent, float doubt, bool inside) {
            uint32 term = 0;
            if (!PLAIN && bias != nullptr && inside) term = float32_bits(load_bits(bias, j, bias_code), bias_code);
            uint32 bits;
            bool decided = round_sum<PLAIN>(u, exponent, inside ? doubt : 0.0f, term, bias != nullptr, code, bits);
            int64 place = batch * out_batch_stride + i * out_stride + j;
            if (inside) store_bits(out, place, PLAIN ? FLOAT32 : code, bits);
            return decided;
        });
}

// out[b, i, j] = the sum, with bias[j] as one more term, rounded once; out: rows `out_stride` apart.
// Launch: THREADS threads, one warp a unit.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_round(
    const int8* products, const Row* x_facts, const Row* w_facts, int64 batches, int64 rows, int64 padded_rows,
    int64 columns, int64 padded_columns, unsigned short* flags, int64* listed, int64 list_size, uint32* flagged,
    const void* bias, int64 bias_format, void* out, int64 out_format, int64 out_stride, int64 out_batch_stride
) {
    round_all<false>(products, x_facts, w_facts, batches, rows, padded_rows, columns, padded_columns, flags, listed,
                     list_size, flagged, bias, bias_format, out, out_format, out_stride, out_batch_stride);
}

// The same to float32, without a bias.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_round_plain(
    const int8* products, const Row* x_facts, const Row* w_facts, int64 batches, int64 rows, int64 padded_rows,
    int64 columns, int64 padded_columns, unsigned short* flags, int64* listed, int64 list_size, uint32* flagged,
    const void* bias, int64 bias_format, void* out, int64 out_format, int64 out_stride, int64 out_batch_stride
) {
    round_all<true>(products, x_facts, w_facts, batches, rows, padded_rows, columns, padded_columns, flags, listed,
                    list_size, flagged, nullptr, bias_format, out, out_format, out_stride, out_batch_stride);
}

// digits[b, i, j, :] += the sum, where nothing was cut off. digits: int64, 21 places an element.
extern "C" __global__ void __launch_bounds__(THREADS) residue_digits(
    const int8* products, const Row* x_facts, const Row* w_facts, int64 batches, int64 rows, int64 padded_rows,
    int64 columns, int64 padded_columns, unsigned short* flags, int64* listed, int64 list_size, uint32* flagged,
    int64* digits, int64 out_stride, int64 out_batch_stride
) {
    rebuild_unit(products, x_facts, w_facts, batches, rows, padded_rows, columns, padded_columns, flags, listed, list_size,
        flagged, [&](int64 i, int64 j, int64 batch, const int (&u)[GROUPS], int exponent, float doubt, bool inside) {
            if (!inside || !(doubt == 0.0f)) return false;
            int128 value = reconstruct(u);
            int64* to = digits + (batch * out_batch_stride + i * out_stride + j) * NB;
            int64 sign = value < 0 ? -1 : 1;
            uint128 magnitude = value < 0 ? -static_cast<uint128>(value) : static_cast<uint128>(value);
            int shift = exponent - LOWEST_EXPONENT;
            if (shift < 0) {  // every term is a multiple of 2^LOWEST_EXPONENT, so only zeros leave
                magnitude = shift > -128 ? magnitude >> -shift : 0;
                shift = 0;
            }
            int place = shift / DIGIT_BITS;
            uint64 carried = 0;
            for (int d = 0; d < 5; d++) {
                uint64 word = d < 4 ? static_cast<uint32>(magnitude >> (DIGIT_BITS * d)) : 0;
                carried |= word << (shift % DIGIT_BITS);
                uint32 digit = static_cast<uint32>(carried);
                if (digit) to[place + d] += sign * static_cast<int64>(digit);
                carried >>= DIGIT_BITS;
            }
            return true;
        });
}
