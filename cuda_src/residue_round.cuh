// A sum of products from the sums of its groups of residues, rounded once if what is known of it allows.
#pragma once

#include "certified_rounding.cuh"
#include "residue.cuh"
#include "residue_rows.cuh"

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

// What is known of one element beside its residues.
__device__ __forceinline__ float doubt_of(const Row& a, const Row& b) {
    return __fadd_ru(__fmul_ru(a.doubt, b.largest), __fmul_ru(a.largest, b.doubt));
}
