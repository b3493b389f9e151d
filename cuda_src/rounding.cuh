// The one rounding: digits / denominator to bits of the nearest float, ties to even. Mirrors arithmetic/rounding.py.
#pragma once

#include "formats.cuh"

constexpr int WORD_COUNT = DIGITS + 2;  // any int64 digit 17, the carry into it, and the sign

// Writes |value of the digits| as little-endian 32-bit words and returns whether the value is negative.
// Requires: nothing; every int64 state is accepted.
// Ensures: sum of words[j] * 2^(32j) = |sum of digits[j] * 2^(32j)| < 2^(32 * WORD_COUNT - 1).
__device__ inline bool magnitude_words(const int64* digits, uint32* words) {
    int64 carry = 0;  // |carry| <= 2^31 + 1
    for (int j = 0; j < DIGITS; j++) {
        int64 low = (digits[j] & DIGIT_MASK) + carry;
        carry = (digits[j] >> DIGIT_BITS) + (low >> DIGIT_BITS);
        words[j] = static_cast<uint32>(low);
    }
    words[DIGITS] = static_cast<uint32>(carry);
    words[DIGITS + 1] = static_cast<uint32>(carry >> DIGIT_BITS);
    bool negative = carry < 0;
    if (negative) {  // two's complement: -v = ~v + 1
        uint64 one = 1;
        for (int j = 0; j < WORD_COUNT; j++) {
            one += static_cast<uint32>(~words[j]);
            words[j] = static_cast<uint32>(one);
            one >>= DIGIT_BITS;
        }
    }
    return negative;
}

__device__ inline int length_in_bits(const uint32* words) {
    for (int j = WORD_COUNT - 1; j >= 0; j--)
        if (words[j]) return DIGIT_BITS * j + 32 - __clz(static_cast<int>(words[j]));
    return 0;
}

// floor(words / 2^position) mod 2^32.
// Requires: position >= 0.
__device__ inline uint32 word_at(const uint32* words, int position) {
    int j = position / DIGIT_BITS;
    uint64 low = j < WORD_COUNT ? words[j] : 0;
    uint64 high = j + 1 < WORD_COUNT ? words[j + 1] : 0;
    return static_cast<uint32>((high << DIGIT_BITS | low) >> (position % DIGIT_BITS));
}

__device__ inline bool any_bit_below(const uint32* words, int position) {
    uint32 bits = 0;
    for (int j = 0; j < WORD_COUNT && j < position / DIGIT_BITS; j++) bits |= words[j];
    return bits || word_at(words, position / DIGIT_BITS * DIGIT_BITS) & ((1u << position % DIGIT_BITS) - 1);
}

// The float nearest to (quotient + fraction) * 2^exponent, as bits without sign; 0 <= fraction < 1.
// inexact says whether fraction > 0.
// Requires: quotient < 2^(significand_bits + 2); exponent = lowest_exponent - 1, or else exponent >= lowest_exponent
//           and quotient >= 2^significand_bits.
// Ensures: one rounding, ties to even, subnormals kept, overflow to infinity.
__device__ inline uint32 round_significand(uint32 quotient, bool inexact, int exponent, Format format) {
    int length = 32 - __clz(static_cast<int>(quotient));
    int result_exponent = max(exponent + length - format.significand_bits, format.lowest_exponent());
    int dropped = result_exponent - exponent;  // 1 or 2 bits
    uint32 kept = quotient >> dropped;
    uint32 rest = quotient & ((1u << dropped) - 1);
    uint32 half = 1u << (dropped - 1);
    if (rest > half || (rest == half && (inexact || (kept & 1)))) kept += 1;
    // The hidden bit of a normal significand, and a carry out of the rounding, step the exponent field by themselves.
    uint64 bits = (static_cast<uint64>(result_exponent - format.lowest_exponent()) << format.fraction_bits()) + kept;
    return bits < format.infinity_bits() ? static_cast<uint32>(bits) : format.infinity_bits();
}

// |value| / denominator rounded to bits without sign: the quotient bits that the rounding needs, the rest as one flag.
// Requires: value = words * 2^-298 > 0; 1 <= denominator < 2^63.
__device__ inline uint32 round_integer(const uint32* words, uint64 denominator, Format format) {
    int top = length_in_bits(words) - 1 + LOWEST_EXPONENT;  // 2^top <= value < 2^(top + 1)
    int denominator_length = 64 - __clzll(static_cast<int64>(denominator));
    // value / denominator lies in (2^(top - length), 2^(top - length + 2)): with this exponent the quotient has
    // significand_bits + 1 or significand_bits + 2 bits, fewer only where the format's own last place limits it.
    int exponent = max(top - denominator_length - format.significand_bits, format.lowest_exponent() - 1);
    int shift = exponent - LOWEST_EXPONENT;  // >= 148
    int quotient_bits = format.significand_bits + 2;
    int start = shift + quotient_bits;
    // floor(value / 2^exponent) / denominator by long division. Invariant: remainder < denominator.
    uint64 remainder = static_cast<uint64>(word_at(words, start + DIGIT_BITS)) << DIGIT_BITS | word_at(words, start);
    uint32 quotient = 0;
    for (int i = quotient_bits - 1; i >= 0; i--) {
        remainder = remainder << 1 | (word_at(words, shift + i) & 1);
        quotient <<= 1;
        if (remainder >= denominator) {
            remainder -= denominator;
            quotient |= 1;
        }
    }
    return round_significand(quotient, remainder != 0 || any_bit_below(words, shift), exponent, format);
}

// The contract's value of a state over an integer, one rounding.
// Requires: 0 <= denominator < 2^63; digits in any state.
// Ensures: NaN is canonical; an exact zero is +0; 0/0 is NaN, x/0 a signed infinity.
__device__ inline uint32 finalize(const int64* digits, uint64 denominator, Format format) {
    bool positive_infinity = digits[POSITIVE_INFINITY_PLACE] != 0;
    bool negative_infinity = digits[NEGATIVE_INFINITY_PLACE] != 0;
    if (digits[NAN_PLACE] != 0 || (positive_infinity && negative_infinity)) return format.nan_bits();
    if (positive_infinity) return format.infinity_bits();
    if (negative_infinity) return format.infinity_bits() | format.sign_bit();
    uint32 words[WORD_COUNT];
    bool negative = magnitude_words(digits, words);
    bool zero = length_in_bits(words) == 0;
    if (denominator == 0 && zero) return format.nan_bits();
    if (zero) return 0;
    uint32 bits = denominator == 0 ? format.infinity_bits() : round_integer(words, denominator, format);
    return negative ? bits | format.sign_bit() : bits;
}
