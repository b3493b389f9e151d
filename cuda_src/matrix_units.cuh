// The tensor cores of any GPU since compute capability 8.0: a warp multiplies 16 rows by 8 columns, over 32 terms of int8 or 8
// of float64.
#pragma once

#include "formats.cuh"

__device__ __forceinline__ uint32 shared_address(const void* at) { return static_cast<uint32>(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void copy_16(uint32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// Four 8 x 16-byte matrices; lane l names row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(uint32 (&r)[4], uint32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void multiply(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d = the products alone.
__device__ __forceinline__ void multiply_first(int (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}

// d += 16 rows by 8 columns over 8 terms. Of lane (g, t) = (lane / 4, lane % 4): d of rows g, g, g + 8, g + 8 and columns
// 2t, 2t + 1; a of rows g, g + 8, g, g + 8 and b of column g, of terms t (first) and t + 4 (second).
__device__ __forceinline__ void multiply_float64(double (&d)[4], const double (&a)[4], double b0, double b1) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
                 : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1));
#else
#pragma unroll
    for (int n = 0; n < 4; n++)  // 8 rows over 4 terms each
        asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                     : "+d"(d[n % 2 * 2]), "+d"(d[n % 2 * 2 + 1])
                     : "d"(a[n]), "d"(n < 2 ? b0 : b1));
#endif
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most N groups of copies are under way.
template <int N>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
