// Runs cuda_src/residue_float64.cuh on a host: integers to residues, sums of products of them in any order, and back.
#include "host.h"

#include "residue_float64.cuh"

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

using Integers = std::vector<int64>;

static std::mt19937_64 random_bits(MODULI);

static double residue_of(int64 integer, int g, bool folded) {
    uint64 pattern = static_cast<uint64>(integer) + OFFSET;
    uint32 low = static_cast<uint32>(pattern), high = static_cast<uint32>(pattern >> 32);
    return float64_residue(low, high, group_constants.of[g], folded);
}

// The integer that the kernels find for the sum of x w, the terms added up as `order` says.
static int128 rebuilt(const Integers& x, const Integers& w, const std::vector<int>& order, size_t terms_a_sum = TERMS_A_SUM) {
    int u[GROUPS];
    for (int g = 0; g < GROUPS; g++) {
        double sum = 0;
        for (size_t n = 0; n < order.size(); n++) {
            sum = std::fma(residue_of(x[order[n]], g, false), residue_of(w[order[n]], g, true), sum);
            if (n % terms_a_sum == terms_a_sum - 1) sum = reduced(sum, group_constants.of[g]);
        }
        u[g] = __double2loint(reduced(sum, group_constants.of[g]) + ROUND_BITS);
    }
    return reconstruct(u);
}

// Random integers of at most `bits` bits, many of them the largest.
static Integers integers(int count, int bits) {
    Integers out(count);
    for (int64& one : out) {
        int64 largest = (1ll << bits) - 1;
        int64 size = random_bits() % 3 ? static_cast<int64>(random_bits() % static_cast<uint64>(largest + 1)) : largest;
        one = random_bits() % 2 ? size : -size;
    }
    return out;
}

int main() {
    for (int g = 0; g < GROUPS; g++) {
        int64 p = group_modulus(g), longest = 0;
        // Of any integer the conversions make, the residue is congruent and short.
        for (int n = 0; n < 200000; n++) {
            int64 most = AS_FLOAT64 ? (1ll << 51) - 1 : (1ll << 62) - 1;
            int64 integer = n == 0 ? most : n == 1 ? -most : n < 4000 ? (n / 2 * p + p / 2 + n % 2) * (n % 4 < 2 ? 1 : -1)
                : static_cast<int64>(random_bits() % static_cast<uint64>(2 * most)) - most;
            for (bool folded : {false, true}) {
                int64 residue = static_cast<int64>(residue_of(integer, g, folded));
                int64 wanted = folded ? (integer % p + p) % p * ((fold_of_group(g) + p) % p) % p : (integer % p + p) % p;
                longest = std::max(longest, residue < 0 ? -residue : residue);
                if ((residue - wanted) % p != 0 || residue > LARGEST_RESIDUE || residue < -LARGEST_RESIDUE) {
                    std::printf("the residue of %lld modulo %lld is %lld\n", integer, p, residue);
                    return 1;
                }
            }
        }
        if (2 * longest < p - 2) return std::printf("no residue is near %lld / 2: the search is too easy\n", p), 1;
    }
    // |sum of x w| <= P / 4, and the sums of residues as large as they get.
    int most_bits = bit_length(product_of_moduli(0, MODULI)) - 3;
    for (int turn = 0; turn < 60; turn++) {
        int terms = turn < 20 ? 1 + turn : 1 << (turn % 12), bits_of_sum = most_bits - bit_length(terms);
        if (bits_of_sum < 2) continue;
        int x_bits = std::clamp(turn % 2 ? bits_of_sum / 2 : bits_of_sum / 3, 1, AS_FLOAT64 ? 50 : 61);
        int w_bits = std::clamp(bits_of_sum - x_bits, 1, AS_FLOAT64 ? 50 : 61);
        Integers x = integers(terms, x_bits), w = integers(terms, w_bits);
        std::vector<int> order(terms);
        int128 wanted = 0;
        for (int n = 0; n < terms; n++) {
            order[n] = n;
            if (turn % 3 == 0) w[n] = x[n] < 0 ? -std::abs(w[n]) : std::abs(w[n]);
            wanted += static_cast<int128>(x[n]) * w[n];
        }
        for (int shuffle = 0; shuffle < 3; shuffle++) {
            if (rebuilt(x, w, order) != wanted) return std::printf("a sum of %d products is wrong\n", terms), 1;
            std::shuffle(order.begin(), order.end(), random_bits);
        }
    }
    // The negative control: sums that are reduced too late leave the integers of float64.
    int terms = 1 << 14;
    Integers x = integers(terms, 20), w = x;
    std::vector<int> order(terms);
    int128 wanted = 0;
    for (int n = 0; n < terms; n++) order[n] = n, wanted += static_cast<int128>(x[n]) * w[n];
    if (MODULI >= 8 && rebuilt(x, w, order) != wanted) return std::puts("a sum of squares is wrong"), 1;
    if (MODULI >= 8 && rebuilt(x, w, order, terms) == wanted) return std::puts("the bound on a sum is never needed"), 1;
    std::puts("exact");
    return 0;
}
