// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// gemm: out[i, j] = round(sum over k of x[i, k] * w[j, k] + bias[j]), one rounding.
// The long-accumulator engine: exact on every input.
//
// Launch: blocks of THREADS threads. gemm, gemm_partial: a warp a result, x: [rows, depth], w: [columns, depth],
// contiguous. gemm_flagged, gemm_flagged_digits: any grid.

#include "long_product.cuh"
#include "product.cuh"
#include "rounding.cuh"

constexpr int LANES = 32;
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / LANES;
using Column = DigitColumn<THREADS>;

__device__ __forceinline__ int64 warp_index() { return (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) / LANES; }

// digits[i, j, :] = canonical digits of the exact sum. digits: int64 [rows, columns, 21].
extern "C" __global__ void gemm_partial(
    const void* x, int64 x_format, const void* w, int64 w_format, int64* digits, int64 rows, int64 columns, int64 depth
) {
    __shared__ int64 memory[NB * THREADS];
    int64 result = warp_index();
    if (result >= rows * columns) return;
    Terms x_row(x, x_format, result / columns * depth), w_row(w, w_format, result % columns * depth);
    Column total = LongProduct<THREADS>{memory}(x_row, w_row, depth, nullptr, FLOAT32, 0, LANES);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy_digits(sum, total);
        normalise(sum);
        for (int place = 0; place < NB; place++) digits[result * NB + place] = sum[place];
    }
}

// digits[n, :] = canonical digits of element elements[n] = i * columns + j. digits: int64 [count, 21]; rows of x and w have
// unit stride.
extern "C" __global__ void gemm_elements(
    const void* x, int64 x_format, int64 x_row_stride, const void* w, int64 w_format, int64 w_row_stride, int64 columns,
    int64 depth, const int64* elements, int64 count, int64* digits
) {
    __shared__ int64 memory[NB * THREADS];
    int64 n = warp_index();
    if (n >= count) return;
    int64 i = elements[n] / columns, j = elements[n] % columns;
    Terms x_row(x, x_format, i * x_row_stride), w_row(w, w_format, j * w_row_stride);
    Column total = LongProduct<THREADS>{memory}(x_row, w_row, depth, nullptr, FLOAT32, 0, LANES);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy_digits(sum, total);
        normalise(sum);
        for (int place = 0; place < NB; place++) digits[n * NB + place] = sum[place];
    }
}

// out[i, j] = the exact sum, with bias[j] as one more term of it, rounded once. bias: [columns] or null.
extern "C" __global__ void gemm(
    const void* x, int64 x_format, const void* w, int64 w_format, const void* bias, int64 bias_format,
    void* out, int64 out_format, int64 rows, int64 columns, int64 depth
) {
    __shared__ int64 memory[NB * THREADS];
    int64 result = warp_index();
    if (result >= rows * columns) return;
    Terms x_row(x, x_format, result / columns * depth), w_row(w, w_format, result % columns * depth);
    Column total = LongProduct<THREADS>{memory}(x_row, w_row, depth, bias, bias_format, result % columns, LANES);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy_digits(sum, total);
        int code = static_cast<int>(out_format);
        store_bits(out, result, code, finalize(sum, 1, format_of(code)));
    }
}

// emit(batch, row, column, the digits in the first thread's column) for one flagged element.
template <class Emit>
__device__ __forceinline__ void at_element(
    const Product& p, int64* memory, int64 unit, int owner, int bit, int team, Emit& emit
) {
    UnitPlace place(p, unit);
    int64 batch = place.batch, row = place.row + owner / 4 + bit % 4 / 2 * 8;
    int64 column = place.column + bit / 4 * 8 + owner % 4 * 2 + bit % 2;
    Terms x_row(p.x, p.x_format, batch * p.x_batch_stride + row * p.x_row_stride);
    Terms w_row(p.w, p.w_format, batch * p.w_batch_stride + column * p.w_row_stride);
    Column total = LongProduct<THREADS>{memory}(x_row, w_row, p.depth, p.bias, p.bias_format, column, team);
    if (threadIdx.x % team == 0) emit(batch, row, column, total);
}

// Every flagged element, a team an element: of the list if it holds them all, else a warp takes its units' flags.
template <class Emit>
__device__ __forceinline__ void for_each_flagged(const Product& p, uint32 count, Emit emit) {
    constexpr int LONG = 1024;
    __shared__ int64 memory[NB * THREADS];
    if (count <= p.list_size) {
        int team = p.depth >= LONG ? THREADS : LANES;
        int64 teams = static_cast<int64>(gridDim.x) * (THREADS / team);
        for (int64 at = static_cast<int64>(blockIdx.x) * (THREADS / team) + threadIdx.x / team; at < count; at += teams) {
            int64 element = p.list()[at];
            at_element(p, memory, element / 512, static_cast<int>(element % 512 / 16), static_cast<int>(element % 16), team,
                       emit);
        }
        return;
    }
    int64 units = p.batches * p.padded_rows / 16 * (p.padded_columns / 32);
    int64 warps = static_cast<int64>(gridDim.x) * WARPS;
    for (int64 unit = warp_index(); unit < units; unit += warps) {
        uint32 mine = p.flags()[unit * LANES + threadIdx.x % LANES];
        uint32 owners = __ballot_sync(0xffffffffu, mine != 0);
        for (; owners; owners &= owners - 1) {
            int owner = __ffs(static_cast<int>(owners)) - 1;
            for (uint32 left = __shfl_sync(0xffffffffu, mine, owner); left; left &= left - 1)
                at_element(p, memory, unit, owner, __ffs(static_cast<int>(left)) - 1, LANES, emit);
        }
    }
}

// out[b, i, j] for the elements that rounding left undecided. Leaves at once if there are none.
extern "C" __global__ void __launch_bounds__(THREADS) gemm_flagged(const __grid_constant__ Product p) {
    uint32 count = *p.flagged();
    if (count == 0) return;
    int code = static_cast<int>(p.out_format);
    for_each_flagged(p, count, [&](int64 b, int64 i, int64 j, Column total) {
        int64 sum[NB];
        copy_digits(sum, total);
        store_bits(p.out, b * p.out_batch_stride + i * p.out_stride + j, code, finalize(sum, 1, format_of(code)));
    });
}

// digits[b, i, j, :] += the exact sum, for the flagged elements. Leaves at once if there are none.
extern "C" __global__ void __launch_bounds__(THREADS) gemm_flagged_digits(const __grid_constant__ Product p) {
    uint32 count = *p.flagged();
    if (count == 0) return;
    for_each_flagged(p, count, [&](int64 b, int64 i, int64 j, Column total) {
        int64 sum[NB];
        copy_digits(sum, total);
        normalise(sum);
        int64* to = reinterpret_cast<int64*>(p.out) + (b * p.out_batch_stride + i * p.out_stride + j) * NB;
        for (int place = 0; place < NB; place++) to[place] += sum[place];
    });
}
