// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// windowed digits: from and to full states, carrying, growing, rounding. Mirrors arithmetic/windowed_digits.py.
//
// words: int32 [count, elements], planes `plane` words apart; element e has base bases[e / columns]. Launch: one thread an
// element, but for windowed_needs and windowed_agree.

#include "long_accumulator.cuh"
#include "rounding.cuh"
#include "windowed_rounding.cuh"

constexpr int64 NOTHING = 1 << 20;  // the lowest exponent reported for zeros alone; the highest one is its negative

__device__ __forceinline__ int64 element_index() { return static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x; }

// e / columns, in 32 bits where that is enough: 64-bit division costs more than all else that is done to an element.
__device__ __forceinline__ int64 row_of(int64 e, int64 columns) {
    if ((e | columns) >> 32 == 0) return static_cast<uint32>(e) / static_cast<uint32>(columns);
    return e / columns;
}

__device__ __forceinline__ void load_canonical(const int64* from, int64* state) {
    for (int place = 0; place < NB; place++) state[place] = from[place];
    normalise(state);
}

// 32 bits of a canonical state in two's complement, the sign continued without end.
__device__ __forceinline__ uint32 digit_at(const int64* state, int64 j) {
    if (j < DIGITS) return static_cast<uint32>(state[j]);
    return static_cast<uint32>(j == DIGITS ? state[DIGITS - 1] >> 32 : state[DIGITS - 1] >> 63);
}

__device__ __forceinline__ int64 largest_in_warp(int64 value) {
    for (int distance = 16; distance > 0; distance /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
}

// needs[row] = high, needs[rows + row] = -low: the values of a row are multiples of 2^low, smaller in magnitude than 2^high.
// needs[2 rows] becomes 1 if a state counts special values. Grid (rows, parts); at entry needs holds -NOTHING, last 0.
extern "C" __global__ void windowed_needs(const int64* states, int64 columns, int64* needs) {
    int64 lowest = NOTHING, highest = -NOTHING;
    bool special = false;
    int64 stride = static_cast<int64>(gridDim.y) * blockDim.x;
    for (int64 e = static_cast<int64>(blockIdx.y) * blockDim.x + threadIdx.x; e < columns; e += stride) {
        int64 state[NB];
        load_canonical(states + (blockIdx.x * columns + e) * NB, state);
        for (int place = DIGITS; place < NB; place++) special |= state[place] != 0;
        int j = 0;
        while (j < DIGITS && state[j] == 0) j++;
        if (j == DIGITS) continue;
        lowest = min(lowest, static_cast<int64>(LOWEST_EXPONENT + 32 * j + __ffsll(state[j]) - 1));
        // Two's complement: |value| < 2^(place of the highest bit that differs from the sign, plus one) or equal.
        int64 sign = state[DIGITS - 1] >> 63, differing = state[DIGITS - 1] ^ sign;
        int k = DIGITS - 1;
        while (differing == 0 && k > 0) differing = state[--k] ^ (sign & DIGIT_MASK);
        highest = max(highest, static_cast<int64>(LOWEST_EXPONENT + 32 * k + 64 - __clzll(differing) + (sign ? 1 : 0)));
    }
    lowest = -largest_in_warp(-lowest), highest = largest_in_warp(highest);
    if (threadIdx.x % 32 == 0 && lowest <= highest) {
        atomicMax(needs + blockIdx.x, highest);
        atomicMax(needs + gridDim.x + blockIdx.x, -lowest);
    }
    if (special) needs[2 * gridDim.x] = 1;
}

// What all ranks agreed on: base[row] = low, 0 for a row of zeros; facts: whether special values are counted, the widest row
// in bits (-1: nothing but zeros), minus the lowest base, the highest base. At entry facts holds 0, -1, -NOTHING, -NOTHING.
extern "C" __global__ void windowed_agree(const int64* needs, int64* base, int64* facts, int64 rows) {
    int64 width = -1, minus_lowest = -NOTHING, highest = -NOTHING;
    for (int64 row = element_index(); row < rows; row += static_cast<int64>(gridDim.x) * blockDim.x) {
        int64 high = needs[row], low = -needs[rows + row];
        bool used = low <= high;
        int64 own = used ? low : 0;
        base[row] = own;
        if (used) width = max(width, high - low);
        minus_lowest = max(minus_lowest, -own), highest = max(highest, own);
    }
    width = largest_in_warp(width), minus_lowest = largest_in_warp(minus_lowest), highest = largest_in_warp(highest);
    if (threadIdx.x % 32 == 0) {
        atomicMax(facts + 1, width);
        atomicMax(facts + 2, minus_lowest);
        atomicMax(facts + 3, highest);
    }
    if (element_index() == 0) facts[0] = needs[2 * rows];
}

// words = the values of states; misfits[0] becomes 1 if one lies outside the window. The elements are cut into equal
// shares whose words lie `apart` from each other.
extern "C" __global__ void windowed_from_states(
    const int64* states, int64 columns, const int64* bases, int* words, int64 plane, int64 count, int64 share, int64 apart,
    int64* misfits, int64 elements
) {
    int64 e = element_index();
    if (e >= elements) return;
    int64 cut = row_of(e, share);
    int* target = words + cut * apart + e - cut * share;
    int64 state[NB];
    load_canonical(states + e * NB, state);
    int64 place = bases[row_of(e, columns)] - LOWEST_EXPONENT, j = place >> 5;
    int r = place & 31;
    int64 below = j < DIGITS ? state[j] & ((1ll << r) - 1) : 0;
    for (int k = 0; k < DIGITS && k < j; k++) below |= state[k];
    int64 carry = 0;
    for (int64 word = 0; word < count; word++) {
        uint64 two = static_cast<uint64>(digit_at(state, j + 1)) << 32 | digit_at(state, j);
        int64 field = static_cast<int64>(two >> r & (RADIX - 1)) + carry;
        carry = field >= HALF;
        target[word * plane] = static_cast<int>(field - (carry << WORD_BITS));
        place += WORD_BITS;
        j = place >> 5, r = place & 31;
    }
    // What is left above, sign included, plus the carry, must be nothing.
    uint32 sign = state[DIGITS - 1] < 0 ? ~0u : 0;
    uint32 above = (digit_at(state, j) ^ sign) >> r;
    for (int64 k = j + 1; k <= DIGITS; k++) above |= digit_at(state, k) ^ sign;
    if (below || above || (carry != 0) != (sign != 0)) misfits[0] = 1;
}

// state += the value of element e. Requires: base >= -298; digits of the state move by less than 2^33 a word.
__device__ __forceinline__ void add_words(int64* state, const int* words, int64 plane, int64 count, int64 e, int64 base) {
    int64 place = base - LOWEST_EXPONENT;
    for (int64 word = 0; word < count; word++, place += WORD_BITS) {
        int64 value = words[word * plane + e], j = place >> 5;
        int r = place & 31;
        if (j < DIGITS - 1) {
            state[j] += value << r & DIGIT_MASK;
            state[j + 1] += value << r >> 32;
        } else if (32 * (j - (DIGITS - 1)) + r < 64) {
            // The last digit is exact modulo 2^64, and the whole value fits it.
            state[DIGITS - 1] += static_cast<int64>(static_cast<uint64>(value) << (32 * (j - (DIGITS - 1)) + r));
        }
    }
}

// states [elements, NB] += the values, left canonical.
extern "C" __global__ void windowed_add_to_states(
    const int* words, int64 plane, int64 count, int64 columns, const int64* bases, int64* states, int64 elements
) {
    int64 e = element_index();
    if (e >= elements) return;
    int64 state[NB];
    load_canonical(states + e * NB, state);
    add_words(state, words, plane, count, e, bases[row_of(e, columns)]);
    normalise(state);
    for (int place = 0; place < NB; place++) states[e * NB + place] = state[place];
}

// needs as windowed_needs, of words of any size; none of them is special.
extern "C" __global__ void windowed_needs_of_words(
    const int* words, int64 plane, int64 count, int64 columns, const int64* bases, int64* needs
) {
    int64 lowest = NOTHING, highest = -NOTHING;
    int64 stride = static_cast<int64>(gridDim.y) * blockDim.x;
    for (int64 column = static_cast<int64>(blockIdx.y) * blockDim.x + threadIdx.x; column < columns; column += stride) {
        const int* own = words + blockIdx.x * columns + column;
        int64 carry = 0, top = -NOTHING;
        for (int64 word = 0; word <= count; word++) {
            int64 value = (word < count ? own[word * plane] : 0) + carry;
            carry = (value + HALF) >> WORD_BITS;
            int64 kept = value - (carry << WORD_BITS);
            if (kept == 0) continue;
            int64 place = bases[blockIdx.x] + WORD_BITS * word;
            lowest = min(lowest, place + __ffsll(kept) - 1);
            // The words below the highest one make less than its last place.
            top = place + 64 - __clzll(kept < 0 ? -kept : kept);
        }
        highest = max(highest, top);
    }
    lowest = -largest_in_warp(-lowest), highest = largest_in_warp(highest);
    if (threadIdx.x % 32 == 0 && lowest <= highest) {
        atomicMax(needs + blockIdx.x, highest);
        atomicMax(needs + gridDim.x + blockIdx.x, -lowest);
    }
}

// out = the values of words of any size on bases that are smaller by lower_by[row], in normal form; misfits[0] becomes 1 if
// out_count words do not hold one, above or below.
extern "C" __global__ void windowed_grow(
    const int* words, int64 plane, int64 count, int64 columns, const int64* lower_by, int* out, int64 out_plane,
    int64 out_count, int64* misfits, int64 elements
) {
    int64 e = element_index();
    if (e >= elements) return;
    int64 shift = lower_by[row_of(e, columns)];
    int r = static_cast<int>(shift % WORD_BITS);
    if (r < 0) r += WORD_BITS;
    int64 skipped = (shift - r) / WORD_BITS;  // below 0 where the base rises
    bool misfit = false;
    for (int64 word = 0; word < min(skipped, out_count); word++) out[word * out_plane + e] = 0;
    int64 carry = 0;  // |value| < 2^31 * 2^25 and |carry| < 2^32
    for (int64 word = 0; word < max(count, out_count - skipped); word++) {
        int64 value = carry + (word < count ? static_cast<int64>(words[word * plane + e]) << r : 0);
        carry = (value + HALF) >> WORD_BITS;
        int64 kept = value - (carry << WORD_BITS);
        int64 to = word + skipped;
        if (0 <= to && to < out_count) out[to * out_plane + e] = static_cast<int>(kept);
        else misfit |= kept != 0;
    }
    if (misfit || carry) misfits[0] = 1;
}

// Carries in place: words below the last come into [-2^25, 2^25). overflows[0] becomes 1 if a last one is outside.
// Requires: |words| < 2^31 - 2^7.
extern "C" __global__ void windowed_carry(int* words, int64 plane, int64 count, int64* overflows, int64 elements) {
    int64 e = element_index();
    if (e >= elements) return;
    int64 carry = 0;
    for (int64 word = 0; word < count; word++) {
        int64 value = words[word * plane + e] + carry;
        carry = (value + HALF) >> WORD_BITS;
        words[word * plane + e] = static_cast<int>(word < count - 1 ? value - (carry << WORD_BITS) : value);
    }
    if (carry) overflows[0] = 1;
}

// The bits of magnitude * 2^base / denominator, rounded once.
__device__ __forceinline__ uint32 quotient_bits(
    const Magnitude& magnitude, int base, int64 denominator, const Divisor& divisor, const Format& format
) {
    if (magnitude.value == 0) return 0;
    Leading kept = leading(magnitude.value, base + WORD_BITS * magnitude.word);
    if (denominator != 1) kept = divided(kept, divisor);
    return rounded(kept, format) | (magnitude.negative ? format.sign_bit() : 0);
}

// out[e] = (the sum over operands of their values of element e) / denominator, rounded once.
// words, plane, distance, table, operands: the Operands, which share count and bases; normal, inverse, shift: the Divisor of
// `denominator`. Requires: 1 <= denominator < 2^31, 1 <= operands < 2^16, |words| <= 2^31, 1 <= count <= 4.
extern "C" __global__ void windowed_round(
    const int* words, int64 plane, int64 distance, const int64* table, int64 operands, int64 count, int64 columns,
    const int64* bases, void* out, int64 out_format, int64 denominator, int64 normal, int64 inverse, int64 shift,
    int64 elements
) {
    int64 e = element_index();
    if (e >= elements) return;
    int code = static_cast<int>(out_format);
    Format format = format_of(code);
    Operands from{words, plane, distance, table, operands};
    __int128 value = count == 3 ? added_up<3>(from, e) : count == 4 ? added_up<4>(from, e) :
        count == 2 ? added_up<2>(from, e) : added_up<1>(from, e);
    bool negative = value < 0;
    unsigned __int128 magnitude = negative ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
    Divisor divisor{static_cast<uint32>(normal), static_cast<uint32>(inverse), static_cast<int>(shift)};
    Magnitude whole{magnitude, 0, negative};
    store_bits(out, e, code, quotient_bits(whole, static_cast<int>(bases[row_of(e, columns)]), denominator, divisor, format));
}

// The same for 5 to 8 words.
extern "C" __global__ void windowed_round_eight(
    const int* words, int64 plane, int64 distance, const int64* table, int64 operands, int64 count, int64 columns,
    const int64* bases, void* out, int64 out_format, int64 denominator, int64 normal, int64 inverse, int64 shift,
    int64 elements
) {
    int64 e = element_index();
    if (e >= elements) return;
    int code = static_cast<int>(out_format);
    Operands from{words, plane, distance, table, operands};
    Magnitude found = count == 5 ? leading_words<5>(from, e) : count == 6 ? leading_words<6>(from, e) :
        count == 7 ? leading_words<7>(from, e) : leading_words<8>(from, e);
    Divisor divisor{static_cast<uint32>(normal), static_cast<uint32>(inverse), static_cast<int>(shift)};
    int base = static_cast<int>(bases[row_of(e, columns)]);
    store_bits(out, e, code, quotient_bits(found, base, denominator, divisor, format_of(code)));
}

// The same for any count.
extern "C" __global__ void windowed_round_long(
    const int* words, int64 plane, int64 distance, const int64* table, int64 operands, int64 count, int64 columns,
    const int64* bases, void* out, int64 out_format, int64 denominator, int64 elements
) {
    int64 e = element_index();
    if (e >= elements) return;
    int code = static_cast<int>(out_format);
    Operands from{words, plane, distance, table, operands};
    int exponent = static_cast<int>(bases[row_of(e, columns)]);
    int64 state[NB] = {};
    for (int64 i = 0; i < operands; i++) add_words(state, from.begin(i), from.plane_of(i), count, e, exponent);
    store_bits(out, e, code, finalize(state, denominator, format_of(code)));
}
