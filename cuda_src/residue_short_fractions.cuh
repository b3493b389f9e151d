// Sums of products of residues to the fraction V / P, and that to a rounded float.
//
// The sum s_i of products of residues modulo p_i need not be reduced: with 64-bit c_i = rint(2^64 / p_i) the sum of
// s_i c_i modulo 2^64 is 2^64 V / P, V the integer (see residue.cuh), but for an error of at most
//     |x residues| |w residues| sum of |c_i - 2^64 / p_i|
// by Cauchy and Schwarz. Where it or what the cut rows leave open matters to the rounding, the element is flagged.
#pragma once

#include "product.cuh"
#include "residue_round.cuh"

// c_i as high 2^32 + low, both signed.
__device__ constexpr uint64 reciprocal_of(int i) {
    uint64 p = modulus(i), quotient = ~0ull / p, rest = ~0ull % p + 1;  // 2^64 = quotient p + rest
    return 2 * rest >= p ? quotient + 1 : quotient;
}
__device__ constexpr int low_reciprocal(int i) { return static_cast<int>(static_cast<uint32>(reciprocal_of(i))); }
__device__ constexpr int high_reciprocal(int i) {
    return static_cast<int>((reciprocal_of(i) - static_cast<uint64>(static_cast<int64>(low_reciprocal(i)))) >> 32);
}

// >= the sum of |c_i - 2^64 / p_i| = |c_i p_i - 2^64| / p_i.
__device__ constexpr float reciprocal_error() {
    double sum = 0;
    for (int i = 0; i < MODULI; i++) {
        int64 off = static_cast<int64>(reciprocal_of(i) * modulus(i));  // modulo 2^64
        sum += static_cast<double>(off < 0 ? -off : off) / modulus(i);
    }
    return static_cast<float>(sum * 1.0001);
}

__device__ constexpr double product_over(int exponent) {  // P / 2^exponent
    double value = 1;
    for (int i = 0; i < MODULI; i++) value *= modulus(i) / 256.0;
    return value * two_to(8 * MODULI - exponent);
}

// The sums of s_i c_i modulo 2^64 as low + 2^32 high, of the four elements v of a tile of the tensor cores. Apart, because
// the compiler would build every 64-bit sum anew.
struct Fractions {
    int64 low[4] = {};
    uint32 high[4] = {};
    __device__ __forceinline__ uint64 of(int v) const {
        return static_cast<uint64>(low[v]) + (static_cast<uint64>(high[v]) << 32);
    }
};

template <int I>
__device__ __forceinline__ void add_sums(Fractions& f, const int (&sum)[4]) {
    constexpr int low = low_reciprocal(I), high = high_reciprocal(I);
#pragma unroll
    for (int v = 0; v < 4; v++) {
        if constexpr (low != 0) f.low[v] += static_cast<int64>(sum[v]) * low;
        f.high[v] += static_cast<uint32>(sum[v]) * static_cast<uint32>(high);
    }
}

// What is known of the 16 rows of w that a warp multiplies by: bounds of all that are finite, and marks of the lane's four.
struct Columns {
    float doubt = 0.0f, largest = 0.0f, norm = 0.0f;
    double scales[4];
    uint32 infinite = 0, zero = 0, outside = 0;

    __device__ __forceinline__ Columns(const Row* facts, int64 first, int64 columns) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int64 column = first + c / 2 * 8 + lane % 4 * 2 + c % 2;
            Row row = {0, 0.0f, 0.0f, 0.0f};
            if (column < columns) row = facts[column];
            else outside |= 1u << c;
            scales[c] = power_of_two(row.exponent);
            bool finite = row.doubt < __int_as_float(0x7f800000);
            if (!finite) infinite |= 1u << c;
            if (row.largest == 0.0f) zero |= 1u << c;
            if (finite) doubt = fmaxf(doubt, row.doubt), largest = fmaxf(largest, row.largest), norm = fmaxf(norm, row.norm);
        }
        for (int distance = 1; distance < 4; distance *= 2) {
            doubt = fmaxf(doubt, __shfl_xor_sync(ALL_LANES, doubt, distance));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
            norm = fmaxf(norm, __shfl_xor_sync(ALL_LANES, norm, distance));
        }
    }
};

template <bool PLAIN>
__device__ __forceinline__ uint32 rounded(double value, int code) {
    return PLAIN || code == FLOAT32 ? __float_as_uint(__double2float_rn(value)) : narrow(value, code);
}

// Half of flag_undone of product.cuh: the 8 elements of a lane whose columns are those of the unit's half `half`.
__device__ __forceinline__ void flag_half(const Product& p, uint32 unit, int half, uint32 undone) {
    int lane = threadIdx.x % 32;
    reinterpret_cast<unsigned char*>(p.flags())[2 * (static_cast<int64>(unit) * 32 + lane) + half] =
        static_cast<unsigned char>(undone);
    if (undone) {
        uint32 place = atomicAdd(p.flagged(), __popc(undone));
        for (uint32 left = undone; left; left &= left - 1, place++)
            if (place < p.list_size)
                p.list()[place] = static_cast<int64>(unit) * 512 + lane * 16 + 8 * half + __ffs(static_cast<int>(left)) - 1;
    }
}

// Of the elements of a row half, those whose columns of w are not usual: in bits 4 j + v without the row half's own shift.
__device__ __noinline__ uint32 unusual_columns(
    char* to, int code, bool row_inside, bool row_finite, uint32 infinite, uint32 zero, uint32 outside, uint32 undone
) {
    for (int c = 0; c < 4; c++) {
        uint32 bit = 1u << (c / 2 * 4 + c % 2);
        if (infinite >> c & 1) undone |= bit;
        if ((zero >> c & 1) && row_finite) {  // the sum is zero, which is +0
            undone &= ~bit;
            if (row_inside && !(outside >> c & 1)) store_bits(to, c / 2 * 8 + c % 2, code, 0);
        }
        if (outside >> c & 1) undone &= ~bit;
    }
    return undone;
}

// The results of a warp's 32 rows and 16 columns. fractions[m][j]: rows 16 m .., columns 8 j ... unit: the one of the first
// row and column.
template <bool PLAIN>
__device__ __forceinline__ void round_fractions(
    const Product& p, const Fractions (&fractions)[2][2], int64 batch, int64 first_row, int64 first_column, uint32 unit
) {
    int lane = threadIdx.x % 32, code = PLAIN ? FLOAT32 : static_cast<int>(p.out_format);
    Columns columns(p.w_facts() + batch * p.padded_columns, first_column, p.columns);
    constexpr double UNIT = product_over(64);
    constexpr float UNITS_A_TERM = static_cast<float>(1.0001 / product_over(64));
    constexpr float RECIPROCAL_ERROR = reciprocal_error();
    const float INFINITE = __int_as_float(0x7f800000);
    int element_bytes = code == FLOAT32 ? 4 : 2;
    bool in_pairs = (reinterpret_cast<uint64>(p.out) | static_cast<uint64>((p.out_stride | p.out_batch_stride) * element_bytes))
        % (2 * element_bytes) == 0;
    bool inside = first_row + 32 <= p.rows && first_column + 16 <= p.columns && in_pairs;
    char* out = p.out
        + (batch * p.out_batch_stride + (first_row + lane / 4) * p.out_stride + first_column + lane % 4 * 2) * element_bytes;
    const Row* rows = p.x_facts() + batch * p.padded_rows + first_row + lane / 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint32 undone = 0;  // bit 4 j + v
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Row row = rows[16 * m + 8 * half];
            bool finite = row.doubt < INFINITE;
            float open = __fadd_ru(__fmul_ru(row.doubt, columns.largest), __fmul_ru(row.largest, columns.doubt));
            open = __fmaf_ru(open, UNITS_A_TERM, __fmul_ru(__fmul_ru(row.norm, columns.norm), RECIPROCAL_ERROR));
            // Three roundings to 53 bits of at most 2^62. The fraction of a row of zeros is exact.
            double error = row.largest == 0.0f ? 0.0 : static_cast<double>(finite ? open : INFINITE) + 0x1p12;
            double row_scale = UNIT * power_of_two(row.exponent);
            char* to = out + (16 * m + 8 * half) * p.out_stride * element_bytes;
            uint32 bits[4], open_still = 0;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                double value = static_cast<double>(static_cast<int64>(fractions[m][c / 2].of(2 * half + c % 2)));
                double scale = row_scale * columns.scales[c];
                bits[c] = rounded<PLAIN>((value - error) * scale, code);
                if (bits[c] != rounded<PLAIN>((value + error) * scale, code)) open_still |= 1u << (c / 2 * 4 + c % 2);
            }
            bool row_inside = first_row + 16 * m + 8 * half + lane / 4 < p.rows;
            if (inside && code == FLOAT32) {
                *reinterpret_cast<uint2*>(to) = make_uint2(bits[0], bits[1]);
                *reinterpret_cast<uint2*>(to + 8 * 4) = make_uint2(bits[2], bits[3]);
            } else if (inside) {
                *reinterpret_cast<uint32*>(to) = bits[0] | bits[1] << 16;
                *reinterpret_cast<uint32*>(to + 8 * 2) = bits[2] | bits[3] << 16;
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (row_inside && !(columns.outside >> c & 1)) store_bits(to, c / 2 * 8 + c % 2, code, bits[c]);
            }
            if (columns.infinite | columns.zero | columns.outside)
                open_still = unusual_columns(to, code, row_inside, finite, columns.infinite, columns.zero, columns.outside,
                                             open_still);
            undone |= (row_inside ? open_still : 0) << (2 * half);
        }
        flag_half(p, unit + m * static_cast<uint32>(p.padded_columns / 32), static_cast<int>(first_column / 16 % 2), undone);
    }
}
