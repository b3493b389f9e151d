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
        for (blockIdx.x = 0; blockIdx.x < columns; blockIdx.x++) run_block(count);
}

template <class... Arguments>
void call(void (*kernel)(Arguments...), unsigned columns, unsigned rows, unsigned count, const long long* values) {
    run(kernel, columns, rows, count, values, std::index_sequence_for<Arguments...>{});
}

}  // namespace grid
