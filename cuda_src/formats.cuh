// The formats and the places of digits: two numbers define a format, the rest follows. Mirrors arithmetic/formats.py.
#pragma once

using int64 = long long;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// A binary format. A finite value is significand * 2^exponent with an integer significand.
struct Format {
    int significand_bits;  // the hidden bit included
    int exponent_bits;

    __device__ constexpr int bits() const { return significand_bits + exponent_bits; }
    __device__ constexpr int fraction_bits() const { return significand_bits - 1; }
    __device__ constexpr uint32 exponent_mask() const { return (1u << exponent_bits) - 1; }
    // The exponent of the smallest subnormal, and the power of two above every finite value.
    __device__ constexpr int lowest_exponent() const { return 3 - (1 << (exponent_bits - 1)) - significand_bits; }
    __device__ constexpr int top_exponent() const { return 1 << (exponent_bits - 1); }
    __device__ constexpr uint32 sign_bit() const { return 1u << (bits() - 1); }
    __device__ constexpr uint32 infinity_bits() const { return exponent_mask() << fraction_bits(); }
    __device__ constexpr uint32 nan_bits() const { return infinity_bits() | 1u << (fraction_bits() - 1); }
};

// Codes of the formats, as the launchers pass them: 0 float32, 1 bfloat16, 2 float16.
constexpr int FLOAT32 = 0;
constexpr int BFLOAT16 = 1;
constexpr int FLOAT16 = 2;

__device__ constexpr Format format_of(int code) {
    return code == FLOAT32 ? Format{24, 8} : code == BFLOAT16 ? Format{8, 8} : Format{11, 5};
}

// Places of an accumulator: digit j weighs 2^(DIGIT_BITS * j + LOWEST_EXPONENT), the last digit is signed; then three
// counts of the terms that are no numbers.
constexpr int DIGIT_BITS = 32;
constexpr int64 DIGIT_MASK = (1ll << DIGIT_BITS) - 1;
constexpr int LOWEST_EXPONENT = 2 * format_of(FLOAT32).lowest_exponent();
constexpr int DIGITS = (2 * format_of(FLOAT32).top_exponent() - LOWEST_EXPONENT + DIGIT_BITS - 1) / DIGIT_BITS;
constexpr int NAN_PLACE = DIGITS;
constexpr int POSITIVE_INFINITY_PLACE = DIGITS + 1;
constexpr int NEGATIVE_INFINITY_PLACE = DIGITS + 2;
constexpr int NB = DIGITS + 3;

static_assert(LOWEST_EXPONENT == -298 && NB == 21, "the digits of the contract, version 1");

// A float taken apart: value = (negative ? -1 : 1) * significand * 2^exponent if it is FINITE.
enum Kind { FINITE, INFINITE, NOT_A_NUMBER };
struct Term {
    uint32 significand;
    int exponent;
    bool negative;
    Kind kind;
};

// Requires: bits < 2^format.bits().
// Ensures: significand < 2^significand_bits; lowest_exponent <= exponent <= top_exponent - significand_bits; exact.
__device__ inline Term decode(uint32 bits, Format format) {
    uint32 fraction = bits & ((1u << format.fraction_bits()) - 1);
    uint32 field = bits >> format.fraction_bits() & format.exponent_mask();
    bool negative = bits & format.sign_bit();
    if (field == format.exponent_mask()) return {fraction, 0, negative, fraction ? NOT_A_NUMBER : INFINITE};
    if (field == 0) return {fraction, format.lowest_exponent(), negative, FINITE};
    int exponent = format.lowest_exponent() + static_cast<int>(field) - 1;
    return {fraction | 1u << format.fraction_bits(), exponent, negative, FINITE};
}

__device__ inline uint32 load_bits(const void* data, int64 index, int code) {
    return code == FLOAT32 ? static_cast<const uint32*>(data)[index] : static_cast<const unsigned short*>(data)[index];
}

// The pattern of a float32 with the same value.
__device__ inline uint32 float32_bits(uint32 bits, int code) {
    if (code == FLOAT32) return bits;
    if (code == BFLOAT16) return bits << 16;
    uint32 wide;
    asm("cvt.f32.f16 %0, %1;" : "=r"(wide) : "h"(static_cast<unsigned short>(bits)));
    return wide;
}

__device__ inline void store_bits(void* data, int64 index, int code, uint32 bits) {
    if (code == FLOAT32) static_cast<uint32*>(data)[index] = bits;
    else static_cast<unsigned short*>(data)[index] = static_cast<unsigned short>(bits);
}

__device__ inline Term load_term(const void* data, int64 index, int code) {
    return decode(load_bits(data, index, code), format_of(code));
}
