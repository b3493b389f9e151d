// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// A product as windowed digits (arithmetic/windowed_digits.py), exact: the integers of the cut rows, and beside them the
// few terms of which something was cut off, one by one:
//     sum x w = sum X W + sum of (x - X) w + sum of X (w - W).
// An element that does not fit its window, or has too many such terms, is flagged and left alone: the caller finds out and
// adds it another way.
//
// Launch: residue_windowed_convert as residue_convert, then residue_windowed_bases if the window is to be chosen here
// (THREADS threads, a block for THREADS rows), residue_gemm, residue_windowed (WARPS warps, one a unit).

#include "long_product.cuh"
#include "residue_operands.cuh"
#include "residue_round.cuh"
#include "residue_float64.cuh"

constexpr int WARPS = 4;  // of a block of residue_windowed
constexpr int WORD_BITS = 26;
constexpr int64 RADIX = 1ll << WORD_BITS, HALF = RADIX / 2;

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

// What an element is, in units of the base, in two's complement: 128 bits for most elements, 192 for others. Both have
//     bool set(value, shift): = value * 2^shift;
//     bool add(product, shift): += product * 2^shift, a float64 of at most 50 bits.
// They return whether that is an integer and small enough to be sure of it.
struct Narrow {
    int128 sum = 0;

    // |value| < P / 2 < 2^VALUE_BITS; one bit more is left to the rests, and one is the sign.
    static constexpr int VALUE_BITS = bit_length(product_of_moduli(0, MODULI)) - 1;
    static constexpr int MOST_SHIFT = VALUE_BITS < 125 - 31 ? 31 : 125 - VALUE_BITS;
    static constexpr int WORDS = 5;  // four, and what is above them

    __device__ __forceinline__ bool set(int128 value, int shift) {
        uint32 limb[4];
#pragma unroll
        for (int n = 0; n < 4; n++) limb[n] = static_cast<uint32>(value >> (32 * n));
        int up = max(shift, 0), down = max(-shift, 0);
        bool fits = shift <= MOST_SHIFT && down < 32 && (limb[0] & ((1u << (down & 31)) - 1)) == 0;
#pragma unroll
        for (int n = 0; n < 3; n++) limb[n] = __funnelshift_r(limb[n], limb[n + 1], down);
        limb[3] = static_cast<uint32>(static_cast<int>(limb[3]) >> (down & 31));
#pragma unroll
        for (int n = 3; n > 0; n--) limb[n] = __funnelshift_l(limb[n - 1], limb[n], up);
        limb[0] <<= up & 31;
        sum = static_cast<int128>(static_cast<uint128>(static_cast<uint64>(limb[3]) << 32 | limb[2]) << 64
            | (static_cast<uint64>(limb[1]) << 32 | limb[0]));
        return fits;
    }

    __device__ __forceinline__ bool add(double product, int shift) {
        double scaled = product * power_of_two(shift), upper = rint(scaled * 0x1p-32), lower = scaled - upper * 0x1p32;
        if (!(fabs(scaled) < 0x1p90) || lower != rint(lower)) return false;
        sum += (static_cast<int128>(static_cast<int64>(upper)) << 32) + static_cast<int64>(lower);
        return true;
    }

    // HALF more in each of four words, so that no word borrows from the next.
    __device__ __forceinline__ bool words(int (&word)[WORDS], int count) const {
        constexpr uint128 HALVES = static_cast<uint128>(HALF) * (1 + RADIX) * (1 + static_cast<uint128>(RADIX) * RADIX);
        uint128 raised = static_cast<uint128>(sum) + HALVES;
        unrolled<0, WORDS>([&](auto index) {
            constexpr int n = decltype(index)::value;
            uint64 bits = static_cast<uint64>(raised >> (n * WORD_BITS));
            word[n] = n < WORDS - 1 ? static_cast<int>(bits & (RADIX - 1)) - static_cast<int>(HALF) : static_cast<int>(bits) << 8 >> 8;
        });
        if (count >= WORDS) return true;
        int left = 0;
#pragma unroll
        for (int n = 0; n < WORDS; n++)
            if (n >= count) left |= word[n];
        return left == 0;
    }
};

class Wide {
    uint64 limb[3] = {0, 0, 0};

    template <int W>
    __device__ __forceinline__ uint64 field() const {
        constexpr int at = W * WORD_BITS / 64, r = W * WORD_BITS % 64;
        uint64 bits = limb[at] >> r;
        if constexpr (r + WORD_BITS > 64 && at < 2) bits |= limb[at + 1] << (64 - r);
        return bits & (RADIX - 1);
    }

public:
    static constexpr int WORDS = 7;  // that 192 bits fill

    __device__ __forceinline__ bool set(int128 value, int shift) {
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

    __device__ __forceinline__ bool add(double product, int shift) {
        int exponent;
        double fraction = frexp(product, &exponent);
        constexpr int BITS = 50;
        shift += exponent - BITS;
        int128 value = static_cast<int64>(fraction * (1ll << BITS));
        return shift < 60 ? set(value, shift) : shift < 120 && set(value << 60, shift - 60);
    }

    __device__ __forceinline__ bool words(int (&word)[WORDS], int count) const {
        uint64 carry = 0;
        int64 left = 0;
        unrolled<0, WORDS>([&](auto index) {
            constexpr int n = decltype(index)::value;
            uint64 field = this->field<n>() + carry;
            carry = field >= HALF;
            word[n] = static_cast<int>(static_cast<int64>(field) - static_cast<int64>(carry << WORD_BITS));
            if (n >= count) left |= word[n];
        });
        // What is above the words of this loop is the sign alone.
        int64 above = static_cast<int64>(limb[2]) >> (WORDS * WORD_BITS - 128);
        return left == 0 && above + static_cast<int64>(carry) == 0;
    }
};

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

// What the products left of 16 elements of a lane, by groups of 8 columns in turn: bit v / 2 of an element of a group is its
// row, bit v % 2 its column.
class GroupSums {
    const int8* from;
    int64 plane;
#if FLOAT64_RESIDUES
    int4 fours[GROUPS];

public:
    __device__ __forceinline__ GroupSums(const Product& p, int64 unit, int64 units)
        : from(p.products() + unit * UNIT_BYTES + threadIdx.x % 32 * 16), plane(units * UNIT_BYTES) {
        load();
    }

    __device__ __forceinline__ void load() {
        const int8* at = from;
#pragma unroll
        for (int g = 0; g < GROUPS; g++, at += plane) fours[g] = __ldcs(reinterpret_cast<const int4*>(at));
    }

    __device__ __forceinline__ void next() {
        from += UNIT_BYTES / 4;
        load();
    }

    template <int V>
    __device__ __forceinline__ void get(int (&u)[GROUPS]) const {
#pragma unroll
        for (int g = 0; g < GROUPS; g++) u[g] = V == 0 ? fours[g].x : V == 1 ? fours[g].y : V == 2 ? fours[g].z : fours[g].w;
    }
#else
    uint4 words[MODULI];

public:
    __device__ __forceinline__ GroupSums(const Product& p, int64 unit, int64 units) {
        const int8* at = p.products() + unit * 512 + threadIdx.x % 32 * 16;
#pragma unroll
        for (int m = 0; m < MODULI; m++, at += units * 512) words[m] = __ldcs(reinterpret_cast<const uint4*>(at));
    }

    __device__ __forceinline__ void next() {
#pragma unroll
        for (int m = 0; m < MODULI; m++) words[m] = make_uint4(words[m].y, words[m].z, words[m].w, 0);
    }

    template <int V>
    __device__ __forceinline__ void get(int (&u)[GROUPS]) const {
        group_sums<V>([&](int m) { return words[m].x; }, u);
    }
#endif

    __device__ __forceinline__ int128 value(int v) const {
        int u[GROUPS];
        if (v == 0) get<0>(u);
        else if (v == 1) get<1>(u);
        else if (v == 2) get<2>(u);
        else get<3>(u);
        return reconstruct(u);
    }
};

// Adds the elements of a lane that were passed over, bits as in its flags, to their words; returns those that fit no window.
__device__ __noinline__ uint32 add_rare(const Product& p, int64 unit, int64 units, const UnitPlace& place, uint32 rare) {
    const float INFINITE = __int_as_float(0x7f800000);
    GroupSums sums(p, unit, units);
    uint32 undone = 0;
    int here = 0;
    for (; rare; rare &= rare - 1) {
        int bit = __ffs(static_cast<int>(rare)) - 1, group = bit / 4, v = bit % 4, lane = threadIdx.x % 32;
        for (; here < group; here++) sums.next();
        int64 i = place.row + lane / 4 + v / 2 * 8, j = place.column + 8 * group + lane % 4 * 2 + v % 2;
        Row a = p.x_facts()[i], b = p.w_facts()[j];
        int shift = a.exponent + b.exponent - static_cast<int>(static_cast<const int64*>(p.bias)[i]);
        Wide sum;
        int word[Wide::WORDS];
        bool fits = a.doubt < INFINITE && b.doubt < INFINITE && sum.set(sums.value(v), shift)
            && add_rests(sum, p.x_rests()[i], x_terms(p, i), w_terms(p, j), a.exponent, b.exponent, true, shift)
            && add_rests(sum, p.w_rests()[j], w_terms(p, j), x_terms(p, i), b.exponent, a.exponent, false, shift)
            && sum.words(word, static_cast<int>(p.words));
        undone |= static_cast<uint32>(!fits) << bit;
        int* to = reinterpret_cast<int*>(p.out) + i * p.out_stride + j;
#pragma unroll
        for (int n = 0; n < Wide::WORDS; n++, to += p.out_batch_stride)
            if (fits && n < p.words) *to += word[n];
    }
    return undone;
}

// Writes or adds the words of two neighbours, or of the first alone; `together`: as int2.
__device__ __forceinline__ void store_pair(
    const Product& p, int* to, const int (&first)[Narrow::WORDS], const int (&second)[Narrow::WORDS], bool two, bool together
) {
    int words = static_cast<int>(p.words);
    int64 plane = p.out_batch_stride;
    if (together && p.fresh) {
#pragma unroll
        for (int n = 0; n < Narrow::WORDS; n++, to += plane)
            if (n < words) *reinterpret_cast<int2*>(to) = make_int2(first[n], second[n]);
        for (int n = Narrow::WORDS; n < words; n++, to += plane) *reinterpret_cast<int2*>(to) = make_int2(0, 0);
    } else if (together) {
        int2 before[Narrow::WORDS];
        const int* from = to;
#pragma unroll
        for (int n = 0; n < Narrow::WORDS; n++, from += plane)
            if (n < words) before[n] = *reinterpret_cast<const int2*>(from);
#pragma unroll
        for (int n = 0; n < Narrow::WORDS; n++, to += plane)
            if (n < words) *reinterpret_cast<int2*>(to) = make_int2(before[n].x + first[n], before[n].y + second[n]);
    } else {
#pragma unroll
        for (int n = 0; n < Narrow::WORDS; n++, to += plane) {
            if (n >= words) continue;
            to[0] = (p.fresh ? 0 : to[0]) + first[n];
            if (two) to[1] = (p.fresh ? 0 : to[1]) + second[n];
        }
        if (!p.fresh) return;
        for (int n = Narrow::WORDS; n < words; n++, to += plane) {
            to[0] = 0;
            if (two) to[1] = 0;
        }
    }
}

// Four elements of a lane at a time, in a loop that is not unrolled: the code would not fit the caches. Those that 128 bits
// do not hold come afterwards; zeros are written for them.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 4) residue_windowed(const __grid_constant__ Product p) {
    __shared__ int128 of_rests[WARPS][16][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64 units = p.padded_rows / 16 * (p.padded_columns / 32);
    int64 unit = static_cast<int64>(blockIdx.x) * WARPS + warp;
    if (unit >= units) return;
    UnitPlace place(p, unit);
    uint32 rare = 0;
    if (place.row < p.rows && place.column < p.columns) {
        bool aligned = (reinterpret_cast<uint64>(p.out) | static_cast<uint64>(p.out_stride | p.out_batch_stride) * 4) % 8 == 0;
        GroupSums sums(p, unit, units);
        UnitRests rests(p, place, of_rests[warp]);
        int64 row = place.row + lane / 4, column = place.column + lane % 4 * 2;
        int own[2];  // exponents of the lane's rows, in units of their bases
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int64 i = row + 8 * half;
            own[half] = i < p.rows ? p.x_facts()[i].exponent - static_cast<int>(static_cast<const int64*>(p.bias)[i]) : 0;
        }
#pragma unroll 1
        for (int group = 0; group < 4; group++) {
            int64 j = column + 8 * group;
            if (j >= p.columns) break;
            if (group) sums.next();
            int exponents[2] = {p.w_facts()[j].exponent, p.w_facts()[j + 1].exponent};
            bool two = j + 1 < p.columns;
            unrolled<0, 2>([&](auto of_row) {
                constexpr int half = decltype(of_row)::value;
                int64 i = row + 8 * half;
                if (i >= p.rows) return;
                int word[2][Narrow::WORDS];
                unrolled<0, 2>([&](auto parity) {
                    constexpr int v = decltype(parity)::value;
                    int u[GROUPS];
                    sums.template get<2 * half + v>(u);
                    Narrow sum;
                    bool usual = sum.set(reconstruct(u), own[half] + exponents[v]);
                    usual &= rests.add_to(sum, lane / 4 + 8 * half, lane % 4 * 2 + 8 * group + v);
                    usual &= sum.words(word[v], static_cast<int>(p.words));
                    if (!usual) {
#pragma unroll
                        for (int n = 0; n < Narrow::WORDS; n++) word[v][n] = 0;
                        rare |= static_cast<uint32>(v == 0 || two) << (4 * group + 2 * half + v);
                    }
                });
                int* to = reinterpret_cast<int*>(p.out) + i * p.out_stride + j;
                store_pair(p, to, word[0], word[1], two, aligned && two);
            });
        }
    }
    flag_undone(p, unit, rare ? add_rare(p, unit, units, place, rare) : 0);
}
