// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_short: products of rows of at most DEPTH terms, as in attention: all moduli of a tile in one kernel, which writes
// nothing but results. residue_short_convert before it makes the residues.
//
// The sum s_i of products of residues modulo p_i need not be reduced: with 64-bit c_i = rint(2^64 / p_i) the sum of
// s_i c_i modulo 2^64 is 2^64 V / P, V the integer (see residue.cuh), but for an error of at most
//     |x residues| |w residues| sum of |c_i - 2^64 / p_i|
// by Cauchy and Schwarz. Where it or what the cut rows leave open matters to the rounding, the element is flagged, and
// residue_short_flagged computes it from the residues exactly, or from the operands if the cut rows leave it open.
//
// Memory of residues: tiles of 32 rows, one modulus after another (of w with one more plane if their number is odd), rows
// of DEPTH bytes whose 16-byte chunks are swizzled as `chunk_at` says. Rows of x are padded to 128, of w to 32.

#include "long_product.cuh"
#include "matrix_units.cuh"
#include "residue_operands.cuh"
#include "residue_round.cuh"
#include "rounding.cuh"

#ifndef DEPTH
#define DEPTH 64
#endif

constexpr int TILE_ROWS = 32;
constexpr int TILE_BYTES = TILE_ROWS * DEPTH;
constexpr int ROWS = 4 * TILE_ROWS;  // of x, for all moduli, in shared memory
constexpr int X_BYTES = ROWS * DEPTH * MODULI;
constexpr int W_PLANES = (MODULI + 1) / 2 * 2;
constexpr int STAGES = 4;  // pairs of planes of w on their way
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr int STEPS = DEPTH / 32;
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

// Launch: THREADS threads; ceil(batches * rows * TEAM / THREADS) blocks for x (x_blocks), then those for w.
extern "C" __global__ void __launch_bounds__(THREADS, 4) residue_short_convert(const __grid_constant__ Product p) {
    if (blockIdx.x == 0 && threadIdx.x < 2) p.flagged()[threadIdx.x] = 0;
    bool of_x = blockIdx.x < p.x_blocks;
    Operand o = of_x ? x_operand(p) : w_operand(p);
    convert<true, false>(o, TEAM, (of_x ? blockIdx.x : blockIdx.x - p.x_blocks) * (THREADS / TEAM),
                  [&](int64 row) { return InTiles(o, row, of_x ? MODULI : W_PLANES); });
}

// c_i as high 2^32 + low, both signed.
__device__ constexpr uint64 reciprocal_of(int i) {
    uint64 p = modulus(i), quotient = ~0ull / p, rest = ~0ull % p + 1;  // 2^64 = quotient p + rest
    return 2 * rest >= p ? quotient + 1 : quotient;
}
__device__ constexpr int low_reciprocal(int i) { return static_cast<int>(static_cast<uint32>(reciprocal_of(i))); }
__device__ constexpr int high_reciprocal(int i) {
    return static_cast<int>((reciprocal_of(i) - static_cast<uint64>(static_cast<int64>(low_reciprocal(i)))) >> 32);
}

// >= the sum of |c_i - 2^64 / p_i| = |c_i p_i - 2^64| / p_i.
__device__ constexpr float reciprocal_error() {
    double sum = 0;
    for (int i = 0; i < MODULI; i++) {
        int64 off = static_cast<int64>(reciprocal_of(i) * modulus(i));  // modulo 2^64
        sum += static_cast<double>(off < 0 ? -off : off) / modulus(i);
    }
    return static_cast<float>(sum * 1.0001);
}

__device__ constexpr double product_over(int exponent) {  // P / 2^exponent
    double value = 1;
    for (int i = 0; i < MODULI; i++) value *= modulus(i) / 256.0;
    return value * two_to(8 * MODULI - exponent);
}

// The sums of s_i c_i modulo 2^64 as low + 2^32 high, of the four elements v of a tile of the tensor cores. Apart, because
// the compiler would build every 64-bit sum anew.
struct Fractions {
    int64 low[4] = {};
    uint32 high[4] = {};
    __device__ __forceinline__ uint64 of(int v) const {
        return static_cast<uint64>(low[v]) + (static_cast<uint64>(high[v]) << 32);
    }
};

template <int I>
__device__ __forceinline__ void add_sums(Fractions& f, const int (&sum)[4]) {
    constexpr int low = low_reciprocal(I), high = high_reciprocal(I);
#pragma unroll
    for (int v = 0; v < 4; v++) {
        if constexpr (low != 0) f.low[v] += static_cast<int64>(sum[v]) * low;
        f.high[v] += static_cast<uint32>(sum[v]) * static_cast<uint32>(high);
    }
}

// What is known of the 16 rows of w that a warp multiplies by: bounds of all that are finite, and marks of the lane's four.
struct Columns {
    float doubt = 0.0f, largest = 0.0f, norm = 0.0f;
    double scales[4];
    uint32 infinite = 0, zero = 0, outside = 0;

    __device__ __forceinline__ Columns(const Row* facts, int64 first, int64 columns) {
        int lane = threadIdx.x % 32;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int64 column = first + c / 2 * 8 + lane % 4 * 2 + c % 2;
            Row row = {0, 0.0f, 0.0f, 0.0f};
            if (column < columns) row = facts[column];
            else outside |= 1u << c;
            scales[c] = power_of_two(row.exponent);
            bool finite = row.doubt < __int_as_float(0x7f800000);
            if (!finite) infinite |= 1u << c;
            if (row.largest == 0.0f) zero |= 1u << c;
            if (finite) doubt = fmaxf(doubt, row.doubt), largest = fmaxf(largest, row.largest), norm = fmaxf(norm, row.norm);
        }
        for (int distance = 1; distance < 4; distance *= 2) {
            doubt = fmaxf(doubt, __shfl_xor_sync(ALL_LANES, doubt, distance));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
            norm = fmaxf(norm, __shfl_xor_sync(ALL_LANES, norm, distance));
        }
    }
};

template <bool PLAIN>
__device__ __forceinline__ uint32 rounded(double value, int code) {
    return PLAIN || code == FLOAT32 ? __float_as_uint(__double2float_rn(value)) : narrow(value, code);
}

// Half of flag_undone of product.cuh: the 8 elements of a lane whose columns are those of the unit's half `half`.
__device__ __forceinline__ void flag_half(const Product& p, uint32 unit, int half, uint32 undone) {
    int lane = threadIdx.x % 32;
    reinterpret_cast<unsigned char*>(p.flags())[2 * (static_cast<int64>(unit) * 32 + lane) + half] =
        static_cast<unsigned char>(undone);
    if (undone) {
        uint32 place = atomicAdd(p.flagged(), __popc(undone));
        for (uint32 left = undone; left; left &= left - 1, place++)
            if (place < p.list_size)
                p.list()[place] = static_cast<int64>(unit) * 512 + lane * 16 + 8 * half + __ffs(static_cast<int>(left)) - 1;
    }
}

// Of the elements of a row half, those whose columns of w are not usual: in bits 4 j + v without the row half's own shift.
__device__ __noinline__ uint32 unusual_columns(
    char* to, int code, bool row_inside, bool row_finite, uint32 infinite, uint32 zero, uint32 outside, uint32 undone
) {
    for (int c = 0; c < 4; c++) {
        uint32 bit = 1u << (c / 2 * 4 + c % 2);
        if (infinite >> c & 1) undone |= bit;
        if ((zero >> c & 1) && row_finite) {  // the sum is zero, which is +0
            undone &= ~bit;
            if (row_inside && !(outside >> c & 1)) store_bits(to, c / 2 * 8 + c % 2, code, 0);
        }
        if (outside >> c & 1) undone &= ~bit;
    }
    return undone;
}

// The results of a warp's 32 rows and 16 columns. fractions[m][j]: rows 16 m .., columns 8 j ... unit: the one of the first
// row and column.
template <bool PLAIN>
__device__ __forceinline__ void round_fractions(
    const Product& p, const Fractions (&fractions)[2][2], int64 batch, int64 first_row, int64 first_column, uint32 unit
) {
    int lane = threadIdx.x % 32, code = PLAIN ? FLOAT32 : static_cast<int>(p.out_format);
    Columns columns(p.w_facts() + batch * p.padded_columns, first_column, p.columns);
    constexpr double UNIT = product_over(64);
    constexpr float UNITS_A_TERM = static_cast<float>(1.0001 / product_over(64));
    constexpr float RECIPROCAL_ERROR = reciprocal_error();
    const float INFINITE = __int_as_float(0x7f800000);
    int element_bytes = code == FLOAT32 ? 4 : 2;
    bool in_pairs = (reinterpret_cast<uint64>(p.out) | static_cast<uint64>((p.out_stride | p.out_batch_stride) * element_bytes))
        % (2 * element_bytes) == 0;
    bool inside = first_row + 32 <= p.rows && first_column + 16 <= p.columns && in_pairs;
    char* out = p.out
        + (batch * p.out_batch_stride + (first_row + lane / 4) * p.out_stride + first_column + lane % 4 * 2) * element_bytes;
    const Row* rows = p.x_facts() + batch * p.padded_rows + first_row + lane / 4;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        uint32 undone = 0;  // bit 4 j + v
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Row row = rows[16 * m + 8 * half];
            bool finite = row.doubt < INFINITE;
            float open = __fadd_ru(__fmul_ru(row.doubt, columns.largest), __fmul_ru(row.largest, columns.doubt));
            open = __fmaf_ru(open, UNITS_A_TERM, __fmul_ru(__fmul_ru(row.norm, columns.norm), RECIPROCAL_ERROR));
            // Three roundings to 53 bits of at most 2^62. The fraction of a row of zeros is exact.
            double error = row.largest == 0.0f ? 0.0 : static_cast<double>(finite ? open : INFINITE) + 0x1p12;
            double row_scale = UNIT * power_of_two(row.exponent);
            char* to = out + (16 * m + 8 * half) * p.out_stride * element_bytes;
            uint32 bits[4], open_still = 0;
#pragma unroll
            for (int c = 0; c < 4; c++) {
                double value = static_cast<double>(static_cast<int64>(fractions[m][c / 2].of(2 * half + c % 2)));
                double scale = row_scale * columns.scales[c];
                bits[c] = rounded<PLAIN>((value - error) * scale, code);
                if (bits[c] != rounded<PLAIN>((value + error) * scale, code)) open_still |= 1u << (c / 2 * 4 + c % 2);
            }
            bool row_inside = first_row + 16 * m + 8 * half + lane / 4 < p.rows;
            if (inside && code == FLOAT32) {
                *reinterpret_cast<uint2*>(to) = make_uint2(bits[0], bits[1]);
                *reinterpret_cast<uint2*>(to + 8 * 4) = make_uint2(bits[2], bits[3]);
            } else if (inside) {
                *reinterpret_cast<uint32*>(to) = bits[0] | bits[1] << 16;
                *reinterpret_cast<uint32*>(to + 8 * 2) = bits[2] | bits[3] << 16;
            } else {
#pragma unroll
                for (int c = 0; c < 4; c++)
                    if (row_inside && !(columns.outside >> c & 1)) store_bits(to, c / 2 * 8 + c % 2, code, bits[c]);
            }
            if (columns.infinite | columns.zero | columns.outside)
                open_still = unusual_columns(to, code, row_inside, finite, columns.infinite, columns.zero, columns.outside,
                                             open_still);
            undone |= (row_inside ? open_still : 0) << (2 * half);
        }
        flag_half(p, unit + m * static_cast<uint32>(p.padded_columns / 32), static_cast<int>(first_column / 16 % 2), undone);
    }
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
