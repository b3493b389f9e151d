// Calls a kernel whose arguments have 8 bytes each, in a grid of blocks, on a host.
#pragma once

#include "grid.h"

#include <utility>

namespace grid {

template <class T>
T argument(long long value) {
    if constexpr (std::is_pointer_v<T>) return reinterpret_cast<T>(value);
    else return static_cast<T>(value);
}

template <class... Arguments, std::size_t... PLACES>
void run(
    void (*kernel)(Arguments...), unsigned columns, unsigned rows, unsigned count, const long long* values,
    std::index_sequence<PLACES...>
) {
    gridDim.x = columns, gridDim.y = rows, blockDim.x = count, disorder = 1;
    body = [=] { kernel(argument<Arguments>(values[PLACES])...); };
    for (blockIdx.y = 0; blockIdx.y < rows; blockIdx.y++)
        for (unsigned n = 0; n < columns; n++) blockIdx.x = columns - 1 - n, run_block(count);
}

template <class... Arguments>
void call(void (*kernel)(Arguments...), unsigned columns, unsigned rows, unsigned count, const long long* values) {
    run(kernel, columns, rows, count, values, std::index_sequence_for<Arguments...>{});
}

}  // namespace grid
