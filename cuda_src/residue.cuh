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

// What the offset 2^63 of an unsigned integer must give back.
__device__ constexpr int offset_correction(int i, bool folded) {
    long long power = folded ? fold_of(i) : 1;
    for (int b = 0; b < 63; b++) power = power * 2 % modulus(i);
    return balanced(-power, modulus(i));
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

// The balanced residue modulo p_I of the integer high:low - 2^63, times the fold of I if FOLDED.
// |sum| <= 8 * 255 * 128 + 128 < 2^18, so the quotient is off from sum / p by less than 2^-15 before it is rounded, and
// an odd p has no residue that close to p / 2; for p = 256 it is exact.
template <int I, bool FOLDED>
__device__ __forceinline__ int residue(uint32 low, uint32 high) {
    constexpr int p = modulus(I);
    constexpr uint32 low_weights = byte_weights(I, 0, FOLDED);
    constexpr uint32 high_weights = byte_weights(I, 4, FOLDED);
    constexpr int correction = offset_correction(I, FOLDED);
    constexpr int reciprocal = static_cast<int>(((1ll << 33) / p + 1) / 2);  // 2^32 / p
    int sum = multiply_add_bytes(low, low_weights, correction);
    if constexpr (high_weights != 0) sum = multiply_add_bytes(high, high_weights, sum);
    int quotient = static_cast<int>((static_cast<int64>(sum) * reciprocal + (1ll << 31)) >> 32);
    return sum - quotient * p;
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

// The integer V from its coefficients t.
// Requires: |V| <= P / 4. Then V0 / P is at least 1/4 away from a tie, and V0 / P from the top limb alone is off by less
//           than 2^-7: the lower limbs hold less than GROUPS * 2^25 units of the top one.
__device__ __forceinline__ int128 reconstruct(const int (&t)[MODULI]) {
    int64 limbs[LIMBS] = {};
    unrolled<0, GROUPS>([&](auto group) {
        constexpr int g = decltype(group)::value;
        constexpr int first = group_start(g), last = group_start(g + 1);
        constexpr uint128 together = product_of_moduli(first, last);
        int u = 0;
        unrolled<first, last>([&](auto index) {
            constexpr int i = decltype(index)::value;
            constexpr int weight = static_cast<int>(together / static_cast<uint128>(modulus(i)));
            u += t[i] * weight;
        });
        unrolled<0, LIMBS>([&](auto index) {
            constexpr int l = decltype(index)::value;
            constexpr int weight = static_cast<int>(limb_of(group_weight(g), l, false));
            limbs[l] += static_cast<int64>(u) * weight;
        });
    });
    constexpr float reciprocal = top_reciprocal();
#ifdef __CUDA_ARCH__
    int quotient = __float2int_rn(__fmul_rn(__ll2float_rn(limbs[LIMBS - 1]), reciprocal));
#else
    int quotient = static_cast<int>(__builtin_rintf(static_cast<float>(limbs[LIMBS - 1]) * reciprocal));
#endif
    int128 value = 0;
    unrolled<0, LIMBS>([&](auto index) {
        constexpr int l = LIMBS - 1 - decltype(index)::value;
        constexpr int64 of_product = limb_of(product_of_moduli(0, MODULI), l, l == LIMBS - 1);
        value = (l == LIMBS - 1 ? 0 : value << LIMB_BITS) + static_cast<int128>(limbs[l] - quotient * of_product);
    });
    return value;
}
