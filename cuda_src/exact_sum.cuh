// Exact sums of floats and of products, sixteen terms at a time: float64 adds what it can hold, digits take the rest.
//
// A thread keeps an exact float64 sum of terms near one `anchor` exponent, and brings it into its digits when that sum is
// full or the terms leave the anchor's reach. Which terms meet in a thread cannot be seen in the digits' value.
#pragma once

#include "long_accumulator.cuh"

constexpr int TERMS = 16;
constexpr uint32 FLOAT32_INFINITY = 0x7f800000;

__device__ __forceinline__ double value_of(uint32 bits) { return static_cast<double>(__uint_as_float(bits)); }

// digits += a float64 that is a multiple of 2^-298 and below 2^270. Each digit moves by less than 2^32.
template <class Digits>
__device__ __forceinline__ void add_float64(Digits digits, double sum) {
    if (sum == 0.0) return;
    uint64 pattern = static_cast<uint64>(__double_as_longlong(sum));  // a normal number
    uint64 significand = (pattern & ((1ull << 52) - 1)) | 1ull << 52;
    int exponent = static_cast<int>(pattern >> 52 & 0x7ff) - 1075;
    int below = max(LOWEST_EXPONENT - exponent, 0);  // zeros
    add_integer(digits, significand >> below, exponent + below, sum < 0.0);
}

// Terms by value: an argument of a function that is not inlined, without a place in memory on the usual way.
struct Sixteen {
    uint32 bits[TERMS];
    __device__ __forceinline__ explicit Sixteen(const uint32 (&from)[TERMS]) {
#pragma unroll
        for (int v = 0; v < TERMS; v++) bits[v] = from[v];
    }
};

template <class Digits>
__device__ __noinline__ void add_some_alone(Digits digits, Sixteen terms, uint32 chosen) {
    for (int v = 0; v < TERMS; v++)
        if (chosen >> v & 1) add_term(digits, decode(terms.bits[v], format_of(FLOAT32)));
}

// digits += sum of the floats: in float64 those within 2^24 of the largest, which share 53 bits; the others alone.
// Each digit moves by less than 2^37.
template <class Digits>
__device__ __forceinline__ void add_terms(Digits digits, const uint32 (&bits)[TERMS]) {
    // The last place of a float within 2^24 of the largest lies 47 bits or less below the largest's exponent, and the sum
    // of sixteen reaches 5 bits above it.
    constexpr uint32 WINDOW = 24u << 23;
    uint32 top = 0;
#pragma unroll
    for (int v = 0; v < TERMS; v++) top = max(top, bits[v] & FLOAT32_INFINITY);
    bool special = top == FLOAT32_INFINITY;
    uint32 least = special ? FLOAT32_INFINITY + 1 : top > WINDOW ? top - WINDOW : 0;
    double sum = 0.0;
    uint32 outside = 0;
#pragma unroll
    for (int v = 0; v < TERMS; v++) {
        bool inside = (bits[v] & FLOAT32_INFINITY) >= least;
        sum += value_of(inside ? bits[v] : 0);
        outside |= static_cast<uint32>(!inside && bits[v] << 1 != 0) << v;
    }
    add_float64(digits, sum);
    if (outside) add_some_alone(digits, Sixteen(bits), outside);
}

// Whether float64 holds the sum of sixteen floats, and the sum: finite ones whose exponents differ by 24 at most.
__device__ __forceinline__ bool sum_exactly(const uint32 (&bits)[TERMS], double& sum) {
    uint32 top = 0, least = ~0u;  // a zero does not lower `least`
    sum = 0.0;
#pragma unroll
    for (int v = 0; v < TERMS; v++) {
        top = max(top, bits[v] & 0x7fffffff);
        least = min(least, 2 * bits[v] - 1);
        sum += value_of(bits[v]);
    }
    return top < FLOAT32_INFINITY && (least == ~0u || (top >> 23) - (least >> 24) <= 24);
}

template <class Digits>
__device__ __noinline__ void add_terms_apart(Digits digits, Sixteen terms) {
    add_terms(digits, terms.bits);
}

// A pending sum of terms of a narrow format.
struct PendingTerms {
    double sum = 0.0;
    int anchor = -1000;  // of the exponent field
    int groups = 0;

    template <class Digits>
    __device__ __forceinline__ void flush(Digits digits) {
        add_float64(digits, sum);
        sum = 0.0;
        groups = 0;
    }

    // Terms with fields in [anchor - 24, anchor]: multiples of 2^(anchor - 158), below 2^(anchor - 126), so that 2^21 fit.
    // Sixteen whose fields differ by 12 at most have an exact float32 sum: 8 + 12 + 4 bits.
    template <class Digits>
    __device__ __forceinline__ void add_bfloat16(Digits digits, const uint32 (&bits)[TERMS]) {
        uint32 top = 0, least = ~0u;  // a zero does not lower `least`
        float group = 0.0f;
#pragma unroll
        for (int v = 0; v < TERMS; v++) {
            top = max(top, bits[v] & 0x7fffffff);
            least = min(least, 2 * bits[v] - 1);
            group += __uint_as_float(bits[v]);
        }
        int highest = static_cast<int>(top >> 23), lowest = least == ~0u ? highest : static_cast<int>(least >> 24);
        if (highest - lowest > 12 || highest == 255) return add_terms_apart(digits, Sixteen(bits));
        if (highest > anchor || lowest < anchor - 24 || groups == 1 << 16) {
            if (top == 0) return;
            flush(digits);
            anchor = highest + 4;
        }
        sum += static_cast<double>(group);
        groups++;
    }

    // Finite float16 numbers are multiples of 2^-24 below 2^16: 2^12 fit.
    template <class Digits>
    __device__ __forceinline__ void add_float16(Digits digits, const uint32 (&bits)[TERMS]) {
        double group = 0.0;
#pragma unroll
        for (int v = 0; v < TERMS; v++) group += value_of(bits[v]);
        if (!isfinite(group)) return add_terms_apart(digits, Sixteen(bits));
        if (groups == 1 << 8) flush(digits);
        sum += group;
        groups++;
    }
};

// Pending products x w, each split into a multiple of the quantum and the rest.
//
// Products have 48 bits. With exponent fields (of float64) in [anchor - REACH, anchor] they are below 2^(anchor - 1022) and
// multiples of 2^(anchor - REACH - 1070). The quantum is 2^(anchor - 1022 + ROOM - 52): the sum of 2^ROOM upper parts stays
// below 2^53 quanta, and that of 2^(18 - ROOM) lower parts below 2^53 last places. So 2^9 products fit.
struct PendingProducts {
    static constexpr int REACH = 40, ROOM = 9, GROUPS = (1 << ROOM) / TERMS;
    double upper = 0.0, lower = 0.0;
    double shifter = 0.0;  // 1.5 * 2^52 quanta: adding and subtracting it rounds to a multiple of the quantum
    int anchor = 0;
    int groups = 0;

    template <class Digits>
    __device__ __forceinline__ void flush(Digits digits) {
        add_float64(digits, upper);
        add_float64(digits, lower);
        upper = lower = 0.0;
        groups = 0;
    }

    // Adds on, and says whether the sums are exact: else they are as before.
    __device__ __forceinline__ bool add_near(const uint32 (&x)[TERMS], const uint32 (&w)[TERMS], uint32& top, uint32& least) {
        top = 0, least = ~0u;  // a zero does not lower `least`
        double up = upper, low = lower;
#pragma unroll
        for (int v = 0; v < TERMS; v++) {
            double product = value_of(x[v]) * value_of(w[v]);
            uint32 high = static_cast<uint32>(__double2hiint(product)) & 0x7fffffff;
            top = max(top, high);
            least = min(least, high - 1);
            double part = (product + shifter) - shifter;
            up += part;
            low += product - part;
        }
        bool near = static_cast<int>(top >> 20) <= anchor && (least == ~0u || static_cast<int>((least + 1) >> 20) >= anchor - REACH);
        if (near) upper = up, lower = low, groups++;
        return near;
    }

    template <class Digits>
    __device__ __forceinline__ void add(Digits digits, const uint32 (&x)[TERMS], const uint32 (&w)[TERMS]) {
        uint32 top, least;
        if (!add_near(x, w, top, least)) *this = add_far(digits, *this, Sixteen(x), Sixteen(w), top, least);
        if (groups == GROUPS) flush(digits);
    }

    // The sums on another anchor, or as they are if the products lie too far apart: then each goes into the digits alone.
    template <class Digits>
    __device__ static __noinline__ PendingProducts add_far(
        Digits digits, PendingProducts pending, Sixteen x, Sixteen w, uint32 top, uint32 least
    ) {
        int highest = static_cast<int>(top >> 20), lowest = static_cast<int>((least + 1) >> 20);
        if (highest == 2047 || highest - lowest > REACH - 2) {
            for (int v = 0; v < TERMS; v++) {
                add_product(digits, decode(x.bits[v], format_of(FLOAT32)), decode(w.bits[v], format_of(FLOAT32)));
            }
            return pending;
        }
        pending.flush(digits);
        pending.anchor = highest + 2;
        pending.shifter = 1.5 * __hiloint2double((pending.anchor + 1 + ROOM) << 20, 0);
        pending.add_near(x.bits, w.bits, top, least);
        return pending;
    }
};
