// The terms of cut rows of which something was cut off (Rests), added one by one.
#pragma once

#include "long_product.cuh"
#include "product.cuh"
#include "residue_windowed_sums.cuh"

__device__ __forceinline__ Terms x_terms(const Product& p, int64 i) { return Terms(p.x, p.x_format, i * p.x_row_stride); }
__device__ __forceinline__ Terms w_terms(const Product& p, int64 j) { return Terms(p.w, p.w_format, j * p.w_row_stride); }

// += (x - X) * other for the terms of which a row of x lost something, in units of 2^(own_exponent + other_exponent - shift);
// `whole`: times all of the other term, else only times its integer. Both factors have 25 bits at most, so products are exact.
template <class Sum>
__device__ __forceinline__ bool add_rests(
    Sum& sum, const Rests& rests, Terms own, Terms other, int own_exponent, int other_exponent, bool whole, int shift
) {
    double scale = power_of_two(-own_exponent), other_scale = power_of_two(-other_exponent);
    int count = rests.count;
    if (count > Rests::MOST) return false;
    for (int n = 0; n < count; n++) {
        int k = rests.term[n];
        double term = static_cast<double>(__uint_as_float(own[k])) * scale;
        double factor = static_cast<double>(__uint_as_float(other[k])) * other_scale;
        double product = (term - rint(term)) * (whole ? factor : rint(factor));
        if (product != 0.0 && !sum.add(product, shift)) return false;
    }
    return true;
}

// What the rests of a unit of 16 rows by 32 columns add to its elements, for those in a row or a column that lost something:
// a warp goes through such rows and then such columns, a lane an element.
class UnitRests {
    int128 (&of)[16][32];
    uint32 rows, columns;  // that lost something, a bit each
    uint32 bad_rows, bad_columns;  // of those, that have other elements than 128 bits hold

public:
    // of: of this warp alone, in shared memory. The whole warp calls it.
    __device__ __forceinline__ UnitRests(const Product& p, const UnitPlace& place, int128 (&of)[16][32]) : of(of) {
        const float INFINITE = __int_as_float(0x7f800000);
        int lane = threadIdx.x % 32;
        int64 own_row = place.row + lane % 16, own_column = place.column + lane;
        bool row_exists = own_row < p.rows, column_exists = own_column < p.columns;
        Row a = {}, b = {};
        int base = 0;
        if (row_exists) a = p.x_facts()[own_row], base = static_cast<int>(static_cast<const int64*>(p.bias)[own_row]);
        if (column_exists) b = p.w_facts()[own_column];
        rows = __ballot_sync(ALL_LANES, lane < 16 && a.doubt != 0.0f);
        columns = __ballot_sync(ALL_LANES, b.doubt != 0.0f);
        bad_rows = __ballot_sync(ALL_LANES, lane < 16 && !(a.doubt < INFINITE));
        bad_columns = __ballot_sync(ALL_LANES, !(b.doubt < INFINITE));
        for (uint32 left = rows & ~bad_rows; left; left &= left - 1) {
            int r = __ffs(static_cast<int>(left)) - 1;
            int exponent = __shfl_sync(ALL_LANES, a.exponent, r), shift = exponent + b.exponent - __shfl_sync(ALL_LANES, base, r);
            Narrow sum;
            bool fits = !column_exists
                || add_rests(sum, p.x_rests()[place.row + r], x_terms(p, place.row + r), w_terms(p, own_column), exponent, b.exponent, true, shift);
            of[r][lane] = sum.sum;
            if (__any_sync(ALL_LANES, !fits)) bad_rows |= 1u << r;
        }
        __syncwarp();
        for (uint32 left = columns & ~bad_columns; left; left &= left - 1) {
            int c = __ffs(static_cast<int>(left)) - 1;
            int exponent = __shfl_sync(ALL_LANES, b.exponent, c), shift = exponent + a.exponent - base;
            bool fits = true;
            if (lane < 16 && row_exists) {
                Narrow sum;
                if (rows >> lane & 1) sum.sum = of[lane][c];
                fits = add_rests(sum, p.w_rests()[place.column + c], w_terms(p, place.column + c), x_terms(p, own_row), exponent, a.exponent, false, shift);
                of[lane][c] = sum.sum;
            }
            if (__any_sync(ALL_LANES, !fits)) bad_columns |= 1u << c;
        }
        __syncwarp();
    }

    // sum += those of the element in row r and column c of the unit; whether it is known.
    __device__ __forceinline__ bool add_to(Narrow& sum, int r, int c) const {
        if ((rows >> r | columns >> c) & 1) sum.sum += of[r][c];
        return !((bad_rows >> r | bad_columns >> c) & 1);
    }
};
