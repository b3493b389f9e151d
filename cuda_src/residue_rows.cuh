// The rows of an operand as residue_convert leaves them for residue_gemm and residue_round.
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

#pragma once

#include "formats.cuh"

using int8 = signed char;

constexpr uint32 ALL_LANES = 0xffffffffu;
constexpr int BLOCK = 128;
constexpr int BLOCK_BYTES = BLOCK * BLOCK;

struct __align__(16) Row {
    int exponent;
    float doubt;
    float largest;  // 0 for a row of zeros
    float norm;  // of residue_short: >= the Euclidean norm of the row's residues modulo any of the moduli
};

// The terms of a row of which something was cut off, where every bit counts.
struct __align__(32) Rests {
    static constexpr int MOST = 6;
    int count;  // above MOST: too many to be named
    int lowest;  // the row is a multiple of 2^lowest
    int term[MOST];
};

__device__ __forceinline__ double power_of_two(int exponent) {
    return __longlong_as_double(static_cast<int64>(exponent + 1023) << 52);
}
