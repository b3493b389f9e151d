// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_whole: a whole small product in one launch: residues, integer products and rounding with a barrier of the grid
// between them, and every block computes from the operands what it leaves undecided. The numbers lie in memory as for the
// kernels that do one of these steps each (see residue_rows.cuh).
//
// Launch: cooperative, THREADS threads, no more blocks than run at once, SHARED_BYTES of shared memory.

#include "long_product.cuh"
#include "matrix_units.cuh"
#include "residue_gemm.cuh"
#include "residue_operands.cuh"
#include "residue_round.cuh"
#include "rounding.cuh"

constexpr int COLUMNS = 64;  // of a tile; BLOCK rows
constexpr int STAGES = 4;
constexpr int STAGE_BYTES = BLOCK_BYTES + BLOCK_BYTES / 2;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES;
static_assert(SHARED_BYTES >= NB * THREADS * 8, "the long accumulators share the memory of the tiles");

// One word a barrier: its upper bit flips when all blocks have arrived, the others are zero again then. A launch passes its
// barrier twice, so all of it is zero before and after.
constexpr int BARRIERS = 8192;
__device__ uint32 barriers[BARRIERS];

// What any block wrote before is seen by all afterwards. FIRST, or the second time.
template <bool FIRST>
__device__ __forceinline__ void grid_barrier(uint32* barrier) {
    constexpr uint32 FLIP = 1u << 31;
    __syncthreads();
    if (threadIdx.x == 0) {
        uint32 share = blockIdx.x == 0 ? FLIP - (gridDim.x - 1) : 1, found;
        asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(barrier), "r"(share) : "memory");
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(barrier) : "memory");
        } while (((found & FLIP) != 0) != FIRST);
    }
    __syncthreads();
}

// The address of 16 bytes of a block: `chunk` of a row, at its swizzled place.
__device__ __forceinline__ uint32 place_in(uint32 block, int row, int chunk) {
    return block + row * BLOCK + (chunk ^ row % 8) * 16;
}

// The products of one tile of one modulus; each warp 32 rows by 32 columns.
__device__ __forceinline__ void multiply_tile(const Product& p, uint32 shared, int64 number) {
    int x_blocks = static_cast<int>(p.padded_rows / BLOCK), tile_columns = static_cast<int>(p.padded_columns / COLUMNS);
    Tile tile = tile_of(number, x_blocks, tile_columns);
    Modulus m = modulus_of(static_cast<int>(tile.plane / p.batches));
    int64 depth_blocks = p.depth_blocks, w_blocks = p.padded_columns / BLOCK;
    const int8* from_x = p.x_residues() + (static_cast<int64>(tile.plane) * x_blocks + tile.row) * depth_blocks * BLOCK_BYTES;
    const int8* from_w = p.w_residues() + (tile.plane * w_blocks + tile.column / 2) * depth_blocks * BLOCK_BYTES
        + tile.column % 2 * (BLOCK_BYTES / 2);
    auto start_copy = [&](int64 k) {
        if (k < depth_blocks) {
            uint32 to = shared + static_cast<uint32>(k % STAGES) * STAGE_BYTES;
#pragma unroll
            for (int q = 0; q < STAGE_BYTES / (16 * THREADS); q++) {
                int at = (q * THREADS + threadIdx.x) * 16;
                const int8* from = at < BLOCK_BYTES ? from_x + at : from_w + (at - BLOCK_BYTES);
                copy_16(to + at, from + k * BLOCK_BYTES);
            }
        }
        commit_copies();
    };
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int first_row = warp / 2 * 32, first_column = warp % 2 * 32;
    int sum[2][4][4] = {};
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
                load_matrices(b[pair], place_in(b_block, first_column + 16 * pair + lane / 16 * 8 + lane % 8,
                                                2 * step + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32 a[4];  // rows 0-7 chunk 0, rows 8-15 chunk 0, rows 0-7 chunk 1, rows 8-15 chunk 1
                load_matrices(a, place_in(a_block, first_row + 16 * i + lane % 16, 2 * step + lane / 16));
#pragma unroll
                for (int j = 0; j < 4; j++) multiply(sum[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
            }
        }
        if (k % BLOCKS_A_SUM == BLOCKS_A_SUM - 1) {
#pragma unroll
            for (int r = 0; r < 32; r++) sum[r / 16][r / 4 % 4][r % 4] = reduce(sum[r / 16][r / 4 % 4][r % 4], m);
        }
    }
    wait_for_copies<0>();
    __syncthreads();  // the stages are free for the next tile
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int64 row_unit = (static_cast<int64>(tile.plane) * x_blocks + tile.row) * (BLOCK / 16) + first_row / 16 + i;
        int64 unit = row_unit * (p.padded_columns / 32) + tile.column * (COLUMNS / 32) + first_column / 32;
        uint32 words[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            words[j] = pack(reduce(sum[i][j][0], m), reduce(sum[i][j][1], m), reduce(sum[i][j][2], m), reduce(sum[i][j][3], m));
        __stcg(reinterpret_cast<uint4*>(p.products() + unit * 512) + lane, make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// The exact value of one element of a warp's unit, by all of the warp.
__device__ __noinline__ void compute_undecided(const Product& p, int64* memory, int64 batch, int64 i, int64 j) {
    Terms x_row(p.x, p.x_format, batch * p.x_batch_stride + i * p.x_row_stride);
    Terms w_row(p.w, p.w_format, batch * p.w_batch_stride + j * p.w_row_stride);
    auto total = LongProduct<THREADS>{memory}(x_row, w_row, p.depth, p.bias, p.bias_format, j, 32);
    if (threadIdx.x % 32 == 0) {
        int64 sum[NB];
        copy_digits(sum, total);
        int code = static_cast<int>(p.out_format);
        store_bits(p.out, batch * p.out_batch_stride + i * p.out_stride + j, code, finalize(sum, 1, format_of(code)));
    }
}

// The results of a quarter of a unit: of each lane's 16 elements the four of one group of 8 columns.
template <bool PLAIN>
__device__ __forceinline__ void round_quarter(const Product& p, int64* memory, int64 unit, int group) {
    int lane = threadIdx.x % 32;
    UnitPlace place(p, unit);
    int64 units = p.batches * p.padded_rows / 16 * (p.padded_columns / 32), batch = place.batch;
    int64 first_in_batch = place.row, first_column = place.column + 8 * group;
    if (first_in_batch >= p.rows || first_column >= p.columns) return;
    int64 row = first_in_batch + lane / 4, column = first_column + lane % 4 * 2;
    uint32 words[MODULI];
#pragma unroll
    for (int i = 0; i < MODULI; i++)
        words[i] = __ldcg(reinterpret_cast<const uint32*>(p.products() + (i * units + unit) * 512 + lane * 16) + group);
    Row of_row[2], of_column[2];
#pragma unroll
    for (int v = 0; v < 2; v++) {
        of_row[v] = p.x_facts()[batch * p.padded_rows + row + 8 * v];
        of_column[v] = p.w_facts()[batch * p.padded_columns + column + v];
    }
    int code = PLAIN ? FLOAT32 : static_cast<int>(p.out_format), bias_code = static_cast<int>(p.bias_format);
    uint32 undone = 0;
    unrolled<0, 4>([&](auto element) {
        constexpr int v = decltype(element)::value;
        int u[GROUPS];
        group_sums<v>([&](int i) { return words[i]; }, u);
        const Row &a = of_row[v / 2], &b = of_column[v % 2];
        int64 i = row + v / 2 * 8, j = column + v % 2;
        bool inside = i < p.rows && j < p.columns;
        uint32 term = 0, bits;
        if (!PLAIN && p.bias != nullptr && inside) term = float32_bits(load_bits(p.bias, j, bias_code), bias_code);
        float doubt = inside ? doubt_of(a, b) : 0.0f;
        bool decided = round_sum<PLAIN>(u, a.exponent + b.exponent, doubt, term, p.bias != nullptr, code, bits);
        if (inside) store_bits(p.out, batch * p.out_batch_stride + i * p.out_stride + j, code, bits);
        undone |= static_cast<uint32>(inside && !decided) << v;
    });
    uint32 owners = __ballot_sync(ALL_LANES, undone != 0);
    if (owners == 0) return;
    if (undone) atomicAdd(p.flagged(), __popc(undone));
    for (; owners; owners &= owners - 1) {
        int owner = __ffs(static_cast<int>(owners)) - 1;
        for (uint32 left = __shfl_sync(ALL_LANES, undone, owner); left; left &= left - 1) {
            int v = __ffs(static_cast<int>(left)) - 1;
            compute_undecided(p, memory, batch, first_in_batch + owner / 4 + v / 2 * 8,
                              first_column + owner % 4 * 2 + v % 2);
        }
    }
}

template <bool PLAIN>
__device__ __forceinline__ void whole(const Product& p) {
    extern __shared__ __align__(128) char memory[];
    uint32* barrier = barriers + p.barrier;
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.flagged() = 0;
    int64 w_blocks = (p.batches * p.columns * p.team + THREADS - 1) / THREADS;
    for (int64 block = blockIdx.x; block < p.x_blocks + w_blocks; block += gridDim.x) {
        convert_block(p, block);
        __syncthreads();
    }
    grid_barrier<true>(barrier);
    int64 tiles = p.moduli * p.batches * (p.padded_rows / BLOCK) * (p.padded_columns / COLUMNS);
    for (int64 number = blockIdx.x; number < tiles; number += gridDim.x) multiply_tile(p, shared_address(memory), number);
    grid_barrier<false>(barrier);
    // Neighbouring pieces go to different blocks.
    int64 pieces = p.batches * p.padded_rows / 16 * (p.padded_columns / 32) * 4;
    for (int64 piece = threadIdx.x / 32 * gridDim.x + blockIdx.x; piece < pieces; piece += THREADS / 32 * gridDim.x)
        round_quarter<PLAIN>(p, reinterpret_cast<int64*>(memory), piece / 4, static_cast<int>(piece % 4));
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_whole(const __grid_constant__ Product p) { whole<false>(p); }

// To float32, without a bias.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_whole_plain(const __grid_constant__ Product p) { whole<true>(p); }
