// The words of windowed digits (arithmetic/windowed_digits.py).
#pragma once

#include "formats.cuh"

constexpr int WORD_BITS = 26;
constexpr int64 RADIX = 1ll << WORD_BITS, HALF = RADIX / 2;
