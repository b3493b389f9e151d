// From sums of words to one rounded float: words added up in 128 bits, divided by multiplication, rounded in 64 bits.
// Mirrors kernels/cpu/native/windowed_rounding.py.

#pragma once

#include "words.cuh"

// A divisor below 2^31 for division by multiplication (Moeller, Granlund, "Improved division by invariant integers", 2011):
// normal = divisor * 2^shift in [2^31, 2^32), inverse = floor((2^64 - 1) / normal) - 2^32.
struct Divisor {
    uint32 normal, inverse;
    int shift;
};

// (high 2^32 + low) / normal; `high` becomes the remainder. Requires: high < normal.
__device__ __forceinline__ uint32 divide_two(uint32& high, uint32 low, Divisor divisor) {
    uint64 estimate = static_cast<uint64>(divisor.inverse) * high + (static_cast<uint64>(high) << 32 | low);
    uint32 quotient = static_cast<uint32>(estimate >> 32) + 1, remainder = low - quotient * divisor.normal;
    if (remainder > static_cast<uint32>(estimate)) quotient--, remainder += divisor.normal;
    if (remainder >= divisor.normal) quotient++, remainder -= divisor.normal;
    high = remainder;
    return quotient;
}

// A magnitude as far as a rounding looks: top * 2^exponent, top >= 2^63, its last bit set if anything below was cut.
struct Leading {
    uint64 top;
    int exponent;
};

// Requires: magnitude != 0.
__device__ __forceinline__ Leading leading(unsigned __int128 magnitude, int exponent) {
    uint64 high = static_cast<uint64>(magnitude >> 64), low = static_cast<uint64>(magnitude);
    if (high == 0) high = low, low = 0, exponent -= 64;
    int moved = __clzll(static_cast<int64>(high));
    if (moved) high = high << moved | low >> (64 - moved), low <<= moved;
    return {high | (low != 0), exponent + 64 - moved};
}

// The magnitude divided: 31 bits of the quotient and whether there is more are enough for every format.
__device__ __forceinline__ Leading divided(Leading value, Divisor divisor) {
    uint32 remainder = static_cast<uint32>(value.top >> 33);  // below 2^31, so below the divisor
    uint32 quotient = divide_two(remainder, static_cast<uint32>(value.top >> 1), divisor);  // at least 2^30
    bool more = remainder != 0 || (value.top & 1);
    int moved = __clz(static_cast<int>(quotient));
    uint64 top = static_cast<uint64>(quotient) << (32 + moved) | more;
    return {top, value.exponent + 1 + divisor.shift - 32 - moved};
}

// The pattern of a magnitude, rounded once.
__device__ __forceinline__ uint32 rounded(Leading value, Format format) {
    int dropped = max(64 - format.significand_bits, format.lowest_exponent() - value.exponent);
    if (dropped > 64) return 0;  // below half of the smallest subnormal
    uint64 half = 1ull << (dropped - 1), rest = value.top & (half | (half - 1));
    uint64 kept = dropped == 64 ? 0 : value.top >> dropped;
    kept += rest > half || (rest == half && (kept & 1));
    int above = value.exponent + dropped - format.lowest_exponent();
    uint64 pattern = (static_cast<uint64>(above) << format.fraction_bits()) + kept;
    return pattern < format.infinity_bits() ? static_cast<uint32>(pattern) : format.infinity_bits();
}

// Operand i begins `distance` words behind operand i - 1; or, where `table` is not null, at table[2 i] with planes
// table[2 i + 1] apart.
struct Operands {
    const int* words;
    int64 plane, distance;
    const int64* table;
    int64 count;

    __device__ __forceinline__ const int* begin(int64 i) const {
        return table ? reinterpret_cast<const int*>(table[2 * i]) : words + i * distance;
    }
    __device__ __forceinline__ int64 plane_of(int64 i) const { return table ? table[2 * i + 1] : plane; }
};

// The sum over operands of element e, as a multiple of 2^base. Ensures: |value| < 2^(31 + 16 + 78 + 1).
template <int COUNT>
__device__ __forceinline__ __int128 added_up(const Operands& from, int64 e) {
    int64 sums[COUNT] = {};
#pragma unroll 1
    for (int64 i = 0; i < from.count; i++) {
        const int* begin = from.begin(i) + e;
        int64 plane = from.plane_of(i);
#pragma unroll
        for (int word = 0; word < COUNT; word++) sums[word] += begin[word * plane];
    }
    __int128 value = sums[COUNT - 1];
#pragma unroll
    for (int word = COUNT - 2; word >= 0; word--) value = (value << WORD_BITS) + sums[word];
    return value;
}

// A magnitude as a rounding needs it: value * 2^(WORD_BITS * word), the last bit of `value` set if anything below was cut.
struct Magnitude {
    unsigned __int128 value;
    int word;
    bool negative;
};

// The sum over operands of element e for more words than 128 bits hold, in units of 2^base.
template <int COUNT>
__device__ __forceinline__ Magnitude leading_words(const Operands& from, int64 e) {
    int64 sums[COUNT] = {};
#pragma unroll 1
    for (int64 i = 0; i < from.count; i++) {
        const int* begin = from.begin(i) + e;
        int64 plane = from.plane_of(i);
#pragma unroll
        for (int word = 0; word < COUNT; word++) sums[word] += begin[word * plane];
    }
    // Two's complement of digits in [0, 2^26), continued by the last carry.
    int64 carry = 0;
#pragma unroll
    for (int word = 0; word < COUNT; word++) {
        int64 sum = sums[word] + carry;
        carry = sum >> WORD_BITS;
        sums[word] = sum & (RADIX - 1);
    }
    bool negative = carry < 0;
    if (negative) {
        int64 one = 1;
#pragma unroll
        for (int word = 0; word < COUNT; word++) {
            int64 digit = (RADIX - 1 - sums[word]) + one;
            one = digit >> WORD_BITS;
            sums[word] = digit & (RADIX - 1);
        }
        carry = ~carry + one;
    }
    unsigned __int128 value = static_cast<unsigned __int128>(carry);
    int last = COUNT;
    bool cut = false;
#pragma unroll
    for (int word = COUNT - 1; word >= 0; word--) {
        if (value >> (127 - WORD_BITS) == 0) value = value << WORD_BITS | static_cast<uint64>(sums[word]), last = word;
        else cut |= sums[word] != 0;
    }
    return {value | cut, last, negative};
}
