// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_round, residue_digits: sums of products from their residues, rounded once or added to digits; elements that the
// cut rows leave undecided are flagged (see residue_rows.cuh). Launch: THREADS threads, one warp a unit.

#include "product.cuh"
#include "residue_round.cuh"

constexpr int THREADS = 256;

// emit(row in batch, column, batch, sums of the groups, exponent, doubt, inside) -> whether the element is done, for the
// 16 elements of one lane; what is not done is flagged.
template <class Emit>
__device__ __forceinline__ void rebuild_unit(const Product& p, Emit emit) {
    int lane = threadIdx.x % 32;
    int64 row_units = p.batches * p.padded_rows / 16, column_units = p.padded_columns / 32;
    int64 unit = (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
    if (unit >= row_units * column_units) return;
    UnitPlace place(p, unit);
    int64 batch = place.batch, row = place.row + lane / 4, column = place.column + lane % 4 * 2;
    if (place.row >= p.rows || place.column >= p.columns) {
        flag_undone(p, unit, 0);
        return;
    }
    uint32 words[MODULI][4];
#pragma unroll
    for (int i = 0; i < MODULI; i++) {
        uint4 four = __ldcs(reinterpret_cast<const uint4*>(p.products() + (i * row_units * column_units + unit) * 512) + lane);
        words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
    }
    Row of_row[2];
    of_row[0] = p.x_facts()[batch * p.padded_rows + row];
    of_row[1] = p.x_facts()[batch * p.padded_rows + row + 8];
    uint32 undone = 0;
    unrolled<0, 4>([&](auto group) {
        constexpr int g = decltype(group)::value;
        Row of_column[2];
        of_column[0] = p.w_facts()[batch * p.padded_columns + column + 8 * g];
        of_column[1] = p.w_facts()[batch * p.padded_columns + column + 8 * g + 1];
        unrolled<0, 4>([&](auto element) {
            constexpr int v = decltype(element)::value;
            int u[GROUPS];
            group_sums<v>([&](int i) { return words[i][g]; }, u);
            const Row& a = of_row[v / 2];
            const Row& b = of_column[v % 2];
            int64 i = row + v / 2 * 8, j = column + 8 * g + v % 2;
            bool inside = i < p.rows && j < p.columns;
            bool done = emit(i, j, batch, u, a.exponent + b.exponent, doubt_of(a, b), inside);
            undone |= static_cast<uint32>(inside && !done) << (4 * g + v);
        });
    });
    flag_undone(p, unit, undone);
}

template <bool PLAIN>
__device__ __forceinline__ void round_all(const Product& p) {
    int code = static_cast<int>(p.out_format), bias_code = static_cast<int>(p.bias_format);
    rebuild_unit(p, [&](int64 i, int64 j, int64 batch, const int (&u)[GROUPS], int exponent, float doubt, bool inside) {
        uint32 term = 0;
        if (!PLAIN && p.bias != nullptr && inside) term = float32_bits(load_bits(p.bias, j, bias_code), bias_code);
        uint32 bits;
        bool decided = round_sum<PLAIN>(u, exponent, inside ? doubt : 0.0f, term, p.bias != nullptr, code, bits);
        int64 place = batch * p.out_batch_stride + i * p.out_stride + j;
        if (inside) store_bits(p.out, place, PLAIN ? FLOAT32 : code, bits);
        return decided;
    });
}

// out[b, i, j] = the sum, with bias[j] as one more term, rounded once.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_round(const __grid_constant__ Product p) { round_all<false>(p); }

// The same to float32, without a bias.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_round_plain(const __grid_constant__ Product p) { round_all<true>(p); }

// digits[b, i, j, :] += the sum, where nothing was cut off. digits: int64, 21 places an element.
extern "C" __global__ void __launch_bounds__(THREADS) residue_digits(const __grid_constant__ Product p) {
    rebuild_unit(p, [&](int64 i, int64 j, int64 batch, const int (&u)[GROUPS], int exponent, float doubt, bool inside) {
        if (!inside || !(doubt == 0.0f)) return false;
        int128 value = reconstruct(u);
        int64* to = reinterpret_cast<int64*>(p.out) + (batch * p.out_batch_stride + i * p.out_stride + j) * NB;
        int64 sign = value < 0 ? -1 : 1;
        uint128 magnitude = value < 0 ? -static_cast<uint128>(value) : static_cast<uint128>(value);
        int shift = exponent - LOWEST_EXPONENT;
        if (shift < 0) {  // every term is a multiple of 2^LOWEST_EXPONENT, so only zeros leave
            magnitude = shift > -128 ? magnitude >> -shift : 0;
            shift = 0;
        }
        int place = shift / DIGIT_BITS;
        uint64 carried = 0;
        for (int d = 0; d < 5; d++) {
            uint64 word = d < 4 ? static_cast<uint32>(magnitude >> (DIGIT_BITS * d)) : 0;
            carried |= word << (shift % DIGIT_BITS);
            uint32 digit = static_cast<uint32>(carried);
            if (digit) to[place + d] += sign * static_cast<int64>(digit);
            carried >>= DIGIT_BITS;
        }
        return true;
    });
}
