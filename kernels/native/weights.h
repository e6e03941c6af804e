// The weights of one matrix, in the order in which its product reads them.
//
// A panel holds two vectors of outputs side by side, 32 with AVX-512, for every input (float32, and what is widened to it), 2 inputs
// (bfloat16) or 4 (int8).
#pragma once

#include "fetch.h"

#include <algorithm>

namespace diptych {

constexpr int PANEL = 2 * LANES; // outputs of a panel
constexpr int DENSE_ROWS = REGISTERS == 32 ? 12 : 6, CODED_ROWS = DENSE_ROWS / 2; // of a tile at most: what the registers hold
constexpr int64_t STRIDE = 64; // inputs between two steps of fetching

enum Format : int32_t { FLOAT32 = 0, BRAIN = 1, HALF = 2, BFLOAT16 = 3, SHORT = 4, INT8 = 5, INT4 = 6 };

// Panels lie one behind the other; the last one is padded with zeros.
//   FLOAT32:  [panel][k][PANEL].
//   BFLOAT16: [panel][k / 2][PANEL][2].
//   BRAIN, HALF: weights that are no wider than bfloat16 or float16, for inputs in float32; as BFLOAT16, or as FLOAT32.
//   SHORT: bfloat16 in 12 bits, see short_weights.h.
//   INT8: [panel][k / 4][PANEL][4] int8 q; w = scale * q, scale float16 [panel][k / group][PANEL]; offset int32 of the same shape,
//         -128 * sum(q), undoes what the inputs' codes are above their signed values.
//   INT4: [panel][k / 8][PANEL][4] bytes, the first quad in the low halves; w = scale * q + offset, q 0 .. 15, offset float16.
struct Weights {
    const void *codes, *scale, *offset;
    const float *bias; // [n] or null
    int64_t n, k, group, format;

    int64_t panels() const { return (n + PANEL - 1) / PANEL; }
    bool coded() const { return format >= INT8; }

    // Calls of `Fetcher::step` while `rows` rows meet one panel.
    int64_t steps(int64_t rows) const {
        const int64_t most = coded() ? CODED_ROWS : DENSE_ROWS;
        return (rows + most - 1) / most * (coded() ? k / group : (k + STRIDE - 1) / STRIDE);
    }

    void fetch(int64_t panel, Fetcher &fetcher) const {
        static const int64_t bits[] = {32, 16, 16, 16, 12, 8, 4}; // of a weight
        const int64_t bytes = k * PANEL * bits[format] / 8, scales = coded() ? k / group * PANEL * 2 : 0;
        const int64_t offsets = format == INT8 ? 2 * scales : scales;
        fetcher.add(static_cast<const char *>(codes) + panel * bytes, bytes);
        fetcher.add(static_cast<const char *>(scale) + panel * scales, scales);
        fetcher.add(static_cast<const char *>(offset) + panel * offsets, offsets);
    }
};

} // namespace diptych
