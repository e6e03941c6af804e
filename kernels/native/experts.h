// Mixture of experts without its products: routing, copies of rows sorted by expert, and weighted sums.
#pragma once

#include "elementwise.h"

#include <cmath>
#include <vector>

namespace diptych {

// Rows [first, last) of the copies, which one expert multiplies.
struct ExpertUnit {
    int32_t expert, first, last, unused;
};

// Work of the products of one layer's experts: the number of units, and the units.
struct ExpertUnits {
    int64_t count, unused;
    ExpertUnit units[1];
};

// How logits become experts and their shares: kernels/interface/routing.py. flags: 1 normalised, 2 sigmoids.
struct Routing {
    int64_t per_token, flags, groups, kept_groups;
    double scale;
};

// The place of the largest of `count` numbers, of equal ones the first.
inline int64_t largest_at(const float *numbers, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (numbers[i] > numbers[best]) best = i;
    return best;
}

// Leaves -inf of the experts of all groups but the best: by their best expert, or by the sum of their two best.
inline void keep_groups(std::vector<float> &preferred, const Routing &routing, bool by_two) {
    const int64_t size = int64_t(preferred.size()) / routing.groups;
    std::vector<float> worth(routing.groups);
    for (int64_t g = 0; g < routing.groups; g++) {
        float first = NEG_INF, second = NEG_INF;
        for (int64_t i = g * size; i < (g + 1) * size; i++) {
            const float x = preferred[i];
            if (x > first)
                second = first, first = x;
            else if (x > second)
                second = x;
        }
        worth[g] = by_two ? first + second : first;
    }
    std::vector<bool> kept(routing.groups);
    for (int64_t j = 0; j < routing.kept_groups; j++) {
        const int64_t best = largest_at(worth.data(), routing.groups);
        kept[best] = true, worth[best] = NEG_INF;
    }
    for (size_t i = 0; i < preferred.size(); i++)
        if (!kept[i / size]) preferred[i] = NEG_INF;
}

// The experts of one row of logits, the best first, and their shares. `correction` may be null.
inline void route_row(const float *logits, int64_t experts, const Routing &routing, const float *correction,
                      int32_t *chosen, float *shares) {
    const bool sigmoids = routing.flags & 2;
    const float top = logits[largest_at(logits, experts)];
    float total = 0.f, kept = 0.f;
    for (int64_t i = 0; i < experts && !sigmoids; i++) total += std::exp(logits[i] - top);
    const auto score = [&](int64_t i) {
        return sigmoids ? 1.f / (1.f + std::exp(-logits[i])) : std::exp(logits[i] - top) / total;
    };
    std::vector<float> preferred(logits, logits + experts); // softmaxes are ordered as their logits are
    if (sigmoids || correction)
        for (int64_t i = 0; i < experts; i++) preferred[i] = score(i) + (correction ? correction[i] : 0.f);
    if (routing.groups > 1) keep_groups(preferred, routing, correction != nullptr);
    for (int64_t j = 0; j < routing.per_token; j++) {
        const int64_t best = largest_at(preferred.data(), experts);
        chosen[j] = int32_t(best), shares[j] = score(best);
        preferred[best] = NEG_INF;
        kept += shares[j];
    }
    const float scale = float(routing.scale), least = 1e-20f; // sigmoids may all be zero
    for (int64_t j = 0; j < routing.per_token; j++)
        shares[j] = (routing.flags & 1 ? shares[j] / (kept + least) : shares[j]) * scale;
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

// One row plus another one times the sigmoid of its gate, or the whole of it where there is none.
template <typename T> void add_gated_row(const T *row, const T *other, const float *gate, int64_t width, T *out) {
    const float share = gate ? 1.f / (1.f + std::exp(-*gate)) : 1.f;
    for (int64_t i = 0; i < width; i += LANES) store(out + i, load(other + i) * share + load(row + i));
}

} // namespace diptych
