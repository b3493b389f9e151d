// Stands in for cuda_src/matrix_units.cuh: the tensor cores' instructions, by the layouts of PTX's manual.
#pragma once

#include "formats.cuh"

#include <deque>

inline uint32 shared_address(const void* at) { return static_cast<uint32>(static_cast<const char*>(at) - grid::shared); }

// Copies to shared memory are done at once or, in disorder, when they are waited for.
struct Copy {
    uint32 to;
    const void* from;
};

static std::deque<std::vector<Copy>> copies[1024];  // of each thread, by groups; the last group is not committed yet

inline void copy_16(uint32 to, const void* from) {
    static const grid::SourceLocation here = {"copy_16", __LINE__, 0};
    if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16) grid::note_fault(&here);
    auto& own = copies[threadIdx.x];
    if (own.empty()) own.emplace_back();
    if (grid::disorder) own.back().push_back({to, from});
    else std::memcpy(grid::shared + to, from, 16);
}

inline void commit_copies() {
    if (copies[threadIdx.x].empty()) copies[threadIdx.x].emplace_back();
    copies[threadIdx.x].emplace_back();
}

// Until at most N groups are under way.
template <int N>
void wait_for_copies() {
    auto& own = copies[threadIdx.x];
    for (; own.size() > N + 1; own.pop_front())
        for (const Copy& copy : own.front()) std::memcpy(grid::shared + copy.to, copy.from, 16);
}

struct Float64Operands { double a[4], b[2]; };

// d += a of 16 rows by 8 terms times b of 8 columns.
inline void multiply_float64(double (&d)[4], const double (&a)[4], double b0, double b1) {
    unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    grid::with_lanes(Float64Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, grid::WHOLE_WARP, [&](const Float64Operands* lanes) {
        for (unsigned half = 0; half < 2; half++)
            for (unsigned c = 0; c < 2; c++)
                for (unsigned k = 0; k < 8; k++)
                    d[2 * half + c] = std::fma(lanes[4 * g + k % 4].a[half + k / 4 * 2],
                                               lanes[4 * (2 * t + c) + k % 4].b[k / 4], d[2 * half + c]);
        return 0;
    });
}

// Four 8 x 16-byte matrices; lane l names row l % 8 of matrix l / 8.
inline void load_matrices(uint32 (&r)[4], uint32 address) {
    grid::with_lanes(address, grid::WHOLE_WARP, [&](const uint32* rows) {
        for (unsigned n = 0; n < 4; n++)
            std::memcpy(&r[n], grid::shared + rows[8 * n + threadIdx.x % 32 / 4] + threadIdx.x % 4 * 4, 4);
        return 0;
    });
}

struct Int8Operands { uint32 a[4], b[2]; };

// d += a of 16 rows by 32 terms times b of 8 columns, four terms a word.
inline void multiply(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    grid::with_lanes(Int8Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}}, grid::WHOLE_WARP, [&](const Int8Operands* lanes) {
        for (unsigned half = 0; half < 2; half++)
            for (unsigned c = 0; c < 2; c++)
                for (unsigned k = 0; k < 8; k++)
                    d[2 * half + c] = __dp4a(static_cast<int>(lanes[4 * g + k % 4].a[half + k / 4 * 2]),
                                             static_cast<int>(lanes[4 * (2 * t + c) + k % 4].b[k / 4]), d[2 * half + c]);
        return 0;
    });
}

// d = the products alone.
inline void multiply_first(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    d[0] = d[1] = d[2] = d[3] = 0;
    multiply(d, a, b0, b1);
}
