// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_convert: the rows of both operands to residues and to what their rounding needs to know (see residue_rows.cuh).

#include "residue_convert.cuh"
#include "residue_operands.cuh"

// Launch: THREADS threads; x_blocks = ceil(batches * rows * team / THREADS) blocks for x, then those for w.
// *flagged := 0. Requires: depth < 2^31.
extern "C" __global__ void __launch_bounds__(THREADS, FLOAT64_RESIDUES ? 2 : 4) residue_convert(const __grid_constant__ Product p) {
    if (blockIdx.x == 0 && threadIdx.x == 0) *p.flagged() = 0;
    convert_block(p, blockIdx.x);
}
