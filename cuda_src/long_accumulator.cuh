// The long accumulator: digits that take products exactly, in any order. Mirrors arithmetic/long_accumulator.py.
#pragma once

#include "formats.cuh"

// The digits of one thread in shared memory, neighbouring threads side by side: digits[place] without bank conflicts.
template <int STRIDE>
struct DigitColumn {
    int64* first;
    __device__ int64& operator[](int place) const { return first[place * STRIDE]; }
};

// Adds significand * 2^exponent, negated if asked, to three neighbouring digits.
// Requires: significand < 2^64; -298 <= exponent; the integer ends below digit DIGITS, or its upper digits are zero.
// Ensures: the value of the digits grows by exactly that; each digit moves by less than 2^32, so canonical digits take
//          2^31 - 1 such additions before a carry pass is due.
template <class Digits>
__device__ inline void add_integer(Digits digits, uint64 significand, int exponent, bool negative) {
    int shift = exponent - LOWEST_EXPONENT;
    int place = shift / DIGIT_BITS;
    int offset = shift % DIGIT_BITS;
    uint64 low = significand << offset;                                // bits 0..63 of significand * 2^offset
    uint64 high = significand >> DIGIT_BITS >> (DIGIT_BITS - offset);  // bits 64..78
    int64 sign = negative ? -1 : 1;
    digits[place] += sign * static_cast<int64>(low & DIGIT_MASK);
    digits[place + 1] += sign * static_cast<int64>(low >> DIGIT_BITS);
    digits[place + 2] += sign * static_cast<int64>(high);
}

// Adds the exact product x * w. NaN, and infinity times zero, count as NaN terms; other infinities by their sign.
// Requires: x and w decoded from float32, bfloat16 or float16.
template <class Digits>
__device__ inline void add_product(Digits digits, Term x, Term w) {
    bool negative = x.negative != w.negative;
    if (x.kind == FINITE && w.kind == FINITE) {
        uint64 significand = static_cast<uint64>(x.significand) * w.significand;  // < 2^48
        if (significand) add_integer(digits, significand, x.exponent + w.exponent, negative);
        return;
    }
    bool is_nan = x.kind == NOT_A_NUMBER || w.kind == NOT_A_NUMBER
        || (x.kind == FINITE && x.significand == 0) || (w.kind == FINITE && w.significand == 0);
    digits[is_nan ? NAN_PLACE : negative ? NEGATIVE_INFINITY_PLACE : POSITIVE_INFINITY_PLACE] += 1;
}

// Adds one exact value: its product with one.
template <class Digits>
__device__ inline void add_term(Digits digits, Term x) { add_product(digits, x, Term{1, 0, false, FINITE}); }

// Carries, low digit to high.
// Requires: |digits[17]| < 2^62.
// Ensures: the same value; digits 0..16 in [0, 2^32), digit 17 holds the sign. That form is unique: canonical.
__device__ inline void normalise(int64* digits) {
    int64 carry = 0;  // |carry| <= 2^31 + 1
    for (int j = 0; j < DIGITS - 1; j++) {
        int64 low = (digits[j] & DIGIT_MASK) + carry;
        carry = (digits[j] >> DIGIT_BITS) + (low >> DIGIT_BITS);
        digits[j] = low & DIGIT_MASK;
    }
    digits[DIGITS - 1] += carry;
}

// Integer atomics: the order in which warps arrive cannot be seen in the sum.
__device__ inline void add_digit_atomically(int64* digit, int64 amount) {
    atomicAdd(reinterpret_cast<uint64*>(digit), static_cast<uint64>(amount));
}
