// What the headers of cuda_src/ ask of a GPU, for one thread of a host: qualifiers, types, arithmetic.
#pragma once
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) alignas(bytes)

template <class To, class From>
To as_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) { return static_cast<std::common_type_t<A, B>>(b) < a ? b : a; }
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) { return static_cast<std::common_type_t<A, B>>(a) < b ? b : a; }

struct alignas(8) uint2 { unsigned x, y; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __longlong_as_double(long long bits) { return as_bits<double>(bits); }
inline float __int_as_float(int bits) { return as_bits<float>(bits); }
inline unsigned __float_as_uint(float value) { return as_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return as_bits<float>(bits); }
inline double __hiloint2double(int high, int low) {
    return as_bits<double>(static_cast<uint64_t>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low));
}
inline int __double2loint(double value) { return static_cast<int>(as_bits<uint64_t>(value)); }
inline int __double2hiint(double value) { return static_cast<int>(as_bits<uint64_t>(value) >> 32); }
inline double __int2double_rn(int value) { return value; }
inline double __uint2double_rn(unsigned value) { return value; }
inline float __ll2float_rn(long long value) { return static_cast<float>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(std::lrint(value)); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffsll(long long value) { return __builtin_ffsll(value); }
inline int __clzll(long long value) { return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int n = 0; n < 4; n++) out |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * n) & 7)) & 0xff) << (8 * n);
    return out;
}

inline unsigned __funnelshift_l(unsigned low, unsigned high, int shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, int shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}

// f() with every rounding upwards or towards zero.
template <class F>
auto rounded(int mode, F f) {
    std::fesetround(mode);
    volatile auto result = f();
    std::fesetround(FE_TONEAREST);
    return result;
}

inline float __fmul_ru(volatile float a, volatile float b) { return rounded(FE_UPWARD, [&] { return a * b; }); }
inline float __fadd_ru(volatile float a, volatile float b) { return rounded(FE_UPWARD, [&] { return a + b; }); }
inline float __fmaf_ru(float a, float b, float c) {
    // The product is exact in float64; a float64 sum rounded upwards, then to float32 upwards, is the same as once.
    volatile double product = static_cast<double>(a) * b, term = c;
    return rounded(FE_UPWARD, [&] { return static_cast<float>(product + term); });
}
inline float __fsqrt_ru(volatile float a) { return rounded(FE_UPWARD, [&] { return std::sqrt(a); }); }
inline float __double2float_ru(volatile double a) { return rounded(FE_UPWARD, [&] { return static_cast<float>(a); }); }
inline float __double2float_rz(volatile double a) { return rounded(FE_TOWARDZERO, [&] { return static_cast<float>(a); }); }
inline float __int2float_ru(volatile int a) { return rounded(FE_UPWARD, [&] { return static_cast<float>(a); }); }
inline float __double2float_rn(double a) { return static_cast<float>(a); }
inline double __ll2double_rn(long long a) { return static_cast<double>(a); }
inline long long __double2ll_rn(double a) { return std::llrint(a); }
inline long long __double_as_longlong(double a) { return as_bits<long long>(a); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __dp4a(int a, int b, int sum) {
    for (int n = 0; n < 32; n += 8) sum += static_cast<signed char>(a >> n) * static_cast<signed char>(b >> n);
    return sum;
}
template <class T>
T __ldg(const T* at) { return *at; }
template <class T>
T __ldcs(const T* at) { return *at; }
template <class T>
T __ldcg(const T* at) { return *at; }
template <class T>
void __stcg(T* at, T value) { *at = value; }
inline unsigned float_of_half(unsigned bits) { return as_bits<unsigned>(static_cast<float>(as_bits<_Float16>(static_cast<unsigned short>(bits)))); }
inline unsigned short half_of(float value) { return as_bits<unsigned short>(static_cast<_Float16>(value)); }
inline unsigned short bfloat16_of(float value) {
    unsigned bits = as_bits<unsigned>(value);
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
