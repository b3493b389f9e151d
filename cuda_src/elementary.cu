// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// elementary: out = round(f(x)), one rounding, or out = round(g * d) with d = f(x) as the nearest float32.
//
// A cubin holds one FUNCTION from format IN to format OUT; GRADIENT is the format of g, or NO_GRADIENT. A float64
// evaluation decides almost every element; where its rounding lies within DOUBT last places of a tie, or a float32 result
// is subnormal, pairs of float64 decide. Zeros, infinities, NaNs and the edge of the domain come from a table.
// Launch: any grid. Contraction is off; __fma_rn is one rounding.

#include "formats.cuh"

#ifndef FUNCTION
#define FUNCTION 0
#endif
#ifndef IN
#define IN 0
#endif
#ifndef OUT
#define OUT 0
#endif
#ifndef GRADIENT
#define GRADIENT 3
#endif

// The functions, in the order of `arithmetic.elementary.FUNCTIONS`.
enum FunctionName {
    EXP, EXPM1, GELU, GELU_DERIVATIVE, LOG, LOG1P, LOG1P_DERIVATIVE, RECIPROCAL, RECIPROCAL_DERIVATIVE, RSQRT, RSQRT_DERIVATIVE, SIGMOID,
    SIGMOID_DERIVATIVE, SILU, SILU_DERIVATIVE, SOFTPLUS, SQRT, SQRT_DERIVATIVE, TANH, TANH_DERIVATIVE
};

#include "elementary_pairs.cuh"
#include "elementary_short.cuh"

constexpr int NO_GRADIENT = 3;
constexpr int RESULT = GRADIENT == NO_GRADIENT ? OUT : FLOAT32;  // the format of the function's own value
constexpr uint32 SIGN_BIT = 0x80000000, INFINITY_BITS = 0x7f800000, ONE_BITS = 0x3f800000;
constexpr uint32 DOUBT = FUNCTION == GELU_DERIVATIVE || FUNCTION == SILU_DERIVATIVE ? 1 << 15 : 32;
constexpr bool POSITIVE_ONLY = FUNCTION == LOG || FUNCTION == RSQRT || FUNCTION == RSQRT_DERIVATIVE || FUNCTION == SQRT
    || FUNCTION == SQRT_DERIVATIVE;
constexpr bool EDGE_AT_MINUS_ONE = FUNCTION == LOG1P || FUNCTION == LOG1P_DERIVATIVE;
// Float32 in, float32 out, and the processor's own instruction rounds once.
constexpr bool IS_INSTRUCTION = RESULT == FLOAT32 && (FUNCTION == SQRT || FUNCTION == RECIPROCAL);

// The values at +0, -0, +inf, -inf, the edge, and NaN, two to a word, as bits of RESULT.
struct Specials {
    uint64 zeros, infinities, edge_and_nan;
    __device__ uint32 nan() const { return static_cast<uint32>(edge_and_nan >> 32); }
    __device__ uint32 edge() const { return static_cast<uint32>(edge_and_nan); }
    __device__ static uint32 of_sign(uint64 two, uint32 bits) { return static_cast<uint32>(bits & SIGN_BIT ? two >> 32 : two); }
};

// A float64 taken apart for a rounding to RESULT: `dropped` bits go. Places below the smallest subnormal go too.
struct Cut {
    uint64 significand;
    int dropped, place;
    __device__ __forceinline__ Cut(double z, Format format) {
        uint64 pattern = static_cast<uint64>(__double_as_longlong(z)) & ~(1ull << 63);
        int exponent = static_cast<int>(pattern >> 52) - 1023;
        int lowest_normal = format.lowest_exponent() + format.fraction_bits();
        significand = (pattern & ((1ull << 52) - 1)) | 1ull << 52;
        place = max(exponent - lowest_normal, 0);
        dropped = min(53 - format.significand_bits + max(lowest_normal - exponent, 0), 54);
    }
    __device__ __forceinline__ int64 beyond_half() const {
        return static_cast<int64>(significand & ((1ull << dropped) - 1)) - (1ll << (dropped - 1));
    }
};

// Bits of z rounded once; z is no NaN.
template <int FORMAT>
__device__ __forceinline__ uint32 round_double(double z) {
    if constexpr (FORMAT == FLOAT32) return __float_as_uint(__double2float_rn(z));
    constexpr Format format = format_of(FORMAT);
    Cut cut(z, format);
    uint64 kept = cut.significand >> cut.dropped;
    int64 beyond = cut.beyond_half();
    kept += beyond > 0 || (beyond == 0 && (kept & 1));
    uint64 bits = min((static_cast<uint64>(cut.place) << format.fraction_bits()) + kept, uint64(format.infinity_bits()));
    return static_cast<uint32>(bits) | (signbit(z) ? format.sign_bit() : 0);
}

// z rounded to RESULT; returns whether that is the rounding of every number within DOUBT last places of z.
//
// A narrow format's ties are float32 numbers. So the float32 nearest to z, if it is no tie, is rounded as the number is.
__device__ __forceinline__ bool round_approximate(double z, uint32& result) {
    uint32 bits = __float_as_uint(__double2float_rn(z));
    if constexpr (RESULT == FLOAT32) {
        constexpr uint32 NORMAL = (1023 - 125) << 20, OUT_OF_SIGHT = (1023 - 160) << 20, HALF = 1 << 28;
        uint32 below = static_cast<uint32>(__double2loint(z)) & (2 * HALF - 1);
        uint32 high = static_cast<uint32>(__double2hiint(z)) & 0x7fffffff;
        result = bits;
        return (below - (HALF - DOUBT) > 2 * DOUBT) & (high - OUT_OF_SIGHT >= NORMAL - OUT_OF_SIGHT);
    } else if constexpr (RESULT == BFLOAT16) {
        result = (bits + 0x8000) >> 16;
        return (bits & 0xffff) != 0x8000;
    } else {
        constexpr uint32 NORMAL = (127 - 14) << 23, OUT_OF_SIGHT = (127 - 26) << 23;
        unsigned short half;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(__uint_as_float(bits)));
        result = half;
        return ((bits & 0x1fff) != 0x1000) & ((bits & ~SIGN_BIT) - OUT_OF_SIGHT >= NORMAL - OUT_OF_SIGHT);
    }
}

// Whether a float32 pattern is a finite number in the domain, but zero.
__device__ __forceinline__ bool is_ordinary(uint32 bits) {
    uint32 magnitude = POSITIVE_ONLY ? bits : bits & ~SIGN_BIT;
    bool ordinary = magnitude - 1 < INFINITY_BITS - 1;
    return EDGE_AT_MINUS_ONE ? ordinary & (__uint_as_float(bits) > -1.0f) : ordinary;
}

// The function of any pattern, by the table or by pairs.
__device__ __noinline__ uint32 alone(uint32 bits, Specials specials) {
    uint32 magnitude = bits & ~SIGN_BIT;
    if (magnitude == 0) return Specials::of_sign(specials.zeros, bits);
    if (magnitude > INFINITY_BITS) return specials.nan();
    if (magnitude == INFINITY_BITS) return Specials::of_sign(specials.infinities, bits);
    if (POSITIVE_ONLY && bits & SIGN_BIT) return specials.nan();
    if (EDGE_AT_MINUS_ONE && bits & SIGN_BIT && magnitude >= ONE_BITS) {
        if (magnitude == ONE_BITS) return specials.edge();
        if (FUNCTION == LOG1P) return specials.nan();
    }
    return round_double<RESULT>(round_to_odd(pair_form<FUNCTION>(__uint_as_float(bits))));
}

// The quick way; returns whether `result` is meant.
__device__ __forceinline__ bool quick(uint32 bits, uint32& result) {
    float x = __uint_as_float(bits);
    if constexpr (IS_INSTRUCTION) {
        result = __float_as_uint(FUNCTION == SQRT ? __fsqrt_rn(x) : __frcp_rn(x));
        return is_ordinary(bits);
    } else {
        bool sound;
        double z = short_form<FUNCTION>(x, sound);
        return round_approximate(z, result) & sound & is_ordinary(bits);
    }
}

// The product of two float32 patterns, which float64 holds exactly, rounded once to OUT.
__device__ __forceinline__ uint32 rounded_product(uint32 g, uint32 slope) {
    double product = static_cast<double>(__uint_as_float(g)) * static_cast<double>(__uint_as_float(slope));
    return isnan(product) ? format_of(OUT).nan_bits() : round_double<OUT>(product);
}

// Four neighbours as float32 patterns: 16 bytes, or 8 of a narrow format.
template <int FORMAT>
struct Four {
    uint32 bits[4];
    __device__ __forceinline__ void load(const void* data, int64 four) {
        if constexpr (FORMAT == FLOAT32) {
            uint4 words = __ldcs(static_cast<const uint4*>(data) + four);
            bits[0] = words.x, bits[1] = words.y, bits[2] = words.z, bits[3] = words.w;
        } else {
            uint2 words = __ldcs(static_cast<const uint2*>(data) + four);
            bits[0] = words.x, bits[1] = words.y;  // taken apart when they are used
        }
    }
    __device__ __forceinline__ uint32 operator[](int v) const {
        return FORMAT == FLOAT32 ? bits[v] : float32_bits(bits[v / 2] >> (v % 2 * 16) & 0xffff, FORMAT);
    }
};

__device__ __forceinline__ void store_four(void* out, int64 four, const uint32 (&bits)[4]) {
    if constexpr (OUT == FLOAT32)
        __stcs(static_cast<uint4*>(out) + four, make_uint4(bits[0], bits[1], bits[2], bits[3]));
    else
        __stcs(static_cast<uint2*>(out) + four, make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16));
}

// only_pairs: the quick way is not trusted at all, for tests.
extern "C" __global__ void __launch_bounds__(256) elementary(
    const void* x, const void* g, void* out, int64 count, uint64 zeros, uint64 infinities, uint64 edge_and_nan,
    int64 only_pairs
) {
    constexpr bool HAS_GRADIENT = GRADIENT != NO_GRADIENT;
    constexpr int OF_G = HAS_GRADIENT ? GRADIENT : FLOAT32;
    Specials specials{zeros, infinities, edge_and_nan};
    bool trusted = only_pairs == 0;
    int64 stride = static_cast<int64>(gridDim.x) * blockDim.x;
    int64 thread = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
    int64 fours = ((reinterpret_cast<uint64>(x) | reinterpret_cast<uint64>(out) | (HAS_GRADIENT ? reinterpret_cast<uint64>(g) : 0)) & 15)
        ? 0 : count / 4;
    // The next four are on their way while these are computed.
    Four<IN> next;
    Four<OF_G> next_g;
    if (thread < fours) {
        next.load(x, thread);
        if (HAS_GRADIENT) next_g.load(g, thread);
    }
    for (int64 i = thread; i < fours; i += stride) {
        Four<IN> four = next;
        Four<OF_G> four_g = next_g;
        if (i + stride < fours) {
            next.load(x, i + stride);
            if (HAS_GRADIENT) next_g.load(g, i + stride);
        }
        uint32 result[4];
        bool decided[4];
#pragma unroll
        for (int v = 0; v < 4; v++) decided[v] = quick(four[v], result[v]) & trusted;
        if (!(decided[0] & decided[1] & decided[2] & decided[3])) {
#pragma unroll
            for (int v = 0; v < 4; v++)
                if (!decided[v]) result[v] = alone(four[v], specials);
        }
        if constexpr (HAS_GRADIENT) {
#pragma unroll
            for (int v = 0; v < 4; v++) result[v] = rounded_product(four_g[v], result[v]);
        }
        store_four(out, i, result);
    }
    for (int64 i = 4 * fours + thread; i < count; i += stride) {
        uint32 bits = float32_bits(load_bits(x, i, IN), IN), result;
        if (!quick(bits, result) || !trusted) result = alone(bits, specials);
        if constexpr (HAS_GRADIENT) result = rounded_product(float32_bits(load_bits(g, i, OF_G), OF_G), result);
        store_bits(out, i, OUT, result);
    }
}
