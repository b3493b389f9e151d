// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_gemm_float64: sums of products of float64 residues on the float64 tensor cores, reduced modulo p (see
// residue_float64.cuh): what residue_gemm is for int8.
//
// One block of 8 warps a tile of 128 by 128; each warp 64 rows by 32 columns. Launch: THREADS threads, one block a tile,
// STAGES * 32 KiB of shared memory.

#include "matrix_units.cuh"
#include "product.cuh"
#include "residue_float64.cuh"
#include "residue_gemm.cuh"

constexpr int THREADS = 256;
constexpr int STAGES = 3;
constexpr int STAGE_BYTES = 2 * BLOCK_BYTES;

// Two terms of a row of a block; which two are the third and the seventh of eight does not matter, for both operands agree.
__device__ __forceinline__ double2 two_terms(const char* block, int row, int chunk) {
    return *reinterpret_cast<const double2*>(block + row * BLOCK + float64_chunk(row, chunk) * 16);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) residue_gemm_float64(const __grid_constant__ Product p) {
    extern __shared__ __align__(128) char memory[];
    uint32 shared = shared_address(memory);
    int64 x_blocks = p.padded_rows / BLOCK, w_blocks = p.padded_columns / BLOCK, depth_blocks = p.depth_blocks;
    Tile tile = tile_of(blockIdx.x, static_cast<int>(x_blocks), static_cast<int>(w_blocks));
    GroupConstants constants = group_constants.of[tile.plane / p.batches];
    const int8* from_x = p.x_residues() + (tile.plane * x_blocks + tile.row) * depth_blocks * BLOCK_BYTES;
    const int8* from_w = p.w_residues() + (tile.plane * w_blocks + tile.column) * depth_blocks * BLOCK_BYTES;
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
    double sum[4][4][4] = {};
    for (int s = 0; s < STAGES - 1; s++) start_copy(s);
    for (int64 k = 0; k < depth_blocks; k++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        start_copy(k + STAGES - 1);
        const char* a_block = memory + k % STAGES * STAGE_BYTES;
        const char* b_block = a_block + BLOCK_BYTES;
#pragma unroll
        for (int step = 0; step < 2; step++) {
            int chunk = 4 * step + lane % 4;
            double2 b[4];
#pragma unroll
            for (int j = 0; j < 4; j++) b[j] = two_terms(b_block, first_column + 8 * j + lane / 4, chunk);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                double2 upper = two_terms(a_block, first_row + 16 * i + lane / 4, chunk);
                double2 lower = two_terms(a_block, first_row + 16 * i + lane / 4 + 8, chunk);
                double a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_float64(sum[i][j], a, b[j].x, b[j].y);
            }
        }
        if (k % (TERMS_A_SUM / TERMS_A_BLOCK) == TERMS_A_SUM / TERMS_A_BLOCK - 1) {
#pragma unroll
            for (int r = 0; r < 64; r++) sum[r / 16][r / 4 % 4][r % 4] = reduced(sum[r / 16][r / 4 % 4][r % 4], constants);
        }
    }
    auto word = [&](double value) { return __double2loint(reduced(value, constants) + ROUND_BITS); };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int64 row_unit = (tile.plane * x_blocks + tile.row) * (BLOCK / 16) + first_row / 16 + i;
        int64 unit = row_unit * (w_blocks * (BLOCK / 32)) + tile.column * (BLOCK / 32) + first_column / 32;
        int4* to = reinterpret_cast<int4*>(p.products() + unit * UNIT_BYTES) + lane;
#pragma unroll
        for (int j = 0; j < 4; j++)
            to[32 * j] = make_int4(word(sum[i][j][0]), word(sum[i][j][1]), word(sum[i][j][2]), word(sum[i][j][3]));
    }
}
