// Integers as residues modulo MODULI pairwise coprime numbers up to 256, and back. Mirrors arithmetic/residue.py with
// smaller moduli.
//
// For integers X, W with |sum of X[k] W[k]| <= P / 4, P the product of the moduli: reduce both modulo every p, W times
// the inverse of P / p, and sum the products of residues in 32 bits. The sums t_i (again modulo p_i) give the integer as
//     V = sum of t_i (P / p_i) - P rint(sum of t_i / p_i).
#pragma once

#include "formats.cuh"

#ifndef MODULI
#define MODULI 12
#endif

using int8 = signed char;
using int128 = __int128;
using uint128 = unsigned __int128;

constexpr int MAXIMUM_MODULI = 16;  // the integer and its sum of weights then stay within 128 bits

__device__ constexpr int modulus(int i) {
    constexpr int list[MAXIMUM_MODULI] = {256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193};
    return list[i];
}

// The representative of value mod p in [-p/2, p/2), or [-(p-1)/2, (p-1)/2] for odd p: an int8.
__device__ constexpr int balanced(long long value, int p) {
    int rest = static_cast<int>((value % p + p) % p);
    return rest > (p - 1) / 2 ? rest - p : rest;
}

__device__ constexpr uint128 product_of_moduli(int first, int last) {
    uint128 product = 1;
    for (int i = first; i < last; i++) product *= static_cast<uint128>(modulus(i));
    return product;
}

// The inverse of P / p_i modulo p_i.
__device__ constexpr int fold_of(int i) {
    int cofactor = 1;
    for (int j = 0; j < MODULI; j++)
        if (j != i) cofactor = cofactor * modulus(j) % modulus(i);
    int inverse = 1;
    while (cofactor * inverse % modulus(i) != 1) inverse++;
    return inverse;
}

// 2^(8 byte) modulo p_i, times the fold if asked, as four int8 in one word for bytes first .. first + 3.
__device__ constexpr uint32 byte_weights(int i, int first, bool folded) {
    uint32 word = 0;
    long long power = folded ? fold_of(i) : 1;
    for (int b = 0; b < first; b++) power = power * 256 % modulus(i);
    for (int b = 0; b < 4; b++) {
        word |= static_cast<uint32>(balanced(power, modulus(i)) & 0xff) << (8 * b);
        power = power * 256 % modulus(i);
    }
    return word;
}

// Integers below 2^51 are carried as the pattern of the float64 1.5 * 2^52 + X, which is a constant plus X; larger ones
// as 2^63 + X.
constexpr bool AS_FLOAT64 = MODULI <= 13;
constexpr uint64 OFFSET = AS_FLOAT64 ? 0x4338000000000000ull : 1ull << 63;
constexpr double ROUND_BITS = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer

// What the offset must give back.
__device__ constexpr int offset_correction(int i, bool folded) {
    long long rest = static_cast<long long>(OFFSET % modulus(i));
    return balanced(-rest * (folded ? fold_of(i) : 1), modulus(i));
}

// f(Index<0>{}), ..., f(Index<N - 1>{}): a loop whose index is a constant.
template <int I>
struct Index {
    static constexpr int value = I;
};

template <int I, int N, class F>
__device__ __forceinline__ void unrolled(F&& f) {
    if constexpr (I < N) {
        f(Index<I>{});
        unrolled<I + 1, N>(f);
    }
}

// sum + the four products of an unsigned and a signed byte.
__device__ __forceinline__ int multiply_add_bytes(uint32 unsigned_bytes, uint32 signed_bytes, int sum) {
#ifdef __CUDA_ARCH__
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(unsigned_bytes), "r"(signed_bytes), "r"(sum));
    return out;
#else
    for (int b = 0; b < 4; b++)
        sum += static_cast<int>(unsigned_bytes >> (8 * b) & 0xff) * static_cast<int8>(signed_bytes >> (8 * b) & 0xff);
    return sum;
#endif
}

// What the residue modulo p_i of an integer is computed with, for x and, times the fold, for w. In constant memory, so that
// one short loop serves all moduli: unrolled, the code would not fit the instruction caches.
constexpr int ROUND_PATTERN = 0x4b400000;
constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23, the float32 of ROUND_PATTERN

struct ResidueConstants {
    uint32 low_weights = 0, high_weights = 0;
    int start = 0;
    float reciprocal = 0, minus_p = 0;
};

struct AllResidueConstants {
    ResidueConstants of[2 * MODULI];
    __device__ constexpr AllResidueConstants() : of{} {
        for (int i = 0; i < 2 * MODULI; i++) {
            int m = i % MODULI, p = modulus(m);
            bool folded = i >= MODULI;
            of[i].low_weights = byte_weights(m, 0, folded), of[i].high_weights = byte_weights(m, 4, folded);
            of[i].start = ROUND_PATTERN + offset_correction(m, folded);
            of[i].reciprocal = 1.0f / p, of[i].minus_p = -static_cast<float>(p);
        }
    }
};

__constant__ AllResidueConstants residue_constants = AllResidueConstants();

// In the low byte: the balanced residue of the integer high:low - OFFSET, times the fold if the constants have it.
// The sum of eight products of bytes and the correction is below 2^18, so it is exact as the float32 1.5 * 2^23 + sum, and
// its quotient by p is off by less than 2^-12 before it is rounded; an odd p has no residue that close to p / 2, and
// p = 256 divides exactly (128 comes out as -128 in the byte).
__device__ __forceinline__ uint32 residue(uint32 low, uint32 high, const ResidueConstants& c) {
    float shifted = __int_as_float(multiply_add_bytes(high, c.high_weights, multiply_add_bytes(low, c.low_weights, c.start)));
    float quotient = __fmaf_rn(shifted - ROUND, c.reciprocal, ROUND) - ROUND;
    return __float_as_uint(__fmaf_rn(quotient, c.minus_p, shifted));
}

// The weights P / p_i are applied to groups of two or three moduli at a time: u = sum over the group of t_i (G / p_i),
// |u| < 2^25, then V = sum of u (P / G), whose weights are shorter.
constexpr int GROUPS = (MODULI + 2) / 3;

__device__ constexpr int group_start(int g) {
    int small = MODULI / GROUPS, larger = MODULI % GROUPS;
    return g * small + (g < larger ? g : larger);
}

__device__ constexpr uint128 group_weight(int g) {
    return product_of_moduli(0, MODULI) / product_of_moduli(group_start(g), group_start(g + 1));
}

__device__ constexpr int bit_length(uint128 value) {
    int length = 0;
    for (; value; value >>= 1) length++;
    return length;
}

__device__ constexpr int longest_weight_bits() {
    int longest = 0;
    for (int g = 0; g < GROUPS; g++) longest = bit_length(group_weight(g)) > longest ? bit_length(group_weight(g)) : longest;
    return longest;
}

constexpr int LIMBS = (longest_weight_bits() + 29) / 30;
constexpr int LIMB_BITS = (longest_weight_bits() + LIMBS - 1) / LIMBS;

__device__ constexpr int64 limb_of(uint128 value, int limb, bool last) {
    value >>= limb * LIMB_BITS;
    return static_cast<int64>(last ? value : value & ((static_cast<uint128>(1) << LIMB_BITS) - 1));
}

__device__ constexpr float top_reciprocal() {
    double scale = 1;
    for (int b = 0; b < LIMB_BITS * (LIMBS - 1); b++) scale *= 2;
    return static_cast<float>(scale / static_cast<double>(product_of_moduli(0, MODULI)));
}

// u of every group, from words that hold the coefficients of four elements, one byte each.
// Two 16-bit weights and two bytes at a time; a group of three has its third byte in the upper half.
__device__ __forceinline__ int multiply_add_pairs_low(uint32 weights, uint32 bytes, int sum) {
#ifdef __CUDA_ARCH__
    int out;
    asm("dp2a.lo.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(weights), "r"(bytes), "r"(sum));
    return out;
#else
    return sum + static_cast<int>(weights & 0xffff) * static_cast<int8>(bytes) + static_cast<int>(weights >> 16) * static_cast<int8>(bytes >> 8);
#endif
}

__device__ __forceinline__ int multiply_add_pairs_high(uint32 weights, uint32 bytes, int sum) {
#ifdef __CUDA_ARCH__
    int out;
    asm("dp2a.hi.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(weights), "r"(bytes), "r"(sum));
    return out;
#else
    return multiply_add_pairs_low(weights, bytes >> 16, sum);
#endif
}

template <int V, class Words>
__device__ __forceinline__ void group_sums(const Words& words, int (&u)[GROUPS]) {
    unrolled<0, GROUPS>([&](auto group) {
        constexpr int g = decltype(group)::value;
        constexpr int first = group_start(g), size = group_start(g + 1) - first;
        constexpr int together = static_cast<int>(product_of_moduli(first, first + size));
        constexpr uint32 low = together / modulus(first) | static_cast<uint32>(together / modulus(first + 1)) << 16;
        static_assert(size == 2 || size == 3);
        uint32 bytes = __byte_perm(words(first), words(first + 1), V | (V + 4) << 4);
        if constexpr (size == 3) {
            constexpr uint32 high = together / modulus(first + 2);
            bytes = __byte_perm(bytes, words(first + 2), 0x10 | (V + 4) << 8 | 7 << 12);
            u[g] = multiply_add_pairs_low(low, bytes, multiply_add_pairs_high(high, bytes, 0));
        } else {
            u[g] = multiply_add_pairs_low(low, bytes, 0);
        }
    });
}

// The integer V from the sums of the groups.
// Requires: |V| <= 31/64 P. Then V0 / P is at least 1/64 away from a tie, and V0 / P from the top limb alone is off by less
//           than 2^-7: the lower limbs hold less than GROUPS * 2^25 units of the top one.
__device__ __forceinline__ int128 reconstruct(const int (&u)[GROUPS]) {
    int64 limbs[LIMBS] = {};
    unrolled<0, GROUPS>([&](auto group) {
        constexpr int g = decltype(group)::value;
        unrolled<0, LIMBS>([&](auto index) {
            constexpr int l = decltype(index)::value;
            constexpr int weight = static_cast<int>(limb_of(group_weight(g), l, false));
            limbs[l] += static_cast<int64>(u[g]) * weight;
        });
    });
    constexpr float reciprocal = top_reciprocal();
    int quotient = __float2int_rn(__fmul_rn(__ll2float_rn(limbs[LIMBS - 1]), reciprocal));
    int128 value = 0;
    unrolled<0, LIMBS>([&](auto index) {
        constexpr int l = LIMBS - 1 - decltype(index)::value;
        constexpr int64 of_product = limb_of(product_of_moduli(0, MODULI), l, l == LIMBS - 1);
        value = (l == LIMBS - 1 ? 0 : value << LIMB_BITS) + static_cast<int128>(limbs[l] - quotient * of_product);
    });
    return value;
}

// The same in float64, off by at most APPROXIMATION_ERROR + 2^-53 |V|: weights are cut into HIGH_BITS bits, for which sums
// and P times the quotient are exact, and the rest, rounded.
constexpr int HIGH_BITS = 25;
constexpr int LOW_BITS = longest_weight_bits() > HIGH_BITS ? longest_weight_bits() - HIGH_BITS : 0;

__device__ constexpr double two_to(int exponent) {
    double power = 1;
    for (; exponent > 0; exponent--) power *= 2;
    for (; exponent < 0; exponent++) power /= 2;
    return power;
}

// The parts of a weight or of P in units of 2^LOW_BITS and of 1. Requires: high < 2^53.
__device__ constexpr double high_part(uint128 value) { return static_cast<double>(static_cast<uint64>(value >> LOW_BITS)); }

__device__ constexpr double low_part(uint128 value) {
    uint128 rest = value - (value >> LOW_BITS << LOW_BITS);
    return static_cast<double>(static_cast<uint64>(rest >> 32 >> 32)) * two_to(64) + static_cast<double>(static_cast<uint64>(rest));
}

// GROUPS + 1 products below 2^(26 + LOW_BITS), each with two factors and a sum rounded to 53 bits: below 2^(LOW_BITS - 20).
constexpr double APPROXIMATION_ERROR = two_to(LOW_BITS - 20);

// In constant memory, from where they are operands of arithmetic; as literals each would be moved to registers first.
struct ApproximateWeights {
    double high[GROUPS] = {}, low[GROUPS] = {};
    double high_of_product = high_part(product_of_moduli(0, MODULI)), low_of_product = low_part(product_of_moduli(0, MODULI));
    double reciprocal = 1.0 / high_of_product;
    double unit = two_to(LOW_BITS);
    __device__ constexpr ApproximateWeights() {
        for (int g = 0; g < GROUPS; g++) high[g] = high_part(group_weight(g)), low[g] = low_part(group_weight(g));
    }
};

__constant__ ApproximateWeights approximate_weights = ApproximateWeights();

__device__ __forceinline__ double approximate(const int (&u)[GROUPS]) {
    const ApproximateWeights& weights = approximate_weights;
    double high = 0.0, low = 0.0;
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
        // u as the float64 1.5 * 2^52 + u, less the constant.
        double as_double = __hiloint2double(0x43380000 + (u[g] >> 31), u[g]) - ROUND_BITS;
        high = __fma_rn(as_double, weights.high[g], high);
        if (LOW_BITS > 0) low = __fma_rn(as_double, weights.low[g], low);
    }
    double quotient = __fma_rn(high, weights.reciprocal, ROUND_BITS) - ROUND_BITS;
    high = __fma_rn(-quotient, weights.high_of_product, high);
    if (LOW_BITS > 0) low = __fma_rn(-quotient, weights.low_of_product, low);
    return __fma_rn(high, weights.unit, low);
}
