// The low-rank changes that adapters make at a matrix: a row's output grows by B (A x) of the adapter that it uses.
#pragma once

#include "elementwise.h"

namespace diptych {

constexpr int64_t MOST_PARTS = 3, MOST_RANKS = 3 * 512; // of one matrix: q, k and v; numbers between A and B

// `count` outputs from `first` on: b is [rank][count], scaled.
struct LoraPart {
    int64_t first, count, rank;
    const void *b;
};

// What one adapter changes at one matrix: a is [ranks of all parts][inputs].
struct Lora {
    const void *a;
    int64_t num_parts;
    LoraPart parts[MOST_PARTS];
};

// Dot products of x with `ranks` rows of `a`, each one chain of additions whatever the others are.
template <typename T> void shrink(const T *x, const T *a, int64_t k, int64_t ranks, float *out) {
    int64_t r = 0;
    for (; r + 4 <= ranks; r += 4, a += 4 * k) {
        f32s s0 = {}, s1 = {}, s2 = {}, s3 = {};
        for (int64_t i = 0; i < k; i += LANES) {
            const f32s v = load(x + i);
            s0 = v * load(a + i) + s0, s1 = v * load(a + k + i) + s1;
            s2 = v * load(a + 2 * k + i) + s2, s3 = v * load(a + 3 * k + i) + s3;
        }
        out[r] = sum(s0), out[r + 1] = sum(s1), out[r + 2] = sum(s2), out[r + 3] = sum(s3);
    }
    for (; r < ranks; r++, a += k) {
        f32s s = {};
        for (int64_t i = 0; i < k; i += LANES) s = load(x + i) * load(a + i) + s;
        out[r] = sum(s);
    }
}

// Offset of output i from the first output of its part. The panels of a gated product alternate gates and ups.
inline int64_t place_of(int64_t i, bool gated) { return gated ? 2 * i : i; }

// Adds the product of one part to a row.
template <typename T> void expand(const LoraPart &part, const float *s, bool gated, T *y) {
    const T *b = static_cast<const T *>(part.b);
    for (int64_t i = 0; i < part.count;) {
        if (i + 2 * LANES <= part.count) {
            f32s first = {}, second = {};
            for (int64_t r = 0; r < part.rank; r++) {
                const T *from = b + r * part.count + i;
                first = load(from) * s[r] + first, second = load(from + LANES) * s[r] + second;
            }
            T *to = y + place_of(i, gated), *next = y + place_of(i + LANES, gated);
            store(to, load(to) + first), store(next, load(next) + second);
            i += 2 * LANES;
            continue;
        }
        f32s total = {};
        for (int64_t r = 0; r < part.rank; r++) total = load(b + r * part.count + i) * s[r] + total;
        T *to = y + place_of(i, gated);
        store(to, load(to) + total);
        i += LANES;
    }
}

// Adds an adapter's product to one row of outputs. With `gated`, parts start at a vector of gates or ups.
template <typename T> void add_lora_row(const Lora &lora, const T *x, int64_t k, bool gated, T *y) {
    float s[MOST_RANKS];
    int64_t ranks = 0;
    for (int64_t p = 0; p < lora.num_parts; p++) ranks += lora.parts[p].rank;
    shrink(x, static_cast<const T *>(lora.a), k, ranks, s);
    const float *from = s;
    for (int64_t p = 0; p < lora.num_parts; p++) {
        const LoraPart &part = lora.parts[p];
        expand(part, from, gated, y + part.first);
        from += part.rank;
    }
}

// One row of a gated product's panels, gates and ups in turn, to `width` gated outputs: as the product's own epilogue.
template <typename T> void gate_panels_row(const T *x, int64_t width, Epilogue kind, T *out) {
    for (int64_t i = 0; i < width; i += LANES)
        store(out + i, gate_lanes(load(x + 2 * i), load(x + 2 * i + LANES), kind));
}

} // namespace diptych
