// architectures: sm_80 sm_89 sm_90 sm_100 sm_120
// residue_round, residue_digits: sums of products from their residues, rounded once or added to digits; elements that the
// cut rows leave undecided are flagged (see residue_rows.cuh). Launch: THREADS threads, one warp a unit.

#include "residue_round.cuh"
#include "residue_units.cuh"

constexpr int THREADS = 256;

template <bool PLAIN>
__device__ __forceinline__ void round_all(const Product& p) {
    int code = static_cast<int>(p.out_format), bias_code = static_cast<int>(p.bias_format);
    rebuild_unit(p, [&](int64 i, int64 j, int64 batch, const int (&u)[GROUPS], const Row& a, const Row& b, bool inside) {
        uint32 term = 0;
        if (!PLAIN && p.bias != nullptr && inside) term = float32_bits(load_bits(p.bias, j, bias_code), bias_code);
        uint32 bits;
        float doubt = inside ? doubt_of(a, b) : 0.0f;
        bool decided = round_sum<PLAIN>(u, a.exponent + b.exponent, doubt, term, p.bias != nullptr, code, bits);
        int64 place = batch * p.out_batch_stride + i * p.out_stride + j;
        if (inside) store_bits(p.out, place, PLAIN ? FLOAT32 : code, bits);
        return decided;
    });
}

// out[b, i, j] = the sum, with bias[j] as one more term, rounded once.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_round(const __grid_constant__ Product p) { round_all<false>(p); }

// The same to float32, without a bias.
extern "C" __global__ void __launch_bounds__(THREADS, 2) residue_round_plain(const __grid_constant__ Product p) { round_all<true>(p); }

// digits[b, i, j, :] += the sum, where nothing was cut off. digits: int64, 21 places an element.
extern "C" __global__ void __launch_bounds__(THREADS) residue_digits(const __grid_constant__ Product p) {
    rebuild_unit(p, [&](int64 i, int64 j, int64 batch, const int (&u)[GROUPS], const Row& a, const Row& b, bool inside) {
        if (!inside || !(doubt_of(a, b) == 0.0f)) return false;
        int128 value = reconstruct(u);
        int64* to = reinterpret_cast<int64*>(p.out) + (batch * p.out_batch_stride + i * p.out_stride + j) * NB;
        int64 sign = value < 0 ? -1 : 1;
        uint128 magnitude = value < 0 ? -static_cast<uint128>(value) : static_cast<uint128>(value);
        int shift = a.exponent + b.exponent - LOWEST_EXPONENT;
        if (shift < 0) {  // every term is a multiple of 2^LOWEST_EXPONENT, so only zeros leave
            magnitude = shift > -128 ? magnitude >> -shift : 0;
            shift = 0;
        }
        int place = shift / DIGIT_BITS;
        uint64 carried = 0;
        for (int d = 0; d < 5; d++) {
            uint64 word = d < 4 ? static_cast<uint32>(magnitude >> (DIGIT_BITS * d)) : 0;
            carried |= word << (shift % DIGIT_BITS);
            uint32 digit = static_cast<uint32>(carried);
            if (digit) to[place + d] += sign * static_cast<int64>(digit);
            carried >>= DIGIT_BITS;
        }
        return true;
    });
}
