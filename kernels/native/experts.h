// Between the products of a mixture of experts: which experts a row goes to, its copies by expert, and their sum.
#pragma once

#include "elementwise.h"

#include <cmath>
#include <vector>

namespace diptych {

// Rows [first, last) of the copies, which one expert multiplies.
struct ExpertUnit {
    int32_t expert, first, last, unused;
};

// What the products of one layer's experts do: as many units as there are, and those.
struct ExpertUnits {
    int64_t count, unused;
    ExpertUnit units[1];
};

// The experts of one row of logits, the best first, and the softmax over all of them; of those chosen alone where
// they are `normalised`. Of equal logits the first wins.
inline void route_row(const float *logits, int64_t experts, int64_t per_token, bool normalised, int32_t *chosen,
                      float *shares) {
    float top = logits[0], total = 0.f, kept = 0.f;
    for (int64_t i = 1; i < experts; i++) top = logits[i] > top ? logits[i] : top;
    for (int64_t i = 0; i < experts; i++) total += std::exp(logits[i] - top);
    for (int64_t j = 0; j < per_token; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < experts; i++) {
            bool taken = false;
            for (int64_t other = 0; other < j; other++) taken = taken || chosen[other] == i;
            if (!taken && (best < 0 || logits[i] > logits[best])) best = i;
        }
        chosen[j] = int32_t(best);
        shares[j] = std::exp(logits[best] - top) / total;
        kept += shares[j];
    }
    for (int64_t j = 0; normalised && j < per_token; j++) shares[j] /= kept;
}

// Gives each pair of row and expert a place, pairs of one expert side by side in the order of their rows, and lists
// units of at most `rows_of_unit` places.
inline void group_by_expert(const int32_t *chosen, int64_t pairs, int64_t experts, int64_t rows_of_unit,
                            int32_t *places, ExpertUnits *out) {
    std::vector<int32_t> next(experts + 1);
    for (int64_t i = 0; i < pairs; i++) next[chosen[i] + 1]++;
    out->count = 0;
    for (int64_t e = 0; e < experts; e++) {
        const int32_t end = next[e] + next[e + 1];
        for (int32_t first = next[e]; first < end; first += int32_t(rows_of_unit)) {
            const int32_t last = std::min(end, first + int32_t(rows_of_unit));
            out->units[out->count++] = {int32_t(e), first, last, 0};
        }
        next[e + 1] = end;
    }
    for (int64_t i = 0; i < pairs; i++) places[i] = next[chosen[i]]++;
}

// One row's sum of what its experts made, by its shares.
template <typename T>
void combine_row(const T *made, const int32_t *places, const float *shares, int64_t per_token, int64_t width, T *out) {
    for (int64_t i = 0; i < width; i += LANES) {
        f32s total = {};
        for (int64_t j = 0; j < per_token; j++) total = load(made + places[j] * width + i) * shares[j] + total;
        store(out + i, total);
    }
}

// One row plus another one times the sigmoid of its gate.
template <typename T> void add_gated_row(const T *row, const T *other, float gate, int64_t width, T *out) {
    const float share = 1.f / (1.f + std::exp(-gate));
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(other + i) * share + load(row + i));
}

} // namespace diptych
