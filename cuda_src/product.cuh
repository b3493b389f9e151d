// The arguments of one product (or of one tile of it), which all its kernels share, in the order of cuda_layout.FIELDS.
#pragma once

#include "residue_rows.cuh"

struct Product {
    // What changes from call to call.
    const char* x;  // [batches, rows, depth], unit stride in the last dimension
    const char* w;  // [batches, columns, depth], likewise
    const void* bias;  // [columns] or null; of windowed digits their bases, int64 [rows]
    char* out;  // [batches, rows, columns], unit stride in the last dimension; int64 digits: 21 places an element; of
                // windowed digits the first plane of words, out_batch_stride words before the next
    char* memory;  // scratch; the fields below that are named so are places in it
    int64 barrier;  // which barrier of residue_whole is this call's

    int64 x_format, x_row_stride, x_batch_stride;
    int64 w_format, w_row_stride, w_batch_stride;
    int64 bias_format, out_format, out_stride, out_batch_stride;
    int64 moduli, batches, rows, columns, depth;
    int64 padded_rows, padded_columns, depth_blocks;
    int64 team;  // threads of a row in residue_convert, a power of two
    int64 x_blocks;  // blocks that convert x: 0 if its residues are there already
    int64 columns_a_task;  // of residue_short
    double norm_scale;  // a row's integers are cut so that norm_scale * its squares <= 1 (cuda_layout.norm_scale)
    int64 place_of_counter, place_of_x_residues, place_of_w_residues, place_of_x_facts, place_of_w_facts;
    int64 place_of_products, place_of_flags, place_of_list, list_size;
    int64 place_of_rests, words, fresh;  // of windowed digits: words an element; whether they are written, not added to

    __device__ uint32* flagged() const { return reinterpret_cast<uint32*>(memory + place_of_counter); }
    __device__ int8* x_residues() const { return reinterpret_cast<int8*>(memory + place_of_x_residues); }
    __device__ int8* w_residues() const { return reinterpret_cast<int8*>(memory + place_of_w_residues); }
    __device__ Row* x_facts() const { return reinterpret_cast<Row*>(memory + place_of_x_facts); }
    __device__ Row* w_facts() const { return reinterpret_cast<Row*>(memory + place_of_w_facts); }
    __device__ int8* products() const { return reinterpret_cast<int8*>(memory + place_of_products); }
    __device__ unsigned short* flags() const { return reinterpret_cast<unsigned short*>(memory + place_of_flags); }
    __device__ Rests* x_rests() const { return reinterpret_cast<Rests*>(memory + place_of_rests); }
    __device__ Rests* w_rests() const { return x_rests() + batches * padded_rows; }
    __device__ int64* list() const { return reinterpret_cast<int64*>(memory + place_of_list); }
};

// Where a unit of 16 rows by 32 columns begins. Requires: fewer than 2^32 units and rows of all batches, since divisions of
// 64 bits take as long as much of the work on an element.
struct UnitPlace {
    int64 batch, row, column;

    __device__ __forceinline__ UnitPlace(const Product& p, int64 unit) {
        uint32 column_units = static_cast<uint32>(p.padded_columns / 32), padded_rows = static_cast<uint32>(p.padded_rows);
        uint32 number = static_cast<uint32>(unit), row_unit = number / column_units, first = 16 * row_unit;
        uint32 of = p.batches > 1 ? first / padded_rows : 0;
        batch = of, row = first - of * padded_rows, column = 32 * (number - row_unit * column_units);
    }
};

// Marks the elements of a lane that were not decided, one bit each, and lists them while there is room: an element is
// 512 unit + 16 lane + bit (see residue_rows.cuh). The whole warp calls it.
__device__ __forceinline__ void flag_undone(const Product& p, int64 unit, uint32 undone) {
    int lane = threadIdx.x % 32;
    p.flags()[unit * 32 + lane] = static_cast<unsigned short>(undone);
    if (undone) {
        uint32 place = atomicAdd(p.flagged(), __popc(undone));
        for (uint32 left = undone; left; left &= left - 1, place++)
            if (place < p.list_size) p.list()[place] = unit * 512 + lane * 16 + __ffs(static_cast<int>(left)) - 1;
    }
}
