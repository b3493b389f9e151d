// The elements of a unit of 16 rows by 32 columns, rebuilt by a warp.
#pragma once

#include "product.cuh"
#include "residue_float64.cuh"

// What the products left of 16 elements of a lane, as sums of the groups of residues.
class UnitSums {
#if FLOAT64_RESIDUES
    const char* from;
    int64 plane_bytes;
    int4 of_columns[GROUPS];

public:
    __device__ __forceinline__ UnitSums(const Product& p, int64 unit, int64 units)
        : from(reinterpret_cast<const char*>(p.products()) + unit * UNIT_BYTES + threadIdx.x % 32 * 16),
          plane_bytes(units * UNIT_BYTES) {}

    // Before the elements of group C of 8 columns are asked for.
    template <int C>
    __device__ __forceinline__ void enter() {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            of_columns[g] = __ldcs(reinterpret_cast<const int4*>(from + g * plane_bytes + C * (UNIT_BYTES / 4)));
    }

    // u of the lane's element V of group C.
    template <int C, int V>
    __device__ __forceinline__ void get(int (&u)[GROUPS]) const {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            const int4& four = of_columns[g];
            u[g] = V == 0 ? four.x : V == 1 ? four.y : V == 2 ? four.z : four.w;
        }
    }
#else
    uint32 words[MODULI][4];

public:
    __device__ __forceinline__ UnitSums(const Product& p, int64 unit, int64 units) {
#pragma unroll
        for (int i = 0; i < MODULI; i++) {
            uint4 four = __ldcs(reinterpret_cast<const uint4*>(p.products() + (i * units + unit) * 512) + threadIdx.x % 32);
            words[i][0] = four.x, words[i][1] = four.y, words[i][2] = four.z, words[i][3] = four.w;
        }
    }

    template <int C>
    __device__ __forceinline__ void enter() {}

    template <int C, int V>
    __device__ __forceinline__ void get(int (&u)[GROUPS]) const {
        group_sums<V>([&](int i) { return words[i][C]; }, u);
    }
#endif
};

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
    UnitSums sums(p, unit, row_units * column_units);
    Row of_row[2];
    of_row[0] = p.x_facts()[batch * p.padded_rows + row];
    of_row[1] = p.x_facts()[batch * p.padded_rows + row + 8];
    uint32 undone = 0;
    unrolled<0, 4>([&](auto group) {
        constexpr int g = decltype(group)::value;
        sums.template enter<g>();
        Row of_column[2];
        of_column[0] = p.w_facts()[batch * p.padded_columns + column + 8 * g];
        of_column[1] = p.w_facts()[batch * p.padded_columns + column + 8 * g + 1];
        unrolled<0, 4>([&](auto element) {
            constexpr int v = decltype(element)::value;
            int u[GROUPS];
            sums.template get<g, v>(u);
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
