// Rounding a number that is known up to a bound: the bits of the nearest float, if the bound leaves no doubt about them.
#pragma once

#include "formats.cuh"

// (value + error) * 2^exponent with |error| <= doubt, rounded once, ties to even. Returns whether the rounding is the
// same for every such error; only then `bits` is meant. doubt = 0: always decided. An infinite or NaN doubt: never.
// Requires: |value| < 2^127; doubt < 2^90 or infinite or NaN.
//
// With |value| = top + fraction in units of 2^shift, top of 64 bits: `dropped` bits of top go. The number may lie
// anywhere in (top - d, top + d), d = floor(doubt) + 2 in those units. Roundings change at midpoints of neighbouring
// floats: `half` above the kept bits, or half / 2 below them where they are a power of two. d < 2^38 <= half / 2, so only
// the first midpoint can be near; nor can the sign change, since top >= 2^63.
__device__ __forceinline__ bool round_within(
    __int128 value, int exponent, float doubt, Format format, uint32& bits
) {
    constexpr float LARGEST_DOUBT = 137438953472.0f;  // 2^37
    bool negative = value < 0;
    unsigned __int128 magnitude = negative ? -static_cast<unsigned __int128>(value) : static_cast<unsigned __int128>(value);
    uint64 high = static_cast<uint64>(magnitude >> 64);
    uint64 low = static_cast<uint64>(magnitude);
    bits = 0;
    if ((high | low) == 0) return doubt == 0.0f;
    int length = high ? 128 - __clzll(static_cast<int64>(high)) : 64 - __clzll(static_cast<int64>(low));
    int shift = length - 64;
    uint64 top;
    bool inexact = false;
    if (shift > 0) {  // shift < 64
        top = high << (64 - shift) | low >> shift;
        inexact = (low << (64 - shift)) != 0;
    } else {
        top = low << -shift;
    }
    int last_place = exponent + shift;
    uint32 sign = negative ? format.sign_bit() : 0;
    int dropped = max(64 - format.significand_bits, format.lowest_exponent() - last_place);
    if (dropped > 64) {  // below half of the smallest subnormal
        bits = sign;
        return doubt == 0.0f;
    }
    uint64 half = 1ull << (dropped - 1);
    uint64 rest = top & (half | (half - 1));
    uint64 kept = dropped == 64 ? 0 : top >> dropped;
    if (!(doubt == 0.0f)) {
        float scaled = ldexpf(doubt, -shift);
        if (!(scaled < LARGEST_DOUBT)) return false;
        uint64 distance = rest > half ? rest - half : half - rest;
        if (distance <= static_cast<uint64>(scaled) + 2) return false;
    }
    if (rest > half || (rest == half && (inexact || (kept & 1)))) kept += 1;
    uint64 pattern = (static_cast<uint64>(last_place + dropped - format.lowest_exponent()) << format.fraction_bits()) + kept;
    bits = sign | (pattern < format.infinity_bits() ? static_cast<uint32>(pattern) : format.infinity_bits());
    return true;
}
