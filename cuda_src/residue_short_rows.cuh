// The residues of short rows for residue_short.cu.
//
// Memory: tiles of 32 rows, one modulus after another (of w with one more plane if their number is odd), rows
// of DEPTH bytes whose 16-byte chunks are swizzled as `chunk_at` says. Rows of x are padded to 128, of w to 32.
#pragma once

#include "residue_operands.cuh"

#ifndef DEPTH
#define DEPTH 64
#endif

constexpr int TILE_ROWS = 32;
constexpr int TILE_BYTES = TILE_ROWS * DEPTH;
constexpr int W_PLANES = (MODULI + 1) / 2 * 2;
constexpr int TEAM = DEPTH / CHUNK;

// Where 16 bytes of a row of a tile lie, so that eight neighbouring rows use all banks.
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return row * DEPTH + (DEPTH == 64 ? chunk ^ row / 2 % 4 : chunk ^ row % 8) * CHUNK;
}

struct InTiles {
    int8* tile;
    int row;
    static constexpr int64 plane_bytes = TILE_BYTES;
    static constexpr int64 chunks = TEAM;
    __device__ InTiles(const Operand& o, int64 padded_row, int planes)
        : tile(o.residues + padded_row / TILE_ROWS * (planes * TILE_BYTES)), row(static_cast<int>(padded_row % TILE_ROWS)) {}
    __device__ int8* of(int c) const { return tile + chunk_at(row, c); }
};
