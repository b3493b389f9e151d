// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// gemm: out[i, j] = round(sum over k of x[i, k] * w[j, k] + bias[j]), one rounding.
// The long-accumulator engine: exact on every input.
//
// One warp a result: lane l takes k = l, l + 32, ... into its own digits, then the digits of the lanes are added.
// Launch: blocks of 128 threads. gemm, gemm_partial: ceil(rows * columns / 4) blocks, x: [rows, depth], w: [columns, depth],
// contiguous. gemm_flagged, gemm_flagged_digits: any grid.

#include "long_accumulator.cuh"
#include "rounding.cuh"

constexpr int LANES = 32;
constexpr int WARPS = 4;
using Column = DigitColumn<LANES>;

__device__ int64 warp_index() { return (static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x) / LANES; }

// One row of an operand.
struct Terms {
    const char* first;
    int format;
    __device__ Terms(const void* data, int code, int64 offset)
        : first(static_cast<const char*>(data) + offset * (code == FLOAT32 ? 4 : 2)), format(code) {}
    __device__ Term operator[](int64 k) const { return load_term(first, k, format); }
};

// The exact sum over k of x[k] * w[k], and of one more term, as not yet carried digits in lane 0's column, for lane 0
// to read. Requires: depth < 2^31 - 1; all lanes call it.
__device__ Column accumulate(Terms x, Terms w, int64 depth, const void* bias, int bias_format, int64 column) {
    __shared__ int64 memory[WARPS][NB * LANES];
    int lane = threadIdx.x % LANES;
    int64* warps_own = memory[threadIdx.x / LANES];
    Column digits{warps_own + lane};
    __syncwarp();
    for (int place = 0; place < NB; place++) digits[place] = 0;
    for (int64 k = lane; k < depth; k += LANES) add_product(digits, x[k], w[k]);
    if (bias != nullptr && lane == 0) add_term(digits, load_term(bias, column, bias_format));
    __syncwarp();
    // Lane p adds place p of all lanes, each starting at another bank.
    int64 sum = 0;
    if (lane < NB)
        for (int l = 0; l < LANES; l++) sum += warps_own[lane * LANES + (lane + l) % LANES];
    __syncwarp();
    if (lane < NB) warps_own[lane * LANES] = sum;
    __syncwarp();
    return Column{warps_own};
}

__device__ void copy(int64* digits, Column from) {
    for (int place = 0; place < NB; place++) digits[place] = from[place];
}

// digits[i, j, :] = canonical digits of the exact sum. digits: int64 [rows, columns, 21].
extern "C" __global__ void gemm_partial(
    const void* x, int x_format, const void* w, int w_format, int64* digits, int64 rows, int64 columns, int depth
) {
    int64 result = warp_index();
    if (result >= rows * columns) return;
    Terms x_row(x, x_format, result / columns * depth), w_row(w, w_format, result % columns * depth);
    Column total = accumulate(x_row, w_row, depth, nullptr, FLOAT32, 0);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy(sum, total);
        normalise(sum);
        for (int place = 0; place < NB; place++) digits[result * NB + place] = sum[place];
    }
}

// out[i, j] = the exact sum, with bias[j] as one more term of it, rounded once. bias: [columns] or null.
extern "C" __global__ void gemm(
    const void* x, int x_format, const void* w, int w_format, const void* bias, int bias_format,
    void* out, int out_format, int64 rows, int64 columns, int depth
) {
    int64 result = warp_index();
    if (result >= rows * columns) return;
    Terms x_row(x, x_format, result / columns * depth), w_row(w, w_format, result % columns * depth);
    Column total = accumulate(x_row, w_row, depth, bias, bias_format, result % columns);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy(sum, total);
        store_bits(out, result, out_format, finalize(sum, 1, format_of(out_format)));
    }
}

// The operands and the flags of a product whose elements residue_round or residue_digits left undone (see residue.cu).
struct Flagged {
    const void *x, *w;
    int x_format, w_format;
    int64 x_row_stride, x_batch_stride, w_row_stride, w_batch_stride;
    int64 batches, padded_rows, padded_columns, depth;
    const unsigned short* flags;
};

// emit(batch, row, column, the digits in lane 0's column) for every flagged element, a warp an element.
template <class Emit>
__device__ void for_each_flagged(const Flagged& f, const void* bias, int bias_format, Emit emit) {
    int lane = threadIdx.x % LANES;
    int64 column_units = f.padded_columns / 32;
    int64 units = f.batches * f.padded_rows / 16 * column_units;
    int64 warps = static_cast<int64>(gridDim.x) * blockDim.x / LANES;
    for (int64 unit = warp_index(); unit < units; unit += warps) {
        uint32 mine = f.flags[unit * LANES + lane];
        uint32 owners = __ballot_sync(0xffffffffu, mine != 0);
        for (; owners; owners &= owners - 1) {
            int owner = __ffs(static_cast<int>(owners)) - 1;
            for (uint32 left = __shfl_sync(0xffffffffu, mine, owner); left; left &= left - 1) {
                int bit = __ffs(static_cast<int>(left)) - 1;
                int64 row = unit / column_units * 16 + owner / 4 + bit % 4 / 2 * 8;
                int64 column = unit % column_units * 32 + bit / 4 * 8 + owner % 4 * 2 + bit % 2;
                int64 batch = row / f.padded_rows;
                row %= f.padded_rows;
                Terms x_row(f.x, f.x_format, batch * f.x_batch_stride + row * f.x_row_stride);
                Terms w_row(f.w, f.w_format, batch * f.w_batch_stride + column * f.w_row_stride);
                emit(batch, row, column, accumulate(x_row, w_row, f.depth, bias, bias_format, column));
            }
        }
    }
}

// out[b, i, j] for the flagged elements. Leaves at once if *flagged is 0.
extern "C" __global__ void gemm_flagged(
    const void* x, int64 x_format, int64 x_row_stride, int64 x_batch_stride, const void* w, int64 w_format,
    int64 w_row_stride, int64 w_batch_stride, int64 batches, int64 padded_rows, int64 padded_columns, int64 depth,
    const unsigned short* flags, const uint32* flagged, const void* bias, int64 bias_format, void* out,
    int64 out_format, int64 out_stride, int64 out_batch_stride
) {
    if (*flagged == 0) return;
    Flagged f = {x, w, static_cast<int>(x_format), static_cast<int>(w_format), x_row_stride, x_batch_stride,
                 w_row_stride, w_batch_stride, batches, padded_rows, padded_columns, depth, flags};
    int code = static_cast<int>(out_format);
    for_each_flagged(f, bias, static_cast<int>(bias_format), [&](int64 b, int64 i, int64 j, Column total) {
        if (threadIdx.x % LANES) return;
        int64 sum[NB];
        copy(sum, total);
        store_bits(out, b * out_batch_stride + i * out_stride + j, code, finalize(sum, 1, format_of(code)));
    });
}

// digits[b, i, j, :] += the exact sum, for the flagged elements. Leaves at once if *flagged is 0.
extern "C" __global__ void gemm_flagged_digits(
    const void* x, int64 x_format, int64 x_row_stride, int64 x_batch_stride, const void* w, int64 w_format,
    int64 w_row_stride, int64 w_batch_stride, int64 batches, int64 padded_rows, int64 padded_columns, int64 depth,
    const unsigned short* flags, const uint32* flagged, int64* digits, int64 out_stride, int64 out_batch_stride
) {
    if (*flagged == 0) return;
    Flagged f = {x, w, static_cast<int>(x_format), static_cast<int>(w_format), x_row_stride, x_batch_stride,
                 w_row_stride, w_batch_stride, batches, padded_rows, padded_columns, depth, flags};
    for_each_flagged(f, nullptr, FLOAT32, [&](int64 b, int64 i, int64 j, Column total) {
        if (threadIdx.x % LANES) return;
        int64 sum[NB];
        copy(sum, total);
        normalise(sum);
        int64* to = digits + (b * out_batch_stride + i * out_stride + j) * NB;
        for (int place = 0; place < NB; place++) to[place] += sum[place];
    });
}
