// The functions of one variable as pairs of float64, off by less than 2^-72 of the value. Mirrors
// kernels/cpu/native/elementary_pairs.py. A root or a quotient that is exact has a low part of zero.
#pragma once

#include "elementary_short.cuh"
#include "pairs.cuh"

constexpr Pair ONE = {1.0, 0.0};

// e^r - 1 with y = k ln 2 + r. Requires: |y| <= 700.
__device__ __noinline__ Pair expm1_pair_of_rest(double y, int& k) {
    double steps = (y * LOG2_E + ROUND_BITS) - ROUND_BITS;
    Pair r = two_sum(y, -(steps * LN2_HEAD));
    r = add(r, negative(two_product(steps, LN2_MIDDLE)));
    r = fast_two_sum(r.high, r.low - steps * LN2_TAIL);
    Pair sum = {EXP_TERMS[EXP_DEGREE][0], EXP_TERMS[EXP_DEGREE][1]};
    for (int n = EXP_DEGREE - 1; n > 0; n--) sum = add({EXP_TERMS[n][0], EXP_TERMS[n][1]}, multiply(sum, r));
    k = static_cast<int>(steps);
    return multiply(sum, r);
}

__device__ __forceinline__ Pair exp_pair(double y) {
    int k;
    Pair p = expm1_pair_of_rest(y, k);
    return scaled(add(ONE, p), power_of_two(k));
}

__device__ __forceinline__ Pair expm1_pair(double y) {
    int k;
    Pair p = expm1_pair_of_rest(y, k);
    double scale = power_of_two(k);
    return add(two_sum(scale, -1.0), scaled(p, scale));
}

// z + ln(1 + u) for a tiny u: u^3 is out of sight.
__device__ __forceinline__ Pair newton(double z, Pair u) {
    return add({z, 0.0}, add(u, {-0.5 * u.high * u.high, 0.0}));
}

// ln(1 + t). Requires: |t| <= 1, t > -1. u = (1 + t) e^-z - 1.
__device__ __forceinline__ Pair log1p_pair(Pair t) {
    double z = log_of(1.0 + t.high, t.high);
    Pair m = expm1_pair(-z);
    return newton(z, add(add(m, t), multiply(m, t)));
}

// ln w. Requires: w > 0, normal. u = w e^-z - 1.
__device__ __forceinline__ Pair log_pair(Pair w) {
    double z = log_of(w.high, w.high - 1.0);
    return newton(z, add(multiply(exp_pair(-z), w), {-1.0, 0.0}));
}

// y (1 + u / 2) with u = 1 - x y^2, which is tiny.
__device__ __forceinline__ Pair rsqrt_pair(double x) {
    double y = __ddiv_rn(1.0, __dsqrt_rn(x));
    Pair u = add(ONE, negative(multiply(two_product(y, y), {x, 0.0})));
    return fast_two_sum(y, 0.5 * y * u.high);
}

__device__ __forceinline__ Pair sigmoid_pair(double y) {
    Pair t = exp_pair(-fabs(y));
    return divide(y < 0.0 ? t : ONE, add(ONE, t));
}

// t / (1 + t)^2 with t = e^-|y|.
__device__ __forceinline__ Pair logistic_slope(double y) {
    Pair t = exp_pair(-fabs(y));
    Pair d = divide(ONE, add(ONE, t));
    return multiply(multiply(t, d), d);
}

__device__ __forceinline__ Pair tanh_pair(double x) {
    if (fabs(x) < 0x1p-10) {
        // x - x^3/3 + 2 x^5/15 - ...: what follows x has 52 bits, and its sign is right for the smallest x.
        double q = x * x;
        double series = -1.0 / 3.0 + q * (2.0 / 15.0 - q * (17.0 / 315.0 - q * (62.0 / 2835.0)));
        return fast_two_sum(x, x * q * series);
    }
    Pair m = expm1_pair(2.0 * fmin(fabs(x), 300.0));
    Pair result = divide(m, add(m, {2.0, 0.0}));
    return x < 0.0 ? negative(result) : result;
}

// phi(a). Requires: |a| <= 30; a^2 is exact.
__device__ __forceinline__ Pair normal_density(double a) {
    return multiply(exp_pair(-0.5 * (a * a)), {INVERSE_ROOT_2_PI, INVERSE_ROOT_2_PI_LOW});
}

// Phi(-a), 0 <= a <= 30: 1/2 - phi(a) (a + a^3 / 3 + a^5 / (3 5) + ...), or phi(a) / (a + 1 / (a + 2 / (a + ...))).
__device__ __noinline__ Pair normal_tail_pair(double a) {
    constexpr int SERIES_TERMS = 75, FRACTION_TERMS = 130;
    Pair density = normal_density(a);
    if (a < 4.0) {
        Pair square = {a * a, 0.0}, term = {a, 0.0}, total = term;
        for (int n = 1; n < SERIES_TERMS; n++) {
            term = divide(multiply(term, square), {2.0 * n + 1.0, 0.0});
            total = add(total, term);
        }
        return add({0.5, 0.0}, negative(multiply(total, density)));
    }
    Pair bottom = {a, 0.0};
    for (int n = FRACTION_TERMS; n > 0; n--) bottom = add({a, 0.0}, divide({static_cast<double>(n), 0.0}, bottom));
    return divide(density, bottom);
}

// Phi(x). Requires: |x| <= 30.
__device__ __forceinline__ Pair normal_below(double x) {
    Pair tail = normal_tail_pair(fabs(x));
    return x < 0.0 ? tail : add(ONE, negative(tail));
}

// The function at a float32 number that is finite, not zero and in its domain.
template <int WHICH>
__device__ __forceinline__ Pair pair_form(float number) {
    double x = number, y = clamped(number);
    if constexpr (WHICH == EXP) return exp_pair(y);
    if constexpr (WHICH == EXPM1) return expm1_pair(y);
    if constexpr (WHICH == GELU) return multiply(normal_below(fmax(-30.0, fmin(x, 30.0))), {x, 0.0});
    if constexpr (WHICH == GELU_DERIVATIVE) {
        double near = fmax(-30.0, fmin(x, 30.0));
        return add(normal_below(near), multiply(normal_density(near), {near, 0.0}));
    }
    if constexpr (WHICH == LOG) return log_pair({x, 0.0});
    if constexpr (WHICH == LOG1P) return x > 1.0 ? log_pair(two_sum(1.0, x)) : log1p_pair({x, 0.0});
    if constexpr (WHICH == LOG1P_DERIVATIVE) return divide(ONE, two_sum(1.0, x));
    if constexpr (WHICH == RECIPROCAL) return divide(ONE, {x, 0.0});
    if constexpr (WHICH == RECIPROCAL_DERIVATIVE) return divide({-1.0, 0.0}, {x * x, 0.0});
    if constexpr (WHICH == RSQRT) return rsqrt_pair(x);
    if constexpr (WHICH == RSQRT_DERIVATIVE) return multiply(rsqrt_pair(x), divide({-0.5, 0.0}, {x, 0.0}));
    if constexpr (WHICH == SIGMOID) return sigmoid_pair(y);
    if constexpr (WHICH == SIGMOID_DERIVATIVE) return logistic_slope(y);
    if constexpr (WHICH == SILU) return multiply(sigmoid_pair(y), {x, 0.0});
    if constexpr (WHICH == SILU_DERIVATIVE) return add(sigmoid_pair(y), multiply(logistic_slope(y), {x, 0.0}));
    if constexpr (WHICH == SOFTPLUS) return add({fmax(x, 0.0), 0.0}, log1p_pair(exp_pair(-fabs(y))));
    if constexpr (WHICH == SQRT) {
        double root = __dsqrt_rn(x);
        return fast_two_sum(root, __ddiv_rn(__fma_rn(-root, root, x), root + root));
    }
    if constexpr (WHICH == SQRT_DERIVATIVE) return scaled(rsqrt_pair(x), 0.5);
    if constexpr (WHICH == TANH) return tanh_pair(x);
    if constexpr (WHICH == TANH_DERIVATIVE) return scaled(logistic_slope(2.0 * y), 4.0);
}
