// Stands in for cuda_src/matrix_units.cuh: the tensor cores' instructions, by the layouts of PTX's manual.
#pragma once

#include "formats.cuh"

inline uint32 shared_address(const void* at) { return static_cast<uint32>(static_cast<const char*>(at) - grid::shared); }
inline void copy_16(uint32 to, const void* from) { std::memcpy(grid::shared + to, from, 16); }
inline void commit_copies() {}
template <int N>
void wait_for_copies() {}

constexpr unsigned WHOLE_WARP = 0xffffffffu;

// What each lane of the warp gave, until all have called `done`.
template <class T>
const T* of_warp(const T& own) {
    static T given[1024];
    given[threadIdx.x] = own;
    grid::wait_for_lanes(WHOLE_WARP);
    return given + threadIdx.x / 32 * 32;
}

inline void done() { grid::wait_for_lanes(WHOLE_WARP); }

struct Float64Operands { double a[4], b[2]; };

// d += a of 16 rows by 8 terms times b of 8 columns.
inline void multiply_float64(double (&d)[4], const double (&a)[4], double b0, double b1) {
    const Float64Operands* lanes = of_warp(Float64Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (unsigned half = 0; half < 2; half++)
        for (unsigned c = 0; c < 2; c++)
            for (unsigned k = 0; k < 8; k++)
                d[2 * half + c] = std::fma(lanes[4 * g + k % 4].a[half + k / 4 * 2], lanes[4 * (2 * t + c) + k % 4].b[k / 4],
                                           d[2 * half + c]);
    done();
}

// Four 8 x 16-byte matrices; lane l names row l % 8 of matrix l / 8.
inline void load_matrices(uint32 (&r)[4], uint32 address) {
    const uint32* rows = of_warp(address);
    for (unsigned n = 0; n < 4; n++)
        std::memcpy(&r[n], grid::shared + rows[8 * n + threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4, 4);
    done();
}

struct Int8Operands { uint32 a[4], b[2]; };

// d += a of 16 rows by 32 terms times b of 8 columns, four terms a word.
inline void multiply(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    const Int8Operands* lanes = of_warp(Int8Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    for (unsigned half = 0; half < 2; half++)
        for (unsigned c = 0; c < 2; c++)
            for (unsigned k = 0; k < 8; k++)
                d[2 * half + c] = __dp4a(static_cast<int>(lanes[4 * g + k % 4].a[half + k / 4 * 2]),
                                         static_cast<int>(lanes[4 * (2 * t + c) + k % 4].b[k / 4]), d[2 * half + c]);
    done();
}

// d = the products alone.
inline void multiply_first(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    d[0] = d[1] = d[2] = d[3] = 0;
    multiply(d, a, b0, b1);
}
