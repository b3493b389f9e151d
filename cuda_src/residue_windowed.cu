// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// A product as windowed digits (arithmetic/windowed_digits.py), exact: the integers of the cut rows, and beside them the
// few terms of which something was cut off, one by one:
//     sum x w = sum X W + sum of (x - X) w + sum of X (w - W).
// An element that does not fit its window, or has too many such terms, is flagged and left alone: the caller finds out and
// adds it another way.
//
// Launch: residue_windowed_convert as residue_convert, then residue_windowed_bases if the window is to be chosen here
// (THREADS threads, a block for THREADS rows), residue_gemm, residue_windowed (WARPS warps, one a unit).

#include "residue_operands.cuh"
#include "residue_float64.cuh"
#include "residue_windowed_rests.cuh"

constexpr int WARPS = 4;  // of a block of residue_windowed
constexpr int NO_ROW = 1 << 20;
constexpr int MARGIN = 8;  // bits that a new window reaches further down: the next product may have smaller terms

extern "C" __global__ void __launch_bounds__(THREADS, FLOAT64_RESIDUES ? 2 : 4) residue_windowed_convert(const __grid_constant__ Product p) {
    if (blockIdx.x == 0 && threadIdx.x < 2) p.flagged()[threadIdx.x] = 0;
    convert_block<true>(p, blockIdx.x);
}

__device__ __forceinline__ bool is_usual(const Row& fact) {
    return fact.largest != 0.0f && fact.doubt < __int_as_float(0x7f800000);
}

// The smallest `lowest` of usual rows, NO_ROW if there are none. The whole block calls it.
__device__ __forceinline__ int lowest_of(const Row* facts, const Rests* rests, int64 count) {
    __shared__ int shared[THREADS / 32];
    int lowest = NO_ROW;
#pragma unroll 8
    for (int64 j = threadIdx.x; j < count; j += THREADS)
        if (is_usual(facts[j])) lowest = min(lowest, rests[j].lowest);
    for (int distance = 16; distance > 0; distance /= 2) lowest = min(lowest, __shfl_xor_sync(ALL_LANES, lowest, distance));
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = lowest;
    __syncthreads();
    for (int warp = 0; warp < THREADS / 32; warp++) lowest = min(lowest, shared[warp]);
    __syncthreads();
    return lowest;
}

// bases[i] = MARGIN below the exponent of which every product of row i is a multiple, as far as the cut rows and their rests
// tell. A row of zeros gets the lowest base of all: the next product may have more there.
extern "C" __global__ void __launch_bounds__(THREADS) residue_windowed_bases(const __grid_constant__ Product p) {
    int lowest = lowest_of(p.w_facts(), p.w_rests(), p.columns), lowest_row = lowest_of(p.x_facts(), p.x_rests(), p.rows);
    int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    if (i >= p.rows) return;
    int own = is_usual(p.x_facts()[i]) ? p.x_rests()[i].lowest : lowest_row;
    int64 base = lowest < NO_ROW && own < NO_ROW ? own + lowest - MARGIN : 0;
    static_cast<int64*>(const_cast<void*>(p.bias))[i] = min(max(base, static_cast<int64>(LOWEST_EXPONENT)), 300ll);
}

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
