// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_round, residue_digits: sums of products from their residues, rounded once or added to digits; elements that the
// cut rows leave undecided are flagged (see residue_rows.cuh).

#include "certified_rounding.cuh"
#include "residue_rows.cuh"

constexpr int THREADS = 256;

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
