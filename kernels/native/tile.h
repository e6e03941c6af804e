// What the products of all formats share: their inputs, and fetching ahead of the weights.
#pragma once

#include "vectors.h"
#include "weights.h"

namespace diptych {

constexpr int PREFETCH_BYTES = 2048; // ahead of a panel that streams from memory
constexpr int STREAMED_ROWS = 4;     // up to this many rows always wait for memory, more rows only at times

// Rows as the product wants them: float32 or bf16 [rows][k]; for Q8 uint8, x = scale * (data - 128), for nibbles
// int8, x = scale * data, with a scale for each group of k, and for nibbles the sum of the group's values.
struct Inputs {
    const void *data;
    const float *scale, *sum; // [rows][k / group]
    // From one row to the next, of dense inputs and of the product: where the rows are parts of longer ones. 0: k, n.
    int64_t stride = 0, out_stride = 0;

    int64_t row_stride(const Weights &w) const { return stride ? stride : w.k; }
};

template <int R, int BYTES = 2 * LINE> inline void fetch_ahead(const void *weights) {
    if (R > STREAMED_ROWS) return;
    const char *from = static_cast<const char *>(weights) + PREFETCH_BYTES;
    for (int at = 0; at < BYTES; at += LINE) __builtin_prefetch(from + at);
}

template <int R> inline void copy_tile(const f32s (&from)[R][2], f32s (&to)[R][2]) {
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) to[r][0] = from[r][0], to[r][1] = from[r][1];
}

} // namespace diptych
