// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// A product as windowed digits (arithmetic/windowed_digits.py), exact: the integers of the cut rows, and beside them the
// few terms of which something was cut off, one by one:
//     sum x w = sum X W + sum of (x - X) w + sum of X (w - W).
// An element that does not fit its window, or has too many such terms, is flagged and left alone: the caller finds out and
// adds it another way.
//
// Launch: residue_windowed_convert as residue_convert, then residue_windowed_bases if the window is to be chosen here
// (THREADS threads, a block for THREADS rows), residue_gemm, residue_windowed (THREADS threads, one warp a unit).

#include "long_product.cuh"
#include "residue_operands.cuh"
#include "residue_round.cuh"
#include "residue_float64.cuh"

constexpr int WORD_BITS = 26;
constexpr int64 RADIX = 1ll << WORD_BITS, HALF = RADIX / 2;
constexpr int MOST_WORDS = 7;  // that 192 bits fill; words above are zero

extern "C" __global__ void __launch_bounds__(THREADS, FLOAT64_RESIDUES ? 2 : 4) residue_windowed_convert(const __grid_constant__ Product p) {
    if (blockIdx.x == 0 && threadIdx.x < 2) p.flagged()[threadIdx.x] = 0;
    convert_block<true>(p, blockIdx.x);
}

// bases[i] = the exponent of which every product of row i is a multiple, as far as the cut rows and their rests tell.
extern "C" __global__ void __launch_bounds__(THREADS) residue_windowed_bases(const __grid_constant__ Product p) {
    __shared__ int shared[THREADS / 32];
    int lowest = 1 << 20;
    for (int64 j = threadIdx.x; j < p.columns; j += THREADS)
        if (p.w_facts()[j].largest != 0.0f && p.w_facts()[j].doubt < __int_as_float(0x7f800000))
            lowest = min(lowest, p.w_rests()[j].lowest);
    for (int distance = 16; distance > 0; distance /= 2) lowest = min(lowest, __shfl_xor_sync(ALL_LANES, lowest, distance));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = lowest;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++) lowest = min(lowest, shared[warp]);
    int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.rows) return;
    Row fact = p.x_facts()[i];
    bool usual = lowest < 1 << 20 && fact.largest != 0.0f && fact.doubt < __int_as_float(0x7f800000);
    int64 base = usual ? p.x_rests()[i].lowest + lowest : 0;
    static_cast<int64*>(const_cast<void*>(p.bias))[i] = min(max(base, static_cast<int64>(LOWEST_EXPONENT)), 300ll);
}

// 192 bits in units of the base, two's complement.
struct Wide {
    uint64 limb[3];

    // += value * 2^shift. Returns whether that is an integer and small enough to be sure of it.
    __device__ __forceinline__ bool add(int128 value, int shift) {
        if (value == 0) return true;
        if (shift < 0) {
            if (shift < -110) return false;
            int128 kept = value >> -shift;
            if (kept << -shift != value) return false;
            value = kept, shift = 0;
        }
        if (shift >= 60) return false;  // |value| < 2^125, the sum below 2^187
        uint128 low = static_cast<uint128>(value) << shift;
        uint64 high = static_cast<uint64>(shift ? value >> (128 - shift) : value >> 127);
        uint128 sum = (static_cast<uint128>(limb[1]) << 64 | limb[0]) + low;
        limb[2] += high + (sum < low);
        limb[0] = static_cast<uint64>(sum), limb[1] = static_cast<uint64>(sum >> 64);
        return true;
    }

    template <int W>
    __device__ __forceinline__ uint64 field() const {
        constexpr int at = W * WORD_BITS / 64, r = W * WORD_BITS % 64;
        uint64 bits = limb[at] >> r;
        if constexpr (r + WORD_BITS > 64 && at < 2) bits |= limb[at + 1] << (64 - r);
        return bits & (RADIX - 1);
    }
};

// += (x - X) * other for the terms of which a row of x lost something, in units of 2^base; `whole`: times all of the other
// term, else only times its integer.
__device__ __forceinline__ bool add_rests(
    Wide& sum, const Rests& rests, int count, Terms own, Terms other, int exponent, int other_exponent, bool whole, int base
) {
    double scale = power_of_two(-exponent), other_scale = power_of_two(-other_exponent);
    for (int n = 0; n < count; n++) {
        int k = rests.term[n];
        double term = static_cast<double>(__uint_as_float(own[k])) * scale;
        double rest = term - rint(term);  // exact, of 24 bits at most, below 1
        double factor = static_cast<double>(__uint_as_float(other[k])) * other_scale;
        if (!whole) factor = rint(factor);
        // Both as integers of at most 53 bits with an exponent.
        int rest_exponent, factor_exponent;
        double rest_fraction = frexp(rest, &rest_exponent), factor_fraction = frexp(factor, &factor_exponent);
        int128 product = static_cast<int128>(static_cast<int64>(rest_fraction * 0x1p53))
            * static_cast<int64>(factor_fraction * 0x1p53);
        if (product == 0) continue;
        // Of its 106 bits 29 at least are zeros below; without them it can be moved far enough either way.
        constexpr int ZEROS = 29;
        product >>= ZEROS;
        int shift = rest_exponent - 53 + factor_exponent - 53 + exponent + other_exponent + ZEROS - base;
        if (!sum.add(product, shift)) return false;
    }
    return true;
}

__device__ __noinline__ bool add_all_rests(
    const Product& p, int64 i, int64 j, int x_exponent, int w_exponent, int base, Wide& sum
) {
    const Rests &of_x = p.x_rests()[i], &of_w = p.w_rests()[j];
    int x_count = of_x.count, w_count = of_w.count;
    if (x_count > Rests::MOST || w_count > Rests::MOST) return false;
    Terms x(p.x, p.x_format, i * p.x_row_stride), w(p.w, p.w_format, j * p.w_row_stride);
    Wide total = sum;
    bool fits = add_rests(total, of_x, x_count, x, w, x_exponent, w_exponent, true, base)
        && add_rests(total, of_w, w_count, w, x, w_exponent, x_exponent, false, base);
    sum = total;
    return fits;
}

// The words of one element; returns whether it fits its window. words: how many there are; the others must be zero.
__device__ __forceinline__ bool words_of(
    const Product& p, int64 i, int64 j, const int (&u)[GROUPS], const Row& a, const Row& b, int base, int (&word)[MOST_WORDS]
) {
    const float INFINITE = __int_as_float(0x7f800000);
    Wide sum = {{0, 0, 0}};
    bool fits = a.doubt < INFINITE && b.doubt < INFINITE && sum.add(reconstruct(u), a.exponent + b.exponent - base);
    if (fits && (a.doubt != 0.0f || b.doubt != 0.0f)) fits = add_all_rests(p, i, j, a.exponent, b.exponent, base, sum);
    uint64 carry = 0;
    int64 left = 0;
    unrolled<0, MOST_WORDS>([&](auto index) {
        constexpr int n = decltype(index)::value;
        uint64 field = sum.field<n>() + carry;
        carry = field >= HALF;
        word[n] = static_cast<int>(static_cast<int64>(field) - static_cast<int64>(carry << WORD_BITS));
        if (n >= p.words) left |= word[n];
    });
    // What is above the words of this loop is the sign alone.
    int64 above = static_cast<int64>(sum.limb[2]) >> (MOST_WORDS * WORD_BITS - 128);
    return fits && left == 0 && above + static_cast<int64>(carry) == 0;
}

// What the products left of two neighbouring elements of a lane, as UnitSums has it of all 16.
class PairSums {
    const int8* from;
    int64 units;
#if FLOAT64_RESIDUES
    int2 pairs[GROUPS];

public:
    __device__ __forceinline__ PairSums(const Product& p, int64 unit, int64 units)
        : from(p.products() + unit * UNIT_BYTES + threadIdx.x % 32 * 16), units(units) {}

    // Group of 8 columns, and the lane's first or second row.
    __device__ __forceinline__ void enter(int group, int half) {
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
            pairs[g] = *reinterpret_cast<const int2*>(from + (g * units * 4 + group) * (UNIT_BYTES / 4) + 8 * half);
    }

    template <int V>
    __device__ __forceinline__ void get(int (&u)[GROUPS]) const {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) u[g] = V ? pairs[g].y : pairs[g].x;
    }
#else
    uint32 words[MODULI];

public:
    __device__ __forceinline__ PairSums(const Product& p, int64 unit, int64 units)
        : from(p.products() + unit * 512 + threadIdx.x % 32 * 16), units(units) {}

    __device__ __forceinline__ void enter(int group, int half) {
#pragma unroll
        for (int m = 0; m < MODULI; m++)
            words[m] = half ? words[m] >> 16 : *reinterpret_cast<const uint32*>(from + m * units * 512 + group * 4);
    }

    template <int V>
    __device__ __forceinline__ void get(int (&u)[GROUPS]) const {
        group_sums<V>([&](int m) { return words[m]; }, u);
    }
#endif
};

// Two neighbouring elements of a lane at a time, in a loop that is not unrolled: the code would not fit the caches.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_windowed(const __grid_constant__ Product p) {
    int lane = threadIdx.x % 32, words = static_cast<int>(p.words);
    int64 units = p.padded_rows / 16 * (p.padded_columns / 32);
    int64 unit = (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) / 32;
    if (unit >= units) return;
    UnitPlace place(p, unit);
    uint32 undone = 0;
    if (place.row < p.rows && place.column < p.columns) {
        PairSums sums(p, unit, units);
#pragma unroll 1
        for (int step = 0; step < 8; step++) {
            int group = step / 2, half = step % 2;
            sums.enter(group, half);
            int64 i = place.row + lane / 4 + 8 * half, j = place.column + 8 * group + lane % 4 * 2;
            if (i >= p.rows || j >= p.columns) continue;
            Row a = p.x_facts()[i];
            int base = static_cast<int>(static_cast<const int64*>(p.bias)[i]);
            int word[2][MOST_WORDS];
            bool fits[2] = {true, true};
            unrolled<0, 2>([&](auto parity) {
                constexpr int v = decltype(parity)::value;
                int u[GROUPS];
                sums.template get<v>(u);
                if (j + v < p.columns) fits[v] = words_of(p, i, j + v, u, a, p.w_facts()[j + v], base, word[v]);
            });
            undone |= (static_cast<uint32>(!fits[0]) | static_cast<uint32>(!fits[1]) << 1) << (4 * group + 2 * half);
            int* to = reinterpret_cast<int*>(p.out) + i * p.out_stride + j;
            bool both = j + 1 < p.columns && (reinterpret_cast<uint64>(to) | static_cast<uint64>(p.out_batch_stride * 4)) % 8 == 0;
            auto store = [&](int first, int second) {
                if (both) {
                    int2* at = reinterpret_cast<int2*>(to);
                    int2 before = p.fresh ? make_int2(0, 0) : *at;
                    *at = make_int2(before.x + first, before.y + second);
                } else {
                    to[0] = (p.fresh ? 0 : to[0]) + first;
                    if (j + 1 < p.columns) to[1] = (p.fresh ? 0 : to[1]) + second;
                }
                to += p.out_batch_stride;
            };
#pragma unroll
            for (int n = 0; n < MOST_WORDS; n++)
                if (n < words) store(fits[0] ? word[0][n] : 0, fits[1] ? word[1][n] : 0);
            for (int n = MOST_WORDS; n < words; n++) store(0, 0);
        }
    }
    flag_undone(p, unit, undone);
}
