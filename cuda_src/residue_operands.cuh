// The operands of a product for residue_convert.cuh, and which of them a block converts.
#pragma once

#include "product.cuh"
#include "residue_convert.cuh"

#if FLOAT64_RESIDUES
using Blocks = InFloat64Blocks;
#else
using Blocks = InBlocks;
#endif

__device__ __forceinline__ Operand x_operand(const Product& p) {
    return {p.x, static_cast<int>(p.x_format), p.batches, p.rows, p.x_row_stride, p.x_batch_stride, p.padded_rows, p.depth,
            p.x_residues(), p.x_facts(), p.norm_scale, p.x_rests(), 0};
}

__device__ __forceinline__ Operand w_operand(const Product& p) {
    return {p.w, static_cast<int>(p.w_format), p.batches, p.columns, p.w_row_stride, p.w_batch_stride, p.padded_columns,
            p.depth, p.w_residues(), p.w_facts(), p.norm_scale, p.w_rests(), MODULI};
}

// Block number `block` of those that convert both operands in blocks of 128 rows and terms. The whole block calls it.
template <bool NAMED = false>
__device__ __forceinline__ void convert_block(const Product& p, int64 block) {
    int team = static_cast<int>(p.team);
    bool of_x = block < p.x_blocks;
    Operand o = of_x ? x_operand(p) : w_operand(p);
    convert<false, NAMED>(o, team, (of_x ? block : block - p.x_blocks) * (THREADS / team),
                   [&](int64 row) { return Blocks(o, row, p.depth_blocks); });
}
