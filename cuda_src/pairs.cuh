// Pairs of float64 that act as one number of about 106 bits. Mirrors kernels/cpu/native/double_double.py.
// Contraction is off; __fma_rn is one rounding.
#pragma once

#include "formats.cuh"

struct Pair {
    double high, low;
};

__device__ __forceinline__ Pair two_sum(double a, double b) {
    double total = a + b;
    double shadow = total - a;
    return {total, (a - (total - shadow)) + (b - shadow)};
}

// Requires: |a| >= |b| or a = 0.
__device__ __forceinline__ Pair fast_two_sum(double a, double b) {
    double total = a + b;
    return {total, b - (total - a)};
}

__device__ __forceinline__ Pair two_product(double a, double b) {
    double product = a * b;
    return {product, __fma_rn(a, b, -product)};
}

__device__ __forceinline__ Pair add(Pair a, Pair b) {
    Pair high = two_sum(a.high, b.high);
    Pair low = two_sum(a.low, b.low);
    high = fast_two_sum(high.high, high.low + low.high);
    return fast_two_sum(high.high, high.low + low.low);
}

__device__ __forceinline__ Pair multiply(Pair a, Pair b) {
    Pair product = two_product(a.high, b.high);
    return fast_two_sum(product.high, product.low + (a.high * b.low + a.low * b.high));
}

__device__ __forceinline__ Pair negative(Pair a) { return {-a.high, -a.low}; }

__device__ __forceinline__ Pair scaled(Pair a, double power_of_two) { return {a.high * power_of_two, a.low * power_of_two}; }

// The low part is zero if the high part is exact.
__device__ __forceinline__ Pair divide(Pair a, Pair b) {
    double high = __ddiv_rn(a.high, b.high);
    Pair rest = add(a, negative(multiply({high, 0.0}, b)));
    return fast_two_sum(high, __ddiv_rn(rest.high + rest.low, b.high));
}

// The pair as one float64, rounded to odd: an inexact sum never looks like a tie of 24 bits or fewer.
__device__ __forceinline__ double round_to_odd(Pair a) {
    a = fast_two_sum(a.high, a.low);
    int64 pattern = __double_as_longlong(a.high);
    if (a.high != 0.0 && a.low != 0.0 && (pattern & 1) == 0) pattern += (a.low > 0.0) == (a.high > 0.0) ? 1 : -1;
    return __longlong_as_double(pattern);
}
