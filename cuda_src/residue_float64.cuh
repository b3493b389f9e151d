// Residues modulo products of two or three moduli, as float64, for the float64 tensor cores.
//
// G, the product of a group's moduli (residue.cuh), is below 2^24, and a residue an integer of at most G / 2 + 1 in magnitude.
// A sum of TERMS_A_SUM products of two and one reduced sum stays below 2^53, so it is exact in any order, with fused
// multiply-adds or without. W is taken times the inverse of P / G, so the sums are the u of `reconstruct`.
//
// Memory of residues: planes of one group, in them blocks of 128 rows by 16 terms (16 KiB), rows of 128 bytes whose 16-byte
// chunks stand at chunk ^ 4 (row % 2). Memory of sums: int32, planes of a group, units as in residue_rows.cuh but of 2048
// bytes: for each group of 8 columns 16 bytes of every lane.
#pragma once

#include "residue.cuh"
#include "residue_rows.cuh"

// 1 where the kernels before and after the products are to use these residues.
#ifndef FLOAT64_RESIDUES
#define FLOAT64_RESIDUES 0
#endif

constexpr int TERMS_A_BLOCK = 16;
constexpr int TERMS_A_SUM = 128;
constexpr int UNIT_BYTES = 2048;

__device__ constexpr int64 group_modulus(int g) {
    return static_cast<int64>(product_of_moduli(group_start(g), group_start(g + 1)));
}

constexpr int64 LARGEST_RESIDUE = group_modulus(0) / 2 + 1;  // the first group has the largest moduli, and no fewer of them
static_assert(TERMS_A_SUM * LARGEST_RESIDUE * LARGEST_RESIDUE + LARGEST_RESIDUE < 1ll << 53, "sums are exact");

// value modulo p, in [-(p - 1) / 2, p / 2].
__device__ constexpr int64 balanced_long(int64 value, int64 p) {
    int64 rest = (value % p + p) % p;
    return rest > p / 2 ? rest - p : rest;
}

// The inverse of P / G modulo G, by Euclid's algorithm.
__device__ constexpr int64 fold_of_group(int g) {
    int64 p = group_modulus(g), r = p, next = static_cast<int64>(group_weight(g) % static_cast<uint128>(p)), t = 0, other = 1;
    while (next) {
        int64 quotient = r / next, rest = r - quotient * next, more = t - quotient * other;
        r = next, next = rest, t = other, other = more;
    }
    return balanced_long(t, p);
}

struct GroupConstants {
    double p = 0, reciprocal = 0, fold = 0;
    double two_to_32 = 0;  // modulo p
};

struct AllGroupConstants {
    GroupConstants of[GROUPS];
    __device__ constexpr AllGroupConstants() : of{} {
        for (int g = 0; g < GROUPS; g++) {
            int64 p = group_modulus(g);
            of[g].p = static_cast<double>(p), of[g].reciprocal = 1.0 / static_cast<double>(p);
            of[g].fold = static_cast<double>(fold_of_group(g));
            of[g].two_to_32 = static_cast<double>(balanced_long(1ll << 32, p));
        }
    }
};

__constant__ AllGroupConstants group_constants = AllGroupConstants();

// An integer congruent to the integer `value` modulo p.
// Requires: |value| < 2^53. Ensures: at most p / 2 + 1 in magnitude, since the quotient is off by less than 1 / p before it is
// rounded; both roundings of the residue are exact.
__device__ __forceinline__ double reduced(double value, const GroupConstants& c) {
    double quotient = __fma_rn(value, c.reciprocal, ROUND_BITS) - ROUND_BITS;
    return __fma_rn(-quotient, c.p, value);
}

// The residue of the integer high:low - OFFSET, times the fold if asked.
__device__ __forceinline__ double float64_residue(uint32 low, uint32 high, const GroupConstants& c, bool folded) {
    double residue;
    if constexpr (AS_FLOAT64) {
        residue = reduced(__hiloint2double(static_cast<int>(high), static_cast<int>(low)) - ROUND_BITS, c);
    } else {
        // 2^31 + the upper half, as a float64, and its lower one: |upper| < 2^31, the sum below 2^47.
        double upper = __int2double_rn(static_cast<int>(high ^ 0x80000000u)), lower = __uint2double_rn(low);
        residue = reduced(__fma_rn(reduced(upper, c), c.two_to_32, lower), c);
    }
    return folded ? reduced(residue * c.fold, c) : residue;
}

// The chunk of 16 bytes at which two terms of a row of a block stand: a warp's loads of 8 rows use all banks.
__device__ __forceinline__ int float64_chunk(int row, int chunk) { return chunk ^ row % 2 * 4; }
