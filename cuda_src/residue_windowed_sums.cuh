// An element of a product as an integer in units of its base, and as words.
#pragma once

#include "residue.cuh"
#include "words.cuh"

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
