// What the integer headers of cuda_src/ ask of a GPU, on a host: enough to run them in a test (test_float64_residues.py).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
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

struct uint4 { unsigned x, y, z, w; };
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
inline int __clzll(long long value) { return value ? __builtin_clzll(static_cast<unsigned long long>(value)) : 64; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    unsigned out = 0;
    for (int n = 0; n < 4; n++) out |= static_cast<unsigned>(bytes >> (8 * (selector >> (4 * n) & 7)) & 0xff) << (8 * n);
    return out;
}
