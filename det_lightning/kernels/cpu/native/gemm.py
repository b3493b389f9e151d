"""Exact products of matrices: every element is one exact sum, kept as an integer until the one rounding.

Three ways to the same integer. Rows become 64-bit integers on a common power of two (`native.scan`), a wide row several
bands of them; the sum over a pair of bands is rebuilt from residues where these were computed (`native.rebuild`), or
taken in 128 bits. Rows with special values, very wide ones, and what the residues do not determine are summed product
by product in a long accumulator.
"""

import numpy as np

from ....arithmetic.formats import NB
from .bands import LONG, SCAN_PLACES
from .compiler import device_function, kernel
from .digits import (
    add_integer,
    add_integer_128,
    carry_state,
    clear,
    count_special,
    count_special_product,
    exponent_of,
    is_special,
    significand_of,
)
from .integers import add_128, multiply_add_128, shift_left_128
from .memory import integers_1, integers_2, stack_integers, words_1, words_2
from .rebuild import PLACES, STRETCH, rebuild_stretch, rebuilt
from .rounding import MAGNITUDE_DIGITS, round_128, round_128_normal, round_state
from .vectors import prefer_widest_vectors, stack_floats

LONG_PAIRS = 4
"""Pairs of bands up to which sums in 128 bits are quicker than a long accumulator."""

CARRY_TERMS = 1 << 14
"""Products between two carries of a long accumulator (see `add_integer`)."""


@device_function
def dot_long(state, x, w, terms):
    """state += sum over k of x[k] * w[k], for any float32 patterns. Leaves the state canonical."""
    pending = 0
    for k in range(terms):
        a, b = np.int64(x[k]), np.int64(w[k])
        if is_special(a) or is_special(b):
            count_special_product(state, a, b)
            continue
        add_integer(state, significand_of(a) * significand_of(b), exponent_of(a) + exponent_of(b))
        pending += 1
        if pending == CARRY_TERMS:
            carry_state(state)
            pending = 0
    carry_state(state)


@device_function
def dot_128(x, w, terms):
    """The sum over k of x[k] * w[k], modulo 2^128."""
    high, low = 0, 0
    for k in range(terms):
        high, low = multiply_add_128(high, low, x[k], w[k])
    return high, low


@device_function
def add_bias(state, b):
    """Add one float32 pattern as a further term."""
    if is_special(b):
        count_special(state, b)
    else:
        add_integer(state, significand_of(b), exponent_of(b))


@device_function
def add_bias_128(high, low, exponent, b):
    """(high, low) + bias / 2^exponent, and whether that is an integer of 127 bits. Requires: |(high, low)| <= 2^126."""
    if (b & 0x7FFFFFFF) == 0:
        return high, low, True
    shift = exponent_of(b) - exponent
    if is_special(b) or shift < 0 or shift > 101:
        return high, low, False
    significand = significand_of(b)
    term_high, term_low = shift_left_128(significand >> 63, significand, shift)
    high, low = add_128(high, low, term_high, term_low)
    return high, low, True


@device_function
def pairs_known(x_norms, w_norms, a, a_end, b, b_end, capacity):
    """Whether the residues determine the sum over every pair of bands."""
    for s in range(a, a_end):
        for t in range(b, b_end):
            if x_norms[s] + w_norms[t] > capacity:
                return False
    return True


@device_function
def pair_128(x_integers, w_integers, a, b, terms, sums, parts):
    """The sum of the products of band `a` of x and band `b` of w, modulo 2^128."""
    if sums[4] == 0:
        return dot_128(x_integers[a], w_integers[b], terms)
    rebuild_stretch(sums, a, b, 1, parts)
    return rebuilt(sums, parts, 0)


@device_function
def add_element(
    state, x, w, x_scan, w_scan, x_integers, w_integers, a, a_end, b, b_end, terms, sums, capacity, parts
):  # fmt: skip
    """state = the sum of the products of two rows, bands a .. a_end - 1 and b .. b_end - 1; not canonical."""
    clear(state)
    pairs = (a_end - a) * (b_end - b)
    if (
        x_scan[1, a] >= LONG
        or w_scan[1, b] >= LONG
        or (pairs > LONG_PAIRS if sums[4] == 0 else not pairs_known(x_scan[1], w_scan[1], a, a_end, b, b_end, capacity))
    ):
        dot_long(state, x, w, terms)
        return
    for s in range(a, a_end):
        for t in range(b, b_end):
            high, low = pair_128(x_integers, w_integers, s, t, terms, sums, parts)
            add_integer_128(state, high, low, x_scan[0, s] + w_scan[0, t])


@device_function
def prepare(x_norm, a, w_first, j, size, sums, parts):
    """Prepare columns j .. j + size - 1 of band `a` of x if each has one band; whether it did."""
    if sums[4] == 0 or x_norm >= LONG or w_first[j + size] - w_first[j] != size:
        return False
    rebuild_stretch(sums, a, w_first[j], size, parts)
    return True


@kernel
def gemm_block(
    start, stop, rows, columns, terms, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, x_bands, w_bands,
    x_first_at, w_first_at, x_integers_at, w_integers_at, sums_at, sums_columns, sums_matrix, engine, count, capacity,
    bias_at, out_at, out_stride,
    significand_bits, exponent_bits,
):  # fmt: skip
    """out[i, j] = bits of the rounded sum over k of x[i, k] * w[j, k] + bias[j], for the elements of the block.

    x: int32 [M, K], w: int32 [N, K], out: int32 [M, N], rows `*_stride` apart; bias: int32 [N] or address 0.
    Scans of x_bands and w_bands rows; bands first[i] .. first[i + 1] - 1 belong to row i, int64 [rows + 1].
    Pairs of bands whose norms add up to at most `capacity` are rebuilt from the sums of `count` moduli of `engine`,
    matrices of `sums_matrix` results, `sums_columns` a row (see `native.rebuild`). With count = 0 the integers of the
    bands are there: int64 [bands, K].
    """
    sums = (sums_at, sums_columns, sums_matrix, engine, count)
    prefer_widest_vectors()
    x, w, out = words_2(x_at, rows, x_stride), words_2(w_at, columns, w_stride), words_2(out_at, rows, out_stride)
    x_scan, w_scan = integers_2(x_scan_at, SCAN_PLACES, x_bands), integers_2(w_scan_at, SCAN_PLACES, w_bands)
    x_integers, w_integers = integers_2(x_integers_at, x_bands, terms), integers_2(w_integers_at, w_bands, terms)
    x_first, w_first = integers_1(x_first_at, rows + 1), integers_1(w_first_at, columns + 1)
    bias = words_1(bias_at, columns)
    state, magnitude = stack_integers(NB), stack_integers(MAGNITUDE_DIGITS)
    parts, own_parts = stack_floats(PLACES), stack_floats(PLACES)
    for i in range(start // columns, (stop - 1) // columns + 1):
        a, a_end = x_first[i], x_first[i + 1]
        first, end = max(start - i * columns, 0), min(stop - i * columns, columns)
        for stretch in range((end - first + STRETCH - 1) // STRETCH):
            j0 = first + stretch * STRETCH
            size = min(STRETCH, end - j0)
            prepared = a_end - a == 1 and prepare(x_scan[1, a], a, w_first, j0, size, sums, parts)
            for e in range(size):
                j = j0 + e
                b, b_end = w_first[j], w_first[j + 1]
                bias_bits = np.int64(bias[j]) if bias_at != 0 else 0
                exponent = x_scan[0, a] + w_scan[0, b]
                high, low, whole = 0, 0, False
                if prepared and x_scan[1, a] + w_scan[1, b] <= capacity:
                    high, low = rebuilt(sums, parts, e)
                    whole = True
                elif count == 0 and (a_end - a) * (b_end - b) == 1 and max(x_scan[1, a], w_scan[1, b]) < LONG:
                    high, low = dot_128(x_integers[a], w_integers[b], terms)
                    whole = True
                if whole:
                    sum_high, sum_low, fits = add_bias_128(high, low, exponent, bias_bits)
                    if fits:
                        bits, right = round_128_normal(sum_high, sum_low, exponent, significand_bits, exponent_bits)
                        if not right:
                            bits = round_128(sum_high, sum_low, exponent, significand_bits, exponent_bits)
                        out[i, j] = bits
                        continue
                    clear(state)
                    add_integer_128(state, high, low, exponent)
                else:
                    add_element(
                        state, x[i], w[j], x_scan, w_scan, x_integers, w_integers, a, a_end, b, b_end, terms, sums,
                        capacity, own_parts,
                    )  # fmt: skip
                add_bias(state, bias_bits)
                out[i, j] = round_state(state, magnitude, 1, significand_bits, exponent_bits)


@kernel
def gemm_digits_block(
    start, stop, rows, columns, terms, x_at, x_stride, w_at, w_stride, x_scan_at, w_scan_at, x_bands, w_bands,
    x_first_at, w_first_at, x_integers_at, w_integers_at, sums_at, sums_columns, sums_matrix, engine, count, capacity,
    digits_at, digits_stride,
):  # fmt: skip
    """digits[i, j] += the canonical digits of the sum over k of x[i, k] * w[j, k], for the elements of the block.

    digits: int64 [M, N, NB], rows `digits_stride` elements of NB apart; other arguments as for `gemm_block`.
    """
    sums = (sums_at, sums_columns, sums_matrix, engine, count)
    x, w = words_2(x_at, rows, x_stride), words_2(w_at, columns, w_stride)
    digits = integers_2(digits_at, rows * digits_stride, NB)
    x_scan, w_scan = integers_2(x_scan_at, SCAN_PLACES, x_bands), integers_2(w_scan_at, SCAN_PLACES, w_bands)
    x_integers, w_integers = integers_2(x_integers_at, x_bands, terms), integers_2(w_integers_at, w_bands, terms)
    x_first, w_first = integers_1(x_first_at, rows + 1), integers_1(w_first_at, columns + 1)
    state, parts, own_parts = stack_integers(NB), stack_floats(PLACES), stack_floats(PLACES)
    for i in range(start // columns, (stop - 1) // columns + 1):
        a, a_end = x_first[i], x_first[i + 1]
        first, end = max(start - i * columns, 0), min(stop - i * columns, columns)
        for stretch in range((end - first + STRETCH - 1) // STRETCH):
            j0 = first + stretch * STRETCH
            size = min(STRETCH, end - j0)
            prepared = a_end - a == 1 and prepare(x_scan[1, a], a, w_first, j0, size, sums, parts)
            for e in range(size):
                j = j0 + e
                b, b_end = w_first[j], w_first[j + 1]
                if prepared and x_scan[1, a] + w_scan[1, b] <= capacity:
                    clear(state)
                    high, low = rebuilt(sums, parts, e)
                    add_integer_128(state, high, low, x_scan[0, a] + w_scan[0, b])
                else:
                    add_element(
                        state, x[i], w[j], x_scan, w_scan, x_integers, w_integers, a, a_end, b, b_end, terms, sums,
                        capacity, own_parts,
                    )  # fmt: skip
                carry_state(state)
                target = digits[i * digits_stride + j]
                for place in range(NB):
                    target[place] += state[place]
