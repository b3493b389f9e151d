// The functions of one variable in float64, off by less than 2^-48 of the value. Mirrors
// kernels/cpu/native/elementary_short.py, with fused multiply-adds and approximate reciprocals that Newton mends.
#pragma once

#include "elementary_constants.cuh"
#include "formats.cuh"

constexpr double ROUND_BITS = 6755399441055744.0;  // 1.5 * 2^52: adding and subtracting it rounds to an integer

// 1 / a, within 2^-35. Requires: a normal, and so its reciprocal.
__device__ __forceinline__ double rough_reciprocal(double a) {
    double guess;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(guess) : "d"(a));
    return __fma_rn(guess, __fma_rn(-a, guess, 1.0), guess);
}

__device__ __forceinline__ double inverse(double a) {
    double guess = rough_reciprocal(a);
    return __fma_rn(guess, __fma_rn(-a, guess, 1.0), guess);
}

__device__ __forceinline__ double quotient(double a, double b) {
    double guess = rough_reciprocal(b);
    double q = a * guess;
    return __fma_rn(__fma_rn(-q, b, a), guess, q);
}

// 1 / sqrt(x), of third order: 5/16 (1 - x y^2)^3 < 2^-55 is left out.
__device__ __forceinline__ double inverse_root(double x) {
    double y;
    asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(y) : "d"(x));
    double rest = __fma_rn(-x * y, y, 1.0);
    return __fma_rn(y * rest, __fma_rn(rest, 0.375, 0.5), y);
}

// e^r - 1 and 2^k with y = k ln 2 + r, |r| <= ln 2 / 2. Requires: |y| <= 700.
__device__ __forceinline__ double expm1_of_rest(double y, int& k) {
    double shifted = __fma_rn(y, LOG2_E, ROUND_BITS);
    double steps = shifted - ROUND_BITS;
    double r = __fma_rn(-steps, LN2_MIDDLE, __fma_rn(-steps, LN2_HEAD, y));
    double sum = 1.0 / 6227020800.0;  // 1 / 13!
    sum = __fma_rn(sum, r, 1.0 / 479001600.0);
    sum = __fma_rn(sum, r, 1.0 / 39916800.0);
    sum = __fma_rn(sum, r, 1.0 / 3628800.0);
    sum = __fma_rn(sum, r, 1.0 / 362880.0);
    sum = __fma_rn(sum, r, 1.0 / 40320.0);
    sum = __fma_rn(sum, r, 1.0 / 5040.0);
    sum = __fma_rn(sum, r, 1.0 / 720.0);
    sum = __fma_rn(sum, r, 1.0 / 120.0);
    sum = __fma_rn(sum, r, 1.0 / 24.0);
    sum = __fma_rn(sum, r, 1.0 / 6.0);
    sum = __fma_rn(sum, r, 0.5);
    k = __double2loint(shifted);
    return __fma_rn(r * r, sum, r);
}

__device__ __forceinline__ double power_of_two(int k) { return __hiloint2double((k + 1023) << 20, 0); }

__device__ __forceinline__ double exp_of(double y) {
    int k;
    double p = 1.0 + expm1_of_rest(y, k);
    return __hiloint2double(__double2hiint(p) + (k << 20), __double2loint(p));
}

__device__ __forceinline__ double expm1_of(double y) {
    int k;
    double p = expm1_of_rest(y, k);
    double scale = power_of_two(k);
    return __fma_rn(p, scale, scale - 1.0);
}

// ln w, or ln(1 + below) with w = 1 + below rounded, exact in `below` where w is near 1. Requires: w > 0, normal.
__device__ __forceinline__ double log_of(double w, double below) {
    // w = m 2^e with m in [0.7071, 1.4142): near 1, e = 0 and nothing cancels.
    int high = __double2hiint(w);
    int e = (high - 0x3fe6a09e) >> 20;
    double m = __hiloint2double(high - (e << 20), __double2loint(w));
    below = e == 0 ? below : m - 1.0;
    // ln m = 2 atanh(s) = 2 s + s^3 (2/3 + 2/5 s^2 + ...), s = (m - 1) / (m + 1), |s| < 0.1716.
    double s = quotient(below, m + 1.0);
    double q = s * s;
    double sum = 2.0 / 23.0;
    sum = __fma_rn(sum, q, 2.0 / 21.0);
    sum = __fma_rn(sum, q, 2.0 / 19.0);
    sum = __fma_rn(sum, q, 2.0 / 17.0);
    sum = __fma_rn(sum, q, 2.0 / 15.0);
    sum = __fma_rn(sum, q, 2.0 / 13.0);
    sum = __fma_rn(sum, q, 2.0 / 11.0);
    sum = __fma_rn(sum, q, 2.0 / 9.0);
    sum = __fma_rn(sum, q, 2.0 / 7.0);
    sum = __fma_rn(sum, q, 2.0 / 5.0);
    sum = __fma_rn(sum, q, 2.0 / 3.0);
    double small = __fma_rn(s * q, sum, s + s);
    double steps = __hiloint2double(0x43380000 + (e >> 31), e) - ROUND_BITS;
    return __fma_rn(steps, LN2_HEAD, __fma_rn(steps, LN2_MIDDLE, small));
}

// x moved into [-300, 300]: no format tells exponentials beyond from those.
__device__ __forceinline__ double clamped(float x) { return fminf(fmaxf(x, -300.0f), 300.0f); }

// Phi(-a) e^(a^2 / 2) and e^(-a^2 / 2). Requires: 0 <= a <= 30; within the bound to 20. a^2 is exact.
__device__ __forceinline__ double normal_tail(double a, double& decay) {
    double t = quotient(a - 5.0, a + 5.0);
    double p = TAIL_TERMS[TAIL_DEGREE];
#pragma unroll
    for (int n = TAIL_DEGREE - 1; n >= 0; n--) p = __fma_rn(p, t, TAIL_TERMS[n]);
    decay = exp_of(-0.5 * (a * a));
    return quotient(p, 1.0 + a);
}

// The function at a float32 number that is finite, not zero and in its domain; `sound` says whether the bound holds.
template <int WHICH>
__device__ __forceinline__ double short_form(float x, bool& sound) {
    sound = true;
    if constexpr (WHICH == EXP) return exp_of(clamped(x));
    if constexpr (WHICH == EXPM1) return expm1_of(clamped(x));
    if constexpr (WHICH == GELU) {
        double decay, ratio = normal_tail(fminf(fabsf(x), 30.0f), decay);
        double tail = x * (ratio * decay);
        return x < 0.0f ? tail : x - tail;
    }
    if constexpr (WHICH == GELU_DERIVATIVE) {
        double a = fminf(fabsf(x), 30.0f), decay, ratio = normal_tail(a, decay);
        double factor = __fma_rn(-a, INVERSE_ROOT_2_PI, ratio);  // passes zero near 0.7518
        sound = x >= 0.0f || fabs(factor) > 0x1p-10;
        return x < 0.0f ? decay * factor : 1.0 - decay * factor;
    }
    if constexpr (WHICH == LOG) return log_of(x, static_cast<double>(x) - 1.0);
    if constexpr (WHICH == LOG1P) return log_of(1.0 + x, x);
    if constexpr (WHICH == LOG1P_DERIVATIVE) return inverse(1.0 + x);
    if constexpr (WHICH == RECIPROCAL) return inverse(x);
    if constexpr (WHICH == RECIPROCAL_DERIVATIVE) {
        double y = inverse(x);
        return -y * y;
    }
    if constexpr (WHICH == RSQRT) return inverse_root(x);
    if constexpr (WHICH == RSQRT_DERIVATIVE) {
        double y = inverse_root(x);
        return -0.5 * y * (y * y);
    }
    if constexpr (WHICH == SIGMOID) return inverse(1.0 + exp_of(-clamped(x)));
    if constexpr (WHICH == SIGMOID_DERIVATIVE) {
        double t = exp_of(-clamped(x)), y = inverse(1.0 + t);
        return t * y * y;
    }
    if constexpr (WHICH == SILU) return quotient(x, 1.0 + exp_of(-clamped(x)));
    if constexpr (WHICH == SILU_DERIVATIVE) {
        double t = exp_of(-clamped(x)), y = inverse(1.0 + t);
        double factor = 1.0 + x * (t * y);  // passes zero near -1.278
        sound = fabs(factor) > 0x1p-10;
        return y * factor;
    }
    if constexpr (WHICH == SOFTPLUS) {
        double t = exp_of(-fabs(clamped(x)));
        return static_cast<double>(fmaxf(x, 0.0f)) + log_of(1.0 + t, t);
    }
    if constexpr (WHICH == SQRT) return __dsqrt_rn(x);
    if constexpr (WHICH == SQRT_DERIVATIVE) return 0.5 * inverse_root(x);
    if constexpr (WHICH == TANH) {
        double m = expm1_of(2.0 * clamped(x));
        return quotient(m, m + 2.0);
    }
    if constexpr (WHICH == TANH_DERIVATIVE) {
        double t = exp_of(-2.0 * clamped(x)), y = inverse(1.0 + t);
        return 4.0 * (t * y * y);
    }
}
