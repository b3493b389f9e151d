"""Residues of integers for int8 matrix products, straight from the floats.

`arithmetic.residue_int8` defines the moduli, the bounds and the reconstruction; the constants here are its numbers. An
integer is cut into four limbs, v = sum over l of limb[l] * 2^(16 l) with |limb[l]| <= 2^15, and a residue is that of
sum over l of limb[l] * c[l], c[l] the balanced residue of 2^(16 l) (times the fold): at most 4 * 2^15 * 2^7 = 2^24, so
float32 holds every step exactly.
"""

import numpy as np

from ....arithmetic.residue import balanced_residue
from ....arithmetic.residue_int8 import MAXIMUM_MODULI, fold, moduli
from .bands import SCAN_PLACES, band_integer
from .compiler import device_function, kernel
from .memory import integers_1, integers_2, stack_integers, words_1
from .vectors import bytes_1, multiply_add, prefer_widest_vectors, stack_float32s, stack_words

LIMBS, LIMB_BITS = 4, 16
CHUNK = 1024
"""Elements whose limbs are kept at a time: they stay in the first cache."""
_KEPT = LIMBS * CHUNK

PANEL, FOUR = 16, 4
"""Bands of a panel, and the neighbouring terms that lie together in it."""
_PANEL_TERMS = CHUNK // PANEL

_ROUND = np.float32(12582912.0)
"""1.5 * 2^23: adding and subtracting it rounds a float32 below 2^22 to an integer."""

_PLAIN_MODULUS = 251
"""v * (1 / p) in float32 is off by at most |v| / p * 2^-23, so v - rint(v / p) p by at most p / 2 + 2 for |v| <= 2^24:
below 128 for p <= 251. A power of two has no error. The others are reduced a second time."""

_MODULI = np.array(moduli(MAXIMUM_MODULI), np.float32)
_INVERSES = np.array([1 / p for p in moduli(MAXIMUM_MODULI)], np.float32)
_TWICE = np.array([p > _PLAIN_MODULUS and p & (p - 1) != 0 for p in moduli(MAXIMUM_MODULI)], np.int64)


def _limb_factors() -> np.ndarray:
    """c[count, m, l] for an operand folded among `count` moduli; count 0: not folded."""
    table = np.zeros((MAXIMUM_MODULI + 1, MAXIMUM_MODULI, LIMBS), np.float32)
    for count in range(MAXIMUM_MODULI + 1):
        factors = fold(count) if count else (1,) * MAXIMUM_MODULI
        for m, (p, factor) in enumerate(zip(moduli(count or MAXIMUM_MODULI), factors, strict=True)):
            table[count, m] = [balanced_residue(factor << (LIMB_BITS * limb), p) for limb in range(LIMBS)]
    return table


_FACTORS = _limb_factors()
_HALF, _MASK = 1 << (LIMB_BITS - 1), (1 << LIMB_BITS) - 1
_BALANCE = sum(_HALF << (LIMB_BITS * limb) for limb in range(LIMBS - 1))


@device_function
def _fill_limbs(words, size, lowest, limbs):
    """The limbs of bands lowest[k] of float32 patterns, limb l of element k at limbs[CHUNK l + k]; returns whether the
    highest ones are all zero."""
    tops = 0
    for k in range(size):
        value = band_integer(np.int64(words[k]), lowest[k]) + _BALANCE
        top = value >> (3 * LIMB_BITS)
        tops |= top
        limbs[k] = np.float32(np.int32((value & _MASK) - _HALF))
        limbs[CHUNK + k] = np.float32(np.int32(((value >> LIMB_BITS) & _MASK) - _HALF))
        limbs[2 * CHUNK + k] = np.float32(np.int32(((value >> (2 * LIMB_BITS)) & _MASK) - _HALF))
        limbs[3 * CHUNK + k] = np.float32(np.int32(top))
    return tops == 0


@device_function
def _nearest(value, modulus, inverse):
    """value minus a near multiple of the modulus, an integer that float32 holds."""
    multiple = multiply_add(value, inverse, _ROUND) - _ROUND
    return multiply_add(-multiple, modulus, value)


@device_function
def _residues(limbs, size, short, m, folded_count, target):
    """target[k] = a residue modulo modulus m of the integers whose limbs these are."""
    factors = _FACTORS[folded_count, m]
    a, b, c, d = factors[0], factors[1], factors[2], factors[3]
    modulus, inverse = _MODULI[m], _INVERSES[m]
    if _TWICE[m] != 0:
        for k in range(size):
            value = multiply_add(limbs[3 * CHUNK + k], d, limbs[2 * CHUNK + k] * c)
            value = multiply_add(limbs[k], a, multiply_add(limbs[CHUNK + k], b, value))
            value = _nearest(value, modulus, inverse)
            target[k] = np.int8(np.int32(_nearest(value, modulus, inverse)))
    elif short:
        for k in range(size):
            value = multiply_add(limbs[k], a, multiply_add(limbs[CHUNK + k], b, limbs[2 * CHUNK + k] * c))
            target[k] = np.int8(np.int32(_nearest(value, modulus, inverse)))
    else:
        for k in range(size):
            value = multiply_add(limbs[3 * CHUNK + k], d, limbs[2 * CHUNK + k] * c)
            value = multiply_add(limbs[k], a, multiply_add(limbs[CHUNK + k], b, value))
            target[k] = np.int8(np.int32(_nearest(value, modulus, inverse)))


@device_function
def _fill_rows(start, stop, operand, terms, count, out_at, out_terms, out_stride, limbs, lowest):
    """Residues of bands start .. stop - 1 as rows; see `int8_residues_block`."""
    at, stride, rows_at, scan_at, bands, folded_count = operand
    rows, scan = integers_1(rows_at, bands), integers_2(scan_at, SCAN_PLACES, bands)
    for band in range(start, stop):
        for k in range(CHUNK):
            lowest[k] = scan[0, band]
        for chunk in range((out_terms + CHUNK - 1) // CHUNK):
            k0 = chunk * CHUNK
            size, out_size = min(CHUNK, max(terms - k0, 0)), min(CHUNK, out_terms - k0)
            words = words_1(at + 4 * (rows[band] * stride + k0), size)
            short = _fill_limbs(words, size, lowest, limbs)
            for m in range(count):
                target = bytes_1(out_at + m * out_stride + band * out_terms + k0, out_size)
                _residues(limbs, size, short, m, folded_count, target)
                for k in range(size, out_size):
                    target[k] = np.int8(0)


@device_function
def _fill_panel(panel, operand, terms, count, out_at, out_terms, out_stride, limbs, lowest, words):
    """Residues of a panel of 16 bands: int8 [out_terms / 4, 16, 4] at panel * 16 * out_terms, for each modulus.

    Bands that the panel lacks may hold anything.
    """
    at, stride, rows_at, scan_at, bands, folded_count = operand
    rows, scan = integers_1(rows_at, bands), integers_2(scan_at, SCAN_PLACES, bands)
    lanes = min(PANEL, bands - panel * PANEL)
    for k in range(CHUNK):
        lowest[k], words[k] = 0, np.int32(0)
    for lane in range(lanes):
        exponent = scan[0, panel * PANEL + lane]
        for four in range(_PANEL_TERMS // FOUR):
            for e in range(FOUR):
                lowest[(four * PANEL + lane) * FOUR + e] = exponent
    for chunk in range(out_terms // _PANEL_TERMS):
        k0 = chunk * _PANEL_TERMS
        for lane in range(lanes):
            row_at = at + 4 * (rows[panel * PANEL + lane] * stride + k0)
            if k0 + _PANEL_TERMS <= terms:
                source = words_1(row_at, _PANEL_TERMS)
                for four in range(_PANEL_TERMS // FOUR):
                    for e in range(FOUR):
                        words[(four * PANEL + lane) * FOUR + e] = source[four * FOUR + e]
            else:
                source = words_1(row_at, max(terms - k0, 0))
                for k in range(_PANEL_TERMS):
                    word = source[k] if k0 + k < terms else np.int32(0)
                    words[(k // FOUR * PANEL + lane) * FOUR + k % FOUR] = word
        short = _fill_limbs(words, CHUNK, lowest, limbs)
        for m in range(count):
            target = bytes_1(out_at + m * out_stride + PANEL * (panel * out_terms + k0), CHUNK)
            _residues(limbs, CHUNK, short, m, folded_count, target)


@kernel
def int8_residues_block(
    start, stop, terms, at, stride, rows_at, scan_at, bands, folded_count, count, out_at, out_terms, out_stride
):  # fmt: skip
    """out[m, band, k] = a residue, at most 128 in magnitude, of the band's integers[k] modulo modulus m < count.

    For bands start .. stop - 1; at, stride: the operand; rows: int64 [bands], whose band it is; scan: of the bands. With
    `folded_count` > 0 it is the residue of integer * fold among that many moduli. out: int8 [bands, out_terms], matrices
    `out_stride` bytes apart; zeros fill terms .. out_terms - 1. Bands of rows with special values get residues that mean
    nothing.
    """
    prefer_widest_vectors()
    limbs, lowest = stack_float32s(_KEPT), stack_integers(CHUNK)
    operand = (at, stride, rows_at, scan_at, bands, folded_count)
    _fill_rows(start, stop, operand, terms, count, out_at, out_terms, out_stride, limbs, lowest)


@kernel
def int8_operands_block(
    start, stop, terms, x_at, x_stride, x_rows_at, x_scan_at, x_bands, x_folded_count,
    w_at, w_stride, w_rows_at, w_scan_at, w_bands, w_folded_count, count, x_out_at, w_out_at, out_terms, x_out_stride,
    w_out_stride,
):  # fmt: skip
    """The residues of both operands as `native.amx_products` takes them: x as rows, w as panels of 16 bands.

    Units: groups of 16 bands of x, then the panels of w; out_terms is a multiple of 64; other arguments, once for each
    operand, as for `int8_residues_block`.
    """
    prefer_widest_vectors()
    limbs, lowest, words = stack_float32s(_KEPT), stack_integers(CHUNK), stack_words(CHUNK)
    x, w = (
        (x_at, x_stride, x_rows_at, x_scan_at, x_bands, x_folded_count),
        (w_at, w_stride, w_rows_at, w_scan_at, w_bands, w_folded_count),
    )
    groups = (x_bands + PANEL - 1) // PANEL
    for unit in range(start, stop):
        if unit < groups:
            first = unit * PANEL
            end = min(first + PANEL, x_bands)
            _fill_rows(first, end, x, terms, count, x_out_at, out_terms, x_out_stride, limbs, lowest)
        else:
            _fill_panel(unit - groups, w, terms, count, w_out_at, out_terms, w_out_stride, limbs, lowest, words)
