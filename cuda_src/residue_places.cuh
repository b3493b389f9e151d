// Where the residues of a row go, and how they are stored: int8 modulo every modulus, or float64 modulo products of a few.
#pragma once

#include "residue_float64.cuh"

constexpr int THREADS = 256;
constexpr int CHUNK = 16;  // terms that a thread takes at a time

// One operand.
struct Operand {
    const char* data;
    int format;
    int64 batches, rows, row_stride, batch_stride, padded_rows, depth;
    int8* residues;
    Row* facts;
    double norm_scale;
    Rests* rests;  // what was cut off is named here, unless null
    int constants;  // the first of residue_constants: 0 for x, MODULI for w
};

// Stores the residues of CHUNK integers in all planes; with NORMS, longest := the largest of it and, over the moduli, the sums
// of the team's squares of residues. first: 0 for x, MODULI for w. lanes: those of the warp that call it.
template <bool NORMS>
__device__ __forceinline__ void store_residues(
    const uint32 (&low)[CHUNK], const uint32 (&high)[CHUNK], int first, int8* to, int64 plane_bytes, int team, uint32 lanes,
    int& longest
) {
#pragma unroll 1
    for (int i = 0; i < MODULI; i++, to += plane_bytes) {
        ResidueConstants c = residue_constants.of[first + i];
        uint32 words[CHUNK / 4];
#pragma unroll
        for (int q = 0; q < CHUNK / 4; q++) {
            uint32 one = __byte_perm(residue(low[4 * q], high[4 * q], c), residue(low[4 * q + 1], high[4 * q + 1], c), 0x0040);
            uint32 two =
                __byte_perm(residue(low[4 * q + 2], high[4 * q + 2], c), residue(low[4 * q + 3], high[4 * q + 3], c), 0x0040);
            words[q] = __byte_perm(one, two, 0x5410);
        }
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        if (NORMS) {
            int squares = 0;
#pragma unroll
            for (int q = 0; q < CHUNK / 4; q++) squares = __dp4a(static_cast<int>(words[q]), static_cast<int>(words[q]), squares);
            for (int distance = team / 2; distance > 0; distance /= 2)
                squares += __shfl_xor_sync(lanes, squares, distance);
            longest = max(longest, squares);
        }
    }
}

// Where the int8 residues of a row go: blocks of 128 rows and terms, planes of a modulus.
struct InBlocks {
    int8* block;
    int64 plane_bytes;
    int64 chunks;
    int swizzle;
    __device__ InBlocks(const Operand& o, int64 padded_row, int64 depth_blocks)
        : block(o.residues + padded_row / BLOCK * depth_blocks * BLOCK_BYTES + padded_row % BLOCK * BLOCK),
          plane_bytes(o.batches * o.padded_rows * depth_blocks * BLOCK),
          chunks(depth_blocks * (BLOCK / CHUNK)),
          swizzle(static_cast<int>(padded_row % 8)) {}
    __device__ int8* of(int c) const { return block + static_cast<int64>(c / 8) * BLOCK_BYTES + (c % 8 ^ swizzle) * CHUNK; }
};

// Where the float64 residues of a row go (see residue_float64.cuh).
struct InFloat64Blocks {
    int8* row;
    int64 plane_bytes;
    int64 chunks;
    int swizzle;
    __device__ InFloat64Blocks(const Operand& o, int64 padded_row, int64 depth_blocks)
        : row(o.residues + padded_row / BLOCK * depth_blocks * BLOCK_BYTES + padded_row % BLOCK * BLOCK),
          plane_bytes(o.batches * o.padded_rows * depth_blocks * BLOCK),
          chunks(depth_blocks),
          swizzle(float64_chunk(static_cast<int>(padded_row % 2), 0)) {}
    __device__ int8* of(int c) const { return row + static_cast<int64>(c) * BLOCK_BYTES; }
};

// Zeros for the terms of the chunk at `to`, beyond the row's end.
template <class Place>
__device__ __forceinline__ void clear_chunk(const Place& place, int8* to) {
#pragma unroll 1
    for (int i = 0; i < MODULI; i++) *reinterpret_cast<uint4*>(to + i * place.plane_bytes) = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void clear_chunk(const InFloat64Blocks&, int8*) {}  // a block has the terms of one chunk

// The residues of the chunk of integers at `to`, in all planes (see store_residues).
template <bool NORMS, class Place>
__device__ __forceinline__ void store_chunk(
    const Place& place, int8* to, const uint32 (&low)[CHUNK], const uint32 (&high)[CHUNK], int first, int team, uint32 lanes,
    int& longest
) {
    store_residues<NORMS>(low, high, first, to, place.plane_bytes, team, lanes, longest);
}

template <bool NORMS>
__device__ __forceinline__ void store_chunk(
    const InFloat64Blocks& place, int8* to, const uint32 (&low)[CHUNK], const uint32 (&high)[CHUNK], int first, int, uint32,
    int&
) {
    static_assert(!NORMS && CHUNK == TERMS_A_BLOCK);
#pragma unroll 1
    for (int g = 0; g < GROUPS; g++, to += place.plane_bytes) {
        double2* pairs = reinterpret_cast<double2*>(to);
        const GroupConstants& constants = group_constants.of[g];
        bool folded = first != 0;
#pragma unroll
        for (int v = 0; v < CHUNK; v += 2)
            pairs[v / 2 ^ place.swizzle] = make_double2(float64_residue(low[v], high[v], constants, folded),
                                                        float64_residue(low[v + 1], high[v + 1], constants, folded));
    }
}
