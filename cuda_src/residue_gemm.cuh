// What the two residue_gemm kernels share: the memory of blocks and units (see residue_rows.cuh), and the reduction modulo p.
#pragma once

#include "residue_rows.cuh"

// Blocks of terms whose sum of products stays below 2^38 / (2 p): 128 * 128 * 65536 = 2^30.
constexpr int BLOCKS_A_SUM = 512;

struct Modulus {
    int p;
    int reciprocal;  // 2^38 / p < 2^31
};

__device__ __forceinline__ Modulus modulus_of(int i) {
    // The list of residue.cuh, 256 as 0.
    constexpr uint64 low = 0xe9eff1f7fbfdff00ull, high = 0xc1c5c7d3d9dfe3e5ull;
    int p = static_cast<int>((i < 8 ? low >> (8 * i) : high >> (8 * (i - 8))) & 0xff);
    if (p == 0) p = 256;
    return {p, static_cast<int>(((1ull << 38) + p / 2) / static_cast<uint64>(p))};
}

// The balanced residue. Requires: |sum| <= 2^30. The quotient is off from sum / p by less than 2^-9 before it is rounded.
__device__ __forceinline__ int reduce(int sum, Modulus m) {
    int64 scaled;  // in one instruction, which the compiler does not find
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(scaled) : "r"(sum), "r"(m.reciprocal), "l"(1ll << 37));
    return sum - (static_cast<int>(scaled >> 32) >> 6) * m.p;
}

__device__ __forceinline__ uint32 pack(int a, int b, int c, int d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// A tile of one modulus and one batch. Tiles of neighbouring numbers share rows or columns, to meet in the cache.
struct Tile {
    int plane;   // modulus * batches + batch
    int row;     // in tiles
    int column;  // in tiles
};

// Requires: number < 2^31.
__device__ __forceinline__ Tile tile_of(int64 number, int tile_rows, int tile_columns) {
    constexpr int GROUP = 8;
    int per_plane = tile_rows * tile_columns, plane = static_cast<int>(number) / per_plane;
    int inside = static_cast<int>(number) - plane * per_plane;
    int group = inside / (GROUP * tile_columns), first = group * GROUP;
    int size = min(tile_rows - first, GROUP);
    int in_group = inside - group * (GROUP * tile_columns), column = in_group / size;
    return {plane, first + in_group - column * size, column};
}
