// architectures: sm_90a
// residue_gemm on Hopper: sums of products of residues, reduced modulo p, for all moduli in one persistent launch.
//
// One warpgroup copies blocks to shared memory, two multiply: each 64 rows by TILE columns of a tile. Blocks lie in
// memory as the tensor cores read them (see residue_rows.cuh), so a copy needs no tensor map.
// Launch: 384 threads, as many blocks as multiprocessors, shared memory as `shared_bytes` of the launcher says.

#include "product.cuh"
#include "residue_gemm.cuh"

constexpr int THREADS = 384;

__device__ __forceinline__ uint32 shared_address(const void* at) {
    return static_cast<uint32>(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void barrier_init(uint32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32 barrier, int phase) {
    asm volatile(
        "{ .reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1; @done bra.uni end; "
        "bra.uni again; end: }" ::"r"(barrier), "r"(phase)
        : "memory");
}

__device__ __forceinline__ void copy_block(uint32 to, const void* from, uint32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "n"(BLOCK_BYTES), "r"(barrier)
        : "memory");
}

// Rows of 128 bytes, 128-byte swizzle, groups of 8 rows 1024 bytes apart.
__device__ __forceinline__ uint64 matrix_descriptor(uint32 address) {
    return static_cast<uint64>((address & 0x3ffff) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

__device__ __forceinline__ void multiply(int (&d)[64], uint64 a, uint64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63 "
        "}, %64, %65, p; }"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
          "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
          "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]),
          "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]),
          "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]),
          "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]),
          "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]), "+r"(d[49]), "+r"(d[50]),
          "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]),
          "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply(int (&d)[128], uint64 a, uint64 b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; "
        "wgmma.mma_async.sync.aligned.m64n256k32.s32.s8.s8 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, "
        "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, "
        "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, "
        "%59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "
        "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
        "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, "
        "%113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127 "
        "}, %128, %129, p; }"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
          "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]),
          "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]),
          "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]),
          "+r"(d[30]), "+r"(d[31]), "+r"(d[32]), "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]),
          "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]), "+r"(d[41]), "+r"(d[42]), "+r"(d[43]),
          "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]), "+r"(d[49]), "+r"(d[50]),
          "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]), "+r"(d[57]),
          "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63]), "+r"(d[64]),
          "+r"(d[65]), "+r"(d[66]), "+r"(d[67]), "+r"(d[68]), "+r"(d[69]), "+r"(d[70]), "+r"(d[71]),
          "+r"(d[72]), "+r"(d[73]), "+r"(d[74]), "+r"(d[75]), "+r"(d[76]), "+r"(d[77]), "+r"(d[78]),
          "+r"(d[79]), "+r"(d[80]), "+r"(d[81]), "+r"(d[82]), "+r"(d[83]), "+r"(d[84]), "+r"(d[85]),
          "+r"(d[86]), "+r"(d[87]), "+r"(d[88]), "+r"(d[89]), "+r"(d[90]), "+r"(d[91]), "+r"(d[92]),
          "+r"(d[93]), "+r"(d[94]), "+r"(d[95]), "+r"(d[96]), "+r"(d[97]), "+r"(d[98]), "+r"(d[99]),
          "+r"(d[100]), "+r"(d[101]), "+r"(d[102]), "+r"(d[103]), "+r"(d[104]), "+r"(d[105]), "+r"(d[106]),
          "+r"(d[107]), "+r"(d[108]), "+r"(d[109]), "+r"(d[110]), "+r"(d[111]), "+r"(d[112]), "+r"(d[113]),
          "+r"(d[114]), "+r"(d[115]), "+r"(d[116]), "+r"(d[117]), "+r"(d[118]), "+r"(d[119]), "+r"(d[120]),
          "+r"(d[121]), "+r"(d[122]), "+r"(d[123]), "+r"(d[124]), "+r"(d[125]), "+r"(d[126]), "+r"(d[127])
        : "l"(a), "l"(b), "r"(accumulate));
}

// The shared memory of one stage, and the number of stages that fits.
template <int TILE>
struct Stages {
    static constexpr int bytes = BLOCK_BYTES * (1 + TILE / BLOCK);
    static constexpr int count = TILE == 256 ? 4 : 6;
};

template <int TILE>
__device__ __forceinline__ void gemm(const Product& p) {
    const int8 *x = p.x_residues(), *w = p.w_residues();
    int8* products = p.products();
    int64 moduli = p.moduli;
    int batches = static_cast<int>(p.batches), depth_blocks = static_cast<int>(p.depth_blocks);
    int x_blocks = static_cast<int>(p.padded_rows / BLOCK), w_blocks = static_cast<int>(p.padded_columns / BLOCK);
    constexpr int STAGES = Stages<TILE>::count;
    constexpr int STAGE_BYTES = Stages<TILE>::bytes;
    constexpr int REGISTERS = TILE / 2;
    extern __shared__ char unaligned[];
    __shared__ __align__(8) uint64 barriers[2 * STAGES];
    uint32 shared = (shared_address(unaligned) + 1023) & ~1023u;
    uint32 full = shared_address(barriers), empty = full + 8 * STAGES;
    int tile_columns = w_blocks * BLOCK / TILE;
    int64 tiles = moduli * batches * x_blocks * tile_columns;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();

    int stage = 0, phase = 0;
    if (threadIdx.x < 128) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x != 0) return;
        for (int64 number = blockIdx.x; number < tiles; number += gridDim.x) {
            Tile tile = tile_of(number, x_blocks, tile_columns);
            const int8* from_x =
                x + (static_cast<int64>(tile.plane) * x_blocks + tile.row) * depth_blocks * BLOCK_BYTES;
            const int8* from_w =
                w + (static_cast<int64>(tile.plane) * w_blocks + tile.column * (TILE / BLOCK)) * depth_blocks * BLOCK_BYTES;
            for (int k = 0; k < depth_blocks; k++) {
                barrier_wait(empty + 8 * stage, phase ^ 1);
                barrier_expect(full + 8 * stage, STAGE_BYTES);
                uint32 to = shared + stage * STAGE_BYTES;
                copy_block(to, from_x + static_cast<int64>(k) * BLOCK_BYTES, full + 8 * stage);
#pragma unroll
                for (int b = 0; b < TILE / BLOCK; b++)
                    copy_block(to + (1 + b) * BLOCK_BYTES,
                               from_w + (static_cast<int64>(b) * depth_blocks + k) * BLOCK_BYTES, full + 8 * stage);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    int group = threadIdx.x / 128 - 1;
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    int sum[REGISTERS];
    for (int64 number = blockIdx.x; number < tiles; number += gridDim.x) {
        Tile tile = tile_of(number, x_blocks, tile_columns);
        Modulus m = modulus_of(tile.plane / batches);
        for (int first = 0; first < depth_blocks; first += BLOCKS_A_SUM) {
            int last = min(first + BLOCKS_A_SUM, depth_blocks);
            int previous = -1;
            for (int k = first; k < last; k++) {
                barrier_wait(full + 8 * stage, phase);
                uint32 at = shared + stage * STAGE_BYTES;
                uint64 a = matrix_descriptor(at + group * (BLOCK_BYTES / 2));
                uint64 b = matrix_descriptor(at + BLOCK_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int step = 0; step < 4; step++) multiply(sum, a + 2 * step, b + 2 * step, k > 0 || step > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (previous >= 0 && threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * previous);
                previous = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            if (threadIdx.x % 128 == 0) barrier_arrive(empty + 8 * previous);
#pragma unroll
            for (int r = 0; r < REGISTERS; r++) sum[r] = reduce(sum[r], m);
        }
        int64 row_unit = (static_cast<int64>(tile.plane) * x_blocks + tile.row) * (BLOCK / 16) + 4 * group + warp;
        int64 unit = row_unit * (w_blocks * (BLOCK / 32)) + tile.column * (TILE / 32);
        uint4* to = reinterpret_cast<uint4*>(products + unit * 512) + lane;
#pragma unroll
        for (int u = 0; u < TILE / 32; u++) {
            const int* d = sum + 16 * u;
            __stcg(to + u * 32, make_uint4(pack(d[0], d[1], d[2], d[3]), pack(d[4], d[5], d[6], d[7]),
                                          pack(d[8], d[9], d[10], d[11]), pack(d[12], d[13], d[14], d[15])));
        }
    }
}

// products[modulus, batch, unit]: int8, from x: [modulus, batch, x_blocks, depth_blocks] blocks and w likewise.
extern "C" __global__ void __launch_bounds__(THREADS, 1) residue_gemm_128(const __grid_constant__ Product p) { gemm<128>(p); }

// The same with tiles of 128 x 256. Requires: an even number of blocks of columns.
extern "C" __global__ void __launch_bounds__(THREADS, 1) residue_gemm_256(const __grid_constant__ Product p) { gemm<256>(p); }
