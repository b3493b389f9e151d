// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_gemm on any GPU with int8 tensor cores: sums of products of residues, reduced modulo p.
//
// One block of 8 warps a tile of 128 by 128; each warp 64 rows by 32 columns. Launch: THREADS threads, one block a tile,
// STAGES * 32 KiB of shared memory.

#include "matrix_units.cuh"
#include "product.cuh"
#include "residue_gemm.cuh"

constexpr int THREADS = 256;
constexpr int STAGES = 3;
constexpr int STAGE_BYTES = 2 * BLOCK_BYTES;

// The address of 16 bytes of a block: `chunk` of a row, at its swizzled place.
__device__ __forceinline__ uint32 place(uint32 block, int row, int chunk) {
    return block + row * BLOCK + (chunk ^ row % 8) * 16;
}

extern "C" __global__ void __launch_bounds__(THREADS) residue_gemm(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) char memory[];
    uint32 shared = shared_address(memory);
    const int8 *x = p.x_residues(), *w = p.w_residues();
    int8* products = p.products();
    int64 x_blocks = p.padded_rows / BLOCK, w_blocks = p.padded_columns / BLOCK, depth_blocks = p.depth_blocks;
    Tile tile = tile_of(blockIdx.x, static_cast<int>(x_blocks), static_cast<int>(w_blocks));
    Modulus m = modulus_of(static_cast<int>(tile.plane / p.batches));
    const int8* from_x = x + (tile.plane * x_blocks + tile.row) * depth_blocks * BLOCK_BYTES;
    const int8* from_w = w + (tile.plane * w_blocks + tile.column) * depth_blocks * BLOCK_BYTES;
    auto start_copy = [&](int64 k) {
        if (k < depth_blocks) {
            uint32 to = shared + static_cast<uint32>(k % STAGES) * STAGE_BYTES;
#pragma unroll
            for (int q = 0; q < BLOCK_BYTES / (16 * THREADS); q++) {
                int at = (q * THREADS + threadIdx.x) * 16;
                copy_16(to + at, from_x + k * BLOCK_BYTES + at);
                copy_16(to + BLOCK_BYTES + at, from_w + k * BLOCK_BYTES + at);
            }
        }
        commit_copies();
    };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first_row = warp / 4 * 64, first_column = warp % 4 * 32;
    int sum[4][4][4] = {};
    for (int s = 0; s < STAGES - 1; s++) start_copy(s);
    for (int64 k = 0; k < depth_blocks; k++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        start_copy(k + STAGES - 1);
        uint32 a_block = shared + static_cast<uint32>(k % STAGES) * STAGE_BYTES;
        uint32 b_block = a_block + BLOCK_BYTES;
#pragma unroll
        for (int step = 0; step < 4; step++) {
            uint32 b[2][4];
#pragma unroll
            for (int pair = 0; pair < 2; pair++)  // matrices: columns 0-7 chunk 0, chunk 1, columns 8-15 chunk 0, chunk 1
                load_matrices(b[pair], place(b_block, first_column + 16 * pair + lane / 16 * 8 + lane % 8,
                                             2 * step + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32 a[4];  // rows 0-7 chunk 0, rows 8-15 chunk 0, rows 0-7 chunk 1, rows 8-15 chunk 1
                load_matrices(a, place(a_block, first_row + 16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(sum[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
        if (k % BLOCKS_A_SUM == BLOCKS_A_SUM - 1) {
#pragma unroll
            for (int r = 0; r < 64; r++) sum[r / 16][r / 4 % 4][r % 4] = reduce(sum[r / 16][r / 4 % 4][r % 4], m);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int64 row_unit = (tile.plane * x_blocks + tile.row) * (BLOCK / 16) + first_row / 16 + i;
        int64 unit = row_unit * (w_blocks * (BLOCK / 32)) + tile.column * (BLOCK / 32) + first_column / 32;
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = pack(reduce(sum[i][j][0], m), reduce(sum[i][j][1], m), reduce(sum[i][j][2], m), reduce(sum[i][j][3], m));
        reinterpret_cast<uint4*>(products + unit * 512)[lane] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}
