// The elements of a unit of 16 rows by 32 columns, rebuilt by a warp.
#pragma once

#include "product.cuh"
#include "residue.cuh"

// emit(row in batch, column, batch, sums of the groups, facts of both rows, inside) -> whether the element is done, for the
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
            bool done = emit(i, j, batch, u, a, b, inside);
            undone |= static_cast<uint32>(inside && !done) << (4 * g + v);
        });
    });
    flag_undone(p, unit, undone);
}
