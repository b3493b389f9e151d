// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_short: products of rows of at most DEPTH terms, as in attention: all moduli of a tile in one kernel, which writes
// nothing but results. residue_short_convert before it makes the residues.
//
// Rounding works on fractions of 64 bits (see residue_short_fractions.cuh). What they leave open, residue_short_flagged
// computes from the residues exactly, or from the operands if the cut rows leave it open.

#include "long_product.cuh"
#include "matrix_units.cuh"
#include "residue_short_fractions.cuh"
#include "residue_short_rows.cuh"
#include "rounding.cuh"

constexpr int ROWS = 4 * TILE_ROWS;  // of x, for all moduli, in shared memory
constexpr int X_BYTES = ROWS * DEPTH * MODULI;
constexpr int STAGES = 4;  // pairs of planes of w on their way
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int STEPS = DEPTH / 32;

// Launch: THREADS threads; ceil(batches * rows * TEAM / THREADS) blocks for x (x_blocks), then those for w.
extern "C" __global__ void __launch_bounds__(THREADS, 4) residue_short_convert(const __grid_constant__ Product p) {
    if (blockIdx.x == 0 && threadIdx.x < 2) p.flagged()[threadIdx.x] = 0;
    bool of_x = blockIdx.x < p.x_blocks;
    Operand o = of_x ? x_operand(p) : w_operand(p);
    convert<true, false>(o, TEAM, (of_x ? blockIdx.x : blockIdx.x - p.x_blocks) * (THREADS / TEAM),
                  [&](int64 row) { return InTiles(o, row, of_x ? MODULI : W_PLANES); });
}

// A block: 128 rows of a batch by columns_a_task columns, a multiple of 32. Launch: THREADS threads, one block a task,
// X_BYTES + STAGES * STAGE_BYTES of shared memory.
template <bool PLAIN>
__device__ __forceinline__ void multiply_short(const Product& p) {
    extern __shared__ __align__(128) char memory[];
    uint32 x_at = shared_address(memory), w_at = x_at + X_BYTES;
    int64 parts = (p.padded_columns + p.columns_a_task - 1) / p.columns_a_task;
    int64 row_tile = blockIdx.x / parts, row_tiles = p.padded_rows / ROWS;
    int64 batch = row_tile / row_tiles, first_row = row_tile % row_tiles * ROWS;
    int64 first_column = blockIdx.x % parts * p.columns_a_task;
    int tiles = static_cast<int>((min(first_column + p.columns_a_task, p.padded_columns) - first_column) / TILE_ROWS);
    const int8* from_x = p.x_residues() + row_tile * X_BYTES + threadIdx.x * 16;
    // Planes of tiles follow one another in memory.
    const int8* from_w = p.w_residues() + (batch * p.padded_columns + first_column) * (W_PLANES * DEPTH) + threadIdx.x * 16;
    int stages = tiles * (W_PLANES / 2);
    uint32 own = threadIdx.x * 16;
    auto start_copy = [&](int s) {
        if (s < stages) {
#pragma unroll
            for (int at = 0; at < STAGE_BYTES; at += 16 * THREADS)
                copy_16(w_at + s % STAGES * STAGE_BYTES + at + own, from_w + static_cast<int64>(s) * STAGE_BYTES + at);
        }
        commit_copies();
    };
    for (int at = 0; at < X_BYTES; at += 16 * THREADS) copy_16(x_at + at + own, from_x + at);
    for (int s = 0; s < STAGES - 1; s++) start_copy(s);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // A warp has 32 rows, one tile of x, and 16 columns.
    uint32 rows_at = x_at + warp / 2 * (MODULI * TILE_BYTES);
    int column_in_tile = warp % 2 * 16 + lane / 16 * 8 + lane % 8;
    uint32 column_units = static_cast<uint32>(p.padded_columns / 32);
    int s = 0;
    for (int tile = 0; tile < tiles; tile++) {
        Fractions fractions[2][2];
        // What rounding will ask for first.
        const Row* facts = p.w_facts() + batch * p.padded_columns + first_column + tile * TILE_ROWS + lane;
        asm volatile("prefetch.global.L1 [%0];" ::"l"(facts));
        unrolled<0, MODULI>([&](auto index) {
            constexpr int I = decltype(index)::value;
            if constexpr (I % 2 == 0) {
                wait_for_copies<STAGES - 2>();
                __syncthreads();
                start_copy(s + STAGES - 1);
            }
            uint32 b_tile = w_at + s % STAGES * STAGE_BYTES + I % 2 * TILE_BYTES, a_tile = rows_at + I * TILE_BYTES;
            int sum[2][2][4];
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                uint32 b[4];  // columns 0-7 chunk 0, chunk 1, columns 8-15 chunk 0, chunk 1
                load_matrices(b, b_tile + chunk_at(column_in_tile, 2 * step + lane / 8 % 2));
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    uint32 a[4];  // rows 0-7 chunk 0, rows 8-15 chunk 0, rows 0-7 chunk 1, rows 8-15 chunk 1
                    load_matrices(a, a_tile + chunk_at(16 * m + lane % 16, 2 * step + lane / 16));
#pragma unroll
                    for (int j = 0; j < 2; j++) {
                        if (step == 0) multiply_first(sum[m][j], a, b[2 * j], b[2 * j + 1]);
                        else multiply(sum[m][j], a, b[2 * j], b[2 * j + 1]);
                    }
                }
            }
#pragma unroll
            for (int m = 0; m < 2; m++) {
#pragma unroll
                for (int j = 0; j < 2; j++) add_sums<I>(fractions[m][j], sum[m][j]);
            }
            if constexpr (I % 2 == 1 || I == MODULI - 1) s++;
        });
        int64 row = first_row + warp / 2 * 32, column = first_column + tile * TILE_ROWS + warp % 2 * 16;
        uint32 unit = static_cast<uint32>((batch * p.padded_rows + row) / 16) * column_units + static_cast<uint32>(column / 32);
        if (row < p.rows && column < p.columns) {
            round_fractions<PLAIN>(p, fractions, batch, row, column, unit);
        } else {
            for (int m = 0; m < 2; m++) flag_half(p, unit + m * column_units, warp % 2, 0);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_short(const __grid_constant__ Product p) {
    multiply_short<false>(p);
}

// To float32.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_short_plain(const __grid_constant__ Product p) {
    multiply_short<true>(p);
}

constexpr int QUADS = DEPTH / 64;  // chunks of a row that a lane of four takes

// A second look at an element that its fraction left open: the integer, from its residues, by four lanes. Returns to all of
// them whether it is done. The whole warp calls it; `there`: whether these lanes have an element at all.
__device__ __forceinline__ bool round_exactly(const Product& p, int64 batch, int64 i, int64 j, bool there) {
    int64 row = there ? batch * p.padded_rows + i : 0, column = there ? batch * p.padded_columns + j : 0;
    const int8* x = p.x_residues() + row / TILE_ROWS * (MODULI * TILE_BYTES);
    const int8* w = p.w_residues() + column / TILE_ROWS * (W_PLANES * TILE_BYTES);
    uint32 coefficients[MODULI];
    unrolled<0, MODULI>([&](auto index) {
        constexpr int m = decltype(index)::value;
        int sum = 0;
#pragma unroll
        for (int q = 0; q < QUADS; q++) {
            int chunk = threadIdx.x % 4 + 4 * q;
            int4 a = *reinterpret_cast<const int4*>(x + m * TILE_BYTES + chunk_at(static_cast<int>(row % TILE_ROWS), chunk));
            int4 b = *reinterpret_cast<const int4*>(w + m * TILE_BYTES + chunk_at(static_cast<int>(column % TILE_ROWS), chunk));
            sum = __dp4a(a.x, b.x, __dp4a(a.y, b.y, __dp4a(a.z, b.z, __dp4a(a.w, b.w, sum))));
        }
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        coefficients[m] = static_cast<uint32>(balanced(sum, modulus(m))) & 0xff;
    });
    Sums sums;
    group_sums<0>([&](int m) { return coefficients[m]; }, sums.u);
    Row a = p.x_facts()[row], b = p.w_facts()[column];
    int code = static_cast<int>(p.out_format);
    uint32 bits;
    bool decided = round_integer_sum(sums, a.exponent + b.exponent, doubt_of(a, b), 0, code, bits);
    if (there && decided && threadIdx.x % 4 == 0)
        store_bits(p.out, batch * p.out_batch_stride + i * p.out_stride + j, code, bits);
    return decided;
}

// What is not done then, by all of a warp from the operands.
__device__ __noinline__ void compute_undecided(const Product& p, int64* memory, int64 batch, int64 i, int64 j) {
    Terms x_row(p.x, p.x_format, batch * p.x_batch_stride + i * p.x_row_stride);
    Terms w_row(p.w, p.w_format, batch * p.w_batch_stride + j * p.w_row_stride);
    auto total = LongProduct<THREADS>{memory}(x_row, w_row, p.depth, nullptr, FLOAT32, 0, 32);
    if (threadIdx.x % 32 == 0) {
        int64 sum[NB];
        copy_digits(sum, total);
        int code = static_cast<int>(p.out_format);
        store_bits(p.out, batch * p.out_batch_stride + i * p.out_stride + j, code, finalize(sum, 1, format_of(code)));
    }
}

// The element `bit` of lane `owner` of a unit, four lanes an element, if it is `there`. The whole warp calls it.
__device__ __forceinline__ void finish(const Product& p, int64* memory, int64 unit, int owner, int bit, bool there) {
    UnitPlace place(p, unit);
    int64 i = place.row + owner / 4 + bit % 4 / 2 * 8, j = place.column + owner % 4 * 2 + bit / 4 * 8 + bit % 2;
    bool decided = round_exactly(p, place.batch, i, j, there);
    uint32 open = __ballot_sync(ALL_LANES, there && !decided && threadIdx.x % 4 == 0);
    if (open && threadIdx.x % 32 == 0) atomicAdd(p.flagged() + 1, __popc(open));
    for (; open; open &= open - 1) {
        int lane = __ffs(static_cast<int>(open)) - 1;
        compute_undecided(p, memory, __shfl_sync(ALL_LANES, place.batch, lane), __shfl_sync(ALL_LANES, i, lane),
                          __shfl_sync(ALL_LANES, j, lane));
    }
}

// The flagged elements: of the list if it holds them all, else by their flags. Leaves at once if there are none. Adds those
// that took the operands to flagged[1]. Launch: THREADS threads, any grid.
extern "C" __global__ void __launch_bounds__(THREADS, 3) residue_short_flagged(const __grid_constant__ Product p) {
    __shared__ int64 memory[NB * THREADS];
    uint32 count = *p.flagged();
    int64 warp = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) / 32, warps = static_cast<int64>(gridDim.x) * (THREADS / 32);
    int of_eight = threadIdx.x % 32 / 4;
    if (count <= p.list_size) {
        for (int64 first = 8 * warp; first < count; first += 8 * warps) {
            bool there = first + of_eight < count;
            int64 element = there ? p.list()[first + of_eight] : 0;
            finish(p, memory, element / 512, static_cast<int>(element % 512 / 16), static_cast<int>(element % 16), there);
        }
        return;
    }
    // The flags of eight lanes at a time, one element of each.
    int64 lanes = p.batches * p.padded_rows / 16 * p.padded_columns;
    for (int64 first = 8 * warp; first < lanes; first += 8 * warps) {
        int64 at = first + of_eight;
        uint32 bits = p.flags()[at];
        for (; __any_sync(ALL_LANES, bits != 0); bits &= bits - 1)
            finish(p, memory, at / 32, static_cast<int>(at % 32), bits ? __ffs(static_cast<int>(bits)) - 1 : 0, bits != 0);
    }
}
