// Behind a source of cuda_src/: its kernels that take a Product, called by their names.
#pragma once

extern "C" void launch(
    void (*kernel)(Product), unsigned blocks, unsigned count, unsigned shared_bytes, unsigned disorder, const Product* p
) {
    std::vector<char> memory(shared_bytes + 128);
    grid::shared = memory.data() + (128 - reinterpret_cast<uintptr_t>(memory.data()) % 128) % 128;
    gridDim.x = blocks, blockDim.x = count;
    grid::disorder = disorder;
    for (unsigned n = 0; n < blocks; n++) {
        std::memset(grid::shared, 0xcb, shared_bytes);  // what a block before left there
        grid::body = [&] { kernel(*p); };
        blockIdx.x = disorder % 2 ? blocks - 1 - n : n;
        grid::run_block(count);
    }
}
