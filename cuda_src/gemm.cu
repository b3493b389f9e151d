// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// gemm: out[i, j] = round(sum over k of x[i, k] * w[j, k] + bias[j]), one rounding.
// The long-accumulator engine: exact on every input.
//
// A team of 32 or 128 threads a result: thread l takes k = l, l + team, ... into its own digits, then the digits of the
// team are added. Launch: blocks of THREADS threads. gemm, gemm_partial: a warp a result, x: [rows, depth],
// w: [columns, depth], contiguous. gemm_flagged, gemm_flagged_digits: any grid.

#include "long_accumulator.cuh"
#include "rounding.cuh"

constexpr int LANES = 32;
constexpr int THREADS = 128;
constexpr int WARPS = THREADS / LANES;
constexpr int AHEAD = 8;
using Column = DigitColumn<THREADS>;

__device__ __forceinline__ int64 warp_index() { return (static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x) / LANES; }

// One row of an operand.
struct Terms {
    const char* first;
    int format;
    __device__ Terms(const void* data, int64 code, int64 offset)
        : first(static_cast<const char*>(data) + offset * (code == FLOAT32 ? 4 : 2)), format(static_cast<int>(code)) {}
    __device__ uint32 operator[](int64 k) const { return float32_bits(load_bits(first, k, format), format); }
};

__device__ __forceinline__ Term term_of(uint32 float32_pattern) { return decode(float32_pattern, format_of(FLOAT32)); }

__device__ __forceinline__ void synchronise(int team) {
    if (team == LANES) __syncwarp();
    else __syncthreads();
}

// The exact sum over k of x[k] * w[k], and of one more term, as not yet carried digits, for the team's first thread to
// read. Requires: depth < 2^31 - 1; the whole team calls it, team = LANES or THREADS.
__device__ __forceinline__ Column accumulate(
    Terms x, Terms w, int64 depth, const void* bias, int64 bias_format, int64 column, int team
) {
    __shared__ int64 memory[NB * THREADS];
    int lane = threadIdx.x % LANES, thread = threadIdx.x % team;
    Column digits{memory + threadIdx.x};
    synchronise(team);  // the last result has been read
    for (int place = 0; place < NB; place++) digits[place] = 0;
    for (int64 first = thread; first < depth; first += AHEAD * team) {
        // All loads before the first use: they wait for memory together.
        uint32 a[AHEAD], b[AHEAD];
#pragma unroll
        for (int v = 0; v < AHEAD; v++) {
            int64 k = first + v * team;
            a[v] = k < depth ? x[k] : 0;
            b[v] = k < depth ? w[k] : 0;
        }
#pragma unroll 1
        for (int v = 0; v < AHEAD; v++) {
            add_product(digits, term_of(a[0]), term_of(b[0]));
#pragma unroll
            for (int u = 0; u + 1 < AHEAD; u++) a[u] = a[u + 1], b[u] = b[u + 1];
        }
    }
    if (bias != nullptr && thread == 0) add_term(digits, term_of(Terms(bias, bias_format, 0)[column]));
    __syncwarp();
    // Lane p adds place p of its warp, each lane starting at another bank.
    int64* warps_own = memory + threadIdx.x / LANES * LANES;
    int64 sum = 0;
    if (lane < NB)
        for (int l = 0; l < LANES; l++) sum += warps_own[lane * THREADS + (lane + l) % LANES];
    __syncwarp();
    if (lane < NB) warps_own[lane * THREADS] = sum;
    synchronise(team);
    if (team == LANES) return Column{warps_own};
    if (threadIdx.x < NB)
        for (int other = 1; other < WARPS; other++)
            memory[threadIdx.x * THREADS] += memory[threadIdx.x * THREADS + other * LANES];
    __syncthreads();
    return Column{memory};
}

__device__ __forceinline__ void copy(int64* digits, Column from) {
    for (int place = 0; place < NB; place++) digits[place] = from[place];
}

// digits[i, j, :] = canonical digits of the exact sum. digits: int64 [rows, columns, 21].
extern "C" __global__ void gemm_partial(
    const void* x, int64 x_format, const void* w, int64 w_format, int64* digits, int64 rows, int64 columns, int64 depth
) {
    int64 result = warp_index();
    if (result >= rows * columns) return;
    Terms x_row(x, x_format, result / columns * depth), w_row(w, w_format, result % columns * depth);
    Column total = accumulate(x_row, w_row, depth, nullptr, FLOAT32, 0, LANES);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy(sum, total);
        normalise(sum);
        for (int place = 0; place < NB; place++) digits[result * NB + place] = sum[place];
    }
}

// out[i, j] = the exact sum, with bias[j] as one more term of it, rounded once. bias: [columns] or null.
extern "C" __global__ void gemm(
    const void* x, int64 x_format, const void* w, int64 w_format, const void* bias, int64 bias_format,
    void* out, int64 out_format, int64 rows, int64 columns, int64 depth
) {
    int64 result = warp_index();
    if (result >= rows * columns) return;
    Terms x_row(x, x_format, result / columns * depth), w_row(w, w_format, result % columns * depth);
    Column total = accumulate(x_row, w_row, depth, bias, bias_format, result % columns, LANES);
    if (threadIdx.x % LANES == 0) {
        int64 sum[NB];
        copy(sum, total);
        int code = static_cast<int>(out_format);
        store_bits(out, result, code, finalize(sum, 1, format_of(code)));
    }
}

// The operands of a product, and the elements that residue_round or residue_digits left undone (see residue_rows.cuh).
struct Flagged {
    const void *x, *w;
    int64 x_format, w_format;
    int64 x_row_stride, x_batch_stride, w_row_stride, w_batch_stride;
    int64 padded_rows, padded_columns, depth, row_units;
    const unsigned short* flags;
    const int64* listed;
    int64 list_size;
    uint32 count;
};

// emit(batch, row, column, the digits in the first thread's column) for one flagged element.
template <class Emit>
__device__ __forceinline__ void at_element(
    const Flagged& f, int64 unit, int owner, int bit, const void* bias, int64 bias_format, int team, Emit& emit
) {
    int64 column_units = f.padded_columns / 32;
    int64 row = unit / column_units * 16 + owner / 4 + bit % 4 / 2 * 8;
    int64 column = unit % column_units * 32 + bit / 4 * 8 + owner % 4 * 2 + bit % 2;
    int64 batch = row / f.padded_rows;
    row %= f.padded_rows;
    Terms x_row(f.x, f.x_format, batch * f.x_batch_stride + row * f.x_row_stride);
    Terms w_row(f.w, f.w_format, batch * f.w_batch_stride + column * f.w_row_stride);
    Column total = accumulate(x_row, w_row, f.depth, bias, bias_format, column, team);
    if (threadIdx.x % team == 0) emit(batch, row, column, total);
}

// Every flagged element, a team an element: of the list if it holds them all, else a warp takes its units' flags.
template <class Emit>
__device__ __forceinline__ void for_each_flagged(const Flagged& f, const void* bias, int64 bias_format, Emit emit) {
    constexpr int LONG = 1024;
    if (f.count <= f.list_size) {
        int team = f.depth >= LONG ? THREADS : LANES;
        int64 teams = static_cast<int64>(gridDim.x) * (THREADS / team);
        for (int64 at = static_cast<int64>(blockIdx.x) * (THREADS / team) + threadIdx.x / team; at < f.count; at += teams) {
            int64 element = f.listed[at];
            at_element(f, element / 512, static_cast<int>(element % 512 / 16), static_cast<int>(element % 16), bias,
                       bias_format, team, emit);
        }
        return;
    }
    int64 units = f.row_units * (f.padded_columns / 32);
    int64 warps = static_cast<int64>(gridDim.x) * WARPS;
    for (int64 unit = warp_index(); unit < units; unit += warps) {
        uint32 mine = f.flags[unit * LANES + threadIdx.x % LANES];
        uint32 owners = __ballot_sync(0xffffffffu, mine != 0);
        for (; owners; owners &= owners - 1) {
            int owner = __ffs(static_cast<int>(owners)) - 1;
            for (uint32 left = __shfl_sync(0xffffffffu, mine, owner); left; left &= left - 1)
                at_element(f, unit, owner, __ffs(static_cast<int>(left)) - 1, bias, bias_format, LANES, emit);
        }
    }
}

// out[b, i, j] for the flagged elements. Leaves at once if *flagged is 0.
extern "C" __global__ void __launch_bounds__(THREADS) gemm_flagged(
    const void* x, int64 x_format, int64 x_row_stride, int64 x_batch_stride, const void* w, int64 w_format,
    int64 w_row_stride, int64 w_batch_stride, int64 row_units, int64 padded_rows, int64 padded_columns, int64 depth,
    const unsigned short* flags, const int64* listed, int64 list_size, const uint32* flagged, const void* bias,
    int64 bias_format, void* out, int64 out_format, int64 out_stride, int64 out_batch_stride
) {
    uint32 count = *flagged;
    if (count == 0) return;
    Flagged f = {x, w, x_format, w_format, x_row_stride, x_batch_stride, w_row_stride, w_batch_stride,
                 padded_rows, padded_columns, depth, row_units, flags, listed, list_size, count};
    int code = static_cast<int>(out_format);
    for_each_flagged(f, bias, bias_format, [&](int64 b, int64 i, int64 j, Column total) {
        int64 sum[NB];
        copy(sum, total);
        store_bits(out, b * out_batch_stride + i * out_stride + j, code, finalize(sum, 1, format_of(code)));
    });
}

// digits[b, i, j, :] += the exact sum, for the flagged elements. Leaves at once if *flagged is 0.
extern "C" __global__ void __launch_bounds__(THREADS) gemm_flagged_digits(
    const void* x, int64 x_format, int64 x_row_stride, int64 x_batch_stride, const void* w, int64 w_format,
    int64 w_row_stride, int64 w_batch_stride, int64 row_units, int64 padded_rows, int64 padded_columns, int64 depth,
    const unsigned short* flags, const int64* listed, int64 list_size, const uint32* flagged, int64* digits,
    int64 out_stride, int64 out_batch_stride
) {
    uint32 count = *flagged;
    if (count == 0) return;
    Flagged f = {x, w, x_format, w_format, x_row_stride, x_batch_stride, w_row_stride, w_batch_stride,
                 padded_rows, padded_columns, depth, row_units, flags, listed, list_size, count};
    for_each_flagged(f, nullptr, FLOAT32, [&](int64 b, int64 i, int64 j, Column total) {
        int64 sum[NB];
        copy(sum, total);
        normalise(sum);
        int64* to = digits + (b * out_batch_stride + i * out_stride + j) * NB;
        for (int place = 0; place < NB; place++) to[place] += sum[place];
    });
}
