// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// elementary: out = round(f(x)) for float32, one rounding: exp and log.
//
// A float64 evaluation, off by less than 2^-50 of the value, decides almost every element; where a rounding to float32
// lies within DOUBT units of 2^-52 of a tie, or the result is subnormal, pairs of float64 (about 100 bits) decide.
// Launch: any grid. Contraction is off; __fma_rn is one rounding.

#include "formats.cuh"
#include "elementary_constants.cuh"

constexpr uint32 INFINITY_BITS = 0x7f800000;
constexpr uint32 NAN_BITS = 0x7fc00000;
constexpr uint32 SIGN_BIT = 0x80000000;
constexpr double ROUND_BITS = 6755399441055744.0;  // 1.5 * 2^52: adding and subtracting it rounds to an integer

struct Pair {
    double high, low;
};

__device__ __forceinline__ Pair two_sum(double a, double b) {
    double total = a + b;
    double shadow = total - a;
    return {total, (a - (total - shadow)) + (b - shadow)};
}

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

__device__ __forceinline__ double power_of_two(int k) { return __longlong_as_double(static_cast<int64>(k + 1023) << 52); }

// The float32 nearest to (high + low) * 2^k. The pair is first rounded to odd at 53 bits, so that an inexact sum never
// looks like a tie of 24 bits or fewer. Requires: high != 0, normal; |k| < 400.
__device__ __forceinline__ uint32 round_pair(Pair a, int k) {
    a = fast_two_sum(a.high, a.low);
    int64 pattern = __double_as_longlong(a.high);
    if (a.low != 0.0 && (pattern & 1) == 0) pattern += (a.low > 0.0) == (a.high > 0.0) ? 1 : -1;
    return __float_as_uint(__double2float_rn(__longlong_as_double(pattern) * power_of_two(k)));
}

// Whether the rounding of z to a normal float32 stays the same when z moves by DOUBT units of its last place.
__device__ __forceinline__ bool is_decided(double z) {
    constexpr int DOUBT = 32;
    constexpr int HALF = 1 << 28;
    int below = static_cast<int>(__double2loint(z) & ((1 << 29) - 1));
    return abs(below - HALF) > DOUBT && fabs(z) >= 0x1p-125;
}

// e^y = (pair) * 2^k. Requires: |y| < 2^10.
__device__ __forceinline__ Pair exp_pair(double y, int& k) {
    double steps = (y * LOG2_E + ROUND_BITS) - ROUND_BITS;
    Pair r = two_sum(y, -(steps * LN2_HEAD));
    Pair product = two_product(steps, LN2_MIDDLE);
    r = add(r, {-product.high, -product.low});
    r = fast_two_sum(r.high, r.low - steps * LN2_TAIL);
    Pair sum = {EXP_TERMS[EXP_DEGREE][0], EXP_TERMS[EXP_DEGREE][1]};
    for (int n = EXP_DEGREE - 1; n >= 0; n--) sum = add({EXP_TERMS[n][0], EXP_TERMS[n][1]}, multiply(sum, r));
    k = static_cast<int>(steps);
    return sum;
}

// e^x, any x, by pairs.
__device__ __noinline__ uint32 exp_by_pairs(uint32 bits) {
    uint32 magnitude = bits & ~SIGN_BIT;
    if (magnitude > INFINITY_BITS) return NAN_BITS;
    if (magnitude >= 0x43000000) return bits & SIGN_BIT ? 0 : INFINITY_BITS;  // |x| >= 128: e^-128 < 2^-150
    if (magnitude < 0x32800000) return 0x3f800000;  // |x| < 2^-26: within a quarter of an ulp of 1
    int k;
    Pair pair = exp_pair(__uint_as_float(bits), k);
    return round_pair(pair, k);
}

// e^x in float64; returns whether `out` is its rounding.
__device__ __forceinline__ bool exp_short(uint32 bits, uint32& out) {
    double x = static_cast<double>(__uint_as_float(bits));
    double shifted = x * LOG2_E + ROUND_BITS;
    double steps = shifted - ROUND_BITS;
    double r = __fma_rn(-steps, LN2_MIDDLE, x - steps * LN2_HEAD);
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
    sum = __fma_rn(sum, r, 1.0);
    sum = __fma_rn(sum, r, 1.0);
    double z = __longlong_as_double(__double_as_longlong(sum) + (static_cast<int64>(__double2loint(shifted)) << 52));
    out = __float_as_uint(__double2float_rn(z));
    return (bits & ~SIGN_BIT) < 0x43000000 && is_decided(z);
}

// 1 / a, within 2^-35. Requires: 1 <= a < 4.
__device__ __forceinline__ double reciprocal(double a) {
    double guess;
    asm("rcp.approx.ftz.f64 %0, %1;" : "=d"(guess) : "d"(a));
    return __fma_rn(guess, __fma_rn(-a, guess, 1.0), guess);
}

// ln x in float64, off by less than 2^-50 of it. Requires: x > 0, finite.
__device__ __forceinline__ double log_approximately(double x) {
    // x = m 2^e with m in [0.7071, 1.4142): near 1, e = 0 and nothing cancels.
    int64 pattern = __double_as_longlong(x);
    int e = static_cast<int>((pattern - 0x3fe6a09e00000000ll) >> 52);
    double m = __longlong_as_double(pattern - (static_cast<int64>(e) << 52));
    // ln m = 2 atanh(s) = 2 s + s^3 (2/3 + 2/5 s^2 + ...), s = (m - 1) / (m + 1), |s| < 0.1716.
    double above = m + 1.0, below = m - 1.0;
    double inverse = reciprocal(above);
    double s = below * inverse;
    s = __fma_rn(__fma_rn(-s, above, below), inverse, s);
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

// ln x, any x, by pairs: one step of Newton from the approximation z.
// ln x = z + ln(1 + u), u = x e^-z - 1, |u| < 2^-40, and u^3 is out of sight.
__device__ __noinline__ uint32 log_by_pairs(uint32 bits) {
    uint32 magnitude = bits & ~SIGN_BIT;
    if (magnitude == 0) return INFINITY_BITS | SIGN_BIT;
    if (bits & SIGN_BIT || magnitude > INFINITY_BITS) return NAN_BITS;
    if (magnitude == INFINITY_BITS) return INFINITY_BITS;
    if (bits == 0x3f800000) return 0;
    double x = static_cast<double>(__uint_as_float(bits));
    double z = log_approximately(x);
    int k;
    Pair power = exp_pair(-z, k);
    double scaled = x * power_of_two(k);
    Pair u = multiply(power, {scaled, 0.0});
    u = add(u, {-1.0, 0.0});
    Pair tail = add(u, {-0.5 * u.high * u.high, 0.0});
    return round_pair(add({z, 0.0}, tail), 0);
}

__device__ __forceinline__ bool log_short(uint32 bits, uint32& out) {
    double z = log_approximately(static_cast<double>(__uint_as_float(bits)));
    out = __float_as_uint(__double2float_rn(z));
    return bits - 1 < INFINITY_BITS - 1 && is_decided(z);  // positive and finite
}

// Four elements at a time: their short forms, without a branch between them, then pairs for those that need it.
template <class Short, class Pairs>
__device__ __forceinline__ void elementwise(
    const uint32* x, uint32* out, int64 count, bool only_pairs, Short short_form, Pairs by_pairs
) {
    int64 stride = static_cast<int64>(gridDim.x) * blockDim.x;
    int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64 done = 0;
    if (((reinterpret_cast<uint64>(x) | reinterpret_cast<uint64>(out)) & 15) == 0) {
        for (int64 i = thread; i < count / 4; i += stride) {
            uint4 four = __ldcs(reinterpret_cast<const uint4*>(x) + i);
            uint32 bits[4] = {four.x, four.y, four.z, four.w}, result[4];
            bool decided[4];
#pragma unroll
            for (int v = 0; v < 4; v++) decided[v] = short_form(bits[v], result[v]) && !only_pairs;
            if (!(decided[0] && decided[1] && decided[2] && decided[3])) {
#pragma unroll
                for (int v = 0; v < 4; v++)
                    if (!decided[v]) result[v] = by_pairs(bits[v]);
            }
            __stcs(reinterpret_cast<uint4*>(out) + i, make_uint4(result[0], result[1], result[2], result[3]));
        }
        done = count / 4 * 4;
    }
    for (int64 i = done + thread; i < count; i += stride) {
        uint32 result;
        out[i] = short_form(x[i], result) && !only_pairs ? result : by_pairs(x[i]);
    }
}

// only_pairs: the short form is not trusted at all, for tests.
extern "C" __global__ void __launch_bounds__(256) elementary_exp(
    const uint32* x, uint32* out, int64 count, int64 only_pairs
) {
    elementwise(x, out, count, only_pairs, exp_short, exp_by_pairs);
}

extern "C" __global__ void __launch_bounds__(256) elementary_log(
    const uint32* x, uint32* out, int64 count, int64 only_pairs
) {
    elementwise(x, out, count, only_pairs, log_short, log_by_pairs);
}
