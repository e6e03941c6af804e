// Token sampling, row by row, with the steps and constants of kernels/gpu/sampling.py, so that results are equal.
//
// A token's weight is exp((logit - largest) / temperature), float32, at most 1. Filters are thresholds on weights and
// are searched as integers, because positive floats have the order of their bits. Masses are integer multiples of
// 2^-44, so sums are exact.
#pragma once

#include "elementwise.h"

#include <algorithm>
#include <functional>
#include <vector>

namespace diptych {

// Sampling parameters of a row. Temperature 0 selects the largest logit. top_k 0 and top_p 1 disable the filters.
struct Draw {
    float temperature, min_p;
    int32_t top_k;
    double top_p, noise;
};

inline uint64_t mixed(uint64_t z) { // splitmix64's finaliser
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// Noise of (seed, position): 53 bits in [0, 1). splitmix64 (Steele, Lea, Flood 2014).
inline double noise_of(int64_t seed, int64_t position) {
    const uint64_t golden = 0x9E3779B97F4A7C15u, key = mixed(uint64_t(seed) + golden);
    return double(mixed(key + (uint64_t(position) + 1) * golden) >> 11) * 0x1p-53;
}

// Index of the first largest value, or of the first NaN, as in torch.
inline int64_t largest_index(const float *x, int64_t width) {
    f32s best = splat(NEG_INF);
    i32s where = iota(), odd = {};
    const int64_t whole = width / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) {
        const f32s v = load(x + i);
        const i32s more = v > best;
        odd |= v != v;
        best = more ? v : best;
        where = more ? iota() + int32_t(i) : where;
    }
    float tops[LANES];
    int32_t places[LANES], strange[LANES];
    std::memcpy(tops, &best, sizeof tops);
    std::memcpy(places, &where, sizeof places);
    std::memcpy(strange, &odd, sizeof strange);
    bool nan = false;
    float top = NEG_INF;
    int64_t at = 0;
    for (int lane = 0; lane < LANES; lane++) {
        nan |= strange[lane] != 0;
        const bool better = tops[lane] > top || (tops[lane] == top && places[lane] < at);
        if (whole && better) top = tops[lane], at = places[lane];
    }
    for (int64_t i = whole; i < width; i++) {
        nan |= x[i] != x[i];
        if (x[i] > top) top = x[i], at = i;
    }
    for (int64_t i = 0; nan && i < width; i++)
        if (x[i] != x[i]) return i;
    return at;
}

// Weights of a row [width]. Queries consider only weights with bits of at least `floor`.
class RowWeights {
public:
    // The size of `memory` is the next multiple of LANES.
    RowWeights(const float *x, int64_t width, float largest, float temperature, float *memory)
        : weights(memory), width(width) {
        const float top = largest / temperature;
        for (int64_t i = 0; i < width; i += LANES) {
            float last[LANES];
            if (i + LANES > width) {
                std::fill(last, last + LANES, NEG_INF);
                std::copy(x + i, x + width, last);
            }
            const f32s v = load(i + LANES > width ? last : x + i) / splat(temperature);
            const f32s below = v == top ? splat(0.f) : v - top; // both may be infinite
            store(weights + i, below < -87.f ? splat(0.f) : exponential(below));
        }
    }

    int64_t mass(uint32_t floor) {
        chunks.clear();
        int64_t total = 0;
        for (int64_t at = 0; at < width; at += CHUNK) {
            chunks.push_back(chunk_mass(at, floor));
            total += chunks.back();
        }
        return total;
    }

    // Bits of the count-th largest weight of at least `floor`; `floor` if there are fewer.
    uint32_t largest_few(int64_t count, uint32_t floor) {
        tally(floor);
        int64_t above = 0;
        int bin = BINS;
        while (bin-- > 0 && above + counts[bin] < count) above += counts[bin];
        if (bin < 0) return floor;
        std::vector<uint32_t> few = in_bin(bin, floor);
        const auto which = few.begin() + (count - above - 1);
        std::nth_element(few.begin(), which, few.end(), std::greater<>());
        return *which;
    }

    // Bits of the largest threshold at which the mass of the weights is at least `goal`. `floor` satisfies this.
    uint32_t nucleus(int64_t goal, uint32_t floor) {
        tally(floor);
        int64_t above = 0;
        int bin = BINS;
        while (bin-- > 1 && above + masses[bin] < goal) above += masses[bin];
        std::vector<uint32_t> few = in_bin(bin, floor);
        std::sort(few.begin(), few.end(), std::greater<>());
        for (const uint32_t bits : few)
            if ((above += mass_of(bits)) >= goal) return bits;
        return floor;
    }

    // First token, by id, at which the cumulative mass of weights of at least `floor` exceeds `goal`. Call
    // `mass(floor)` first.
    int64_t at(int64_t goal, uint32_t floor) const {
        size_t chunk = 0;
        while (chunk + 1 < chunks.size() && chunks[chunk] <= goal) goal -= chunks[chunk++];
        for (int64_t i = int64_t(chunk) * CHUNK; i < width; i++)
            if (bits(i) >= floor && (goal -= mass_of(bits(i))) < 0) return i;
        return width; // the goal exceeds the total mass
    }

private:
    static constexpr int64_t CHUNK = 256 * LANES;   // a lane's sum of halves of a chunk fits into 32 bits
    static constexpr int BINS = 256, BIN_BITS = 20; // 1/8 octave each; the first bin contains all smaller weights
    static constexpr int32_t FIRST = (0x3F800000 >> BIN_BITS) - (BINS - 1);

    float *weights;
    const int64_t width;
    std::vector<int64_t> chunks;
    int32_t counts[BINS];
    int64_t masses[BINS];

    uint32_t bits(int64_t i) const {
        uint32_t w;
        std::memcpy(&w, weights + i, sizeof w);
        return w;
    }

    static int64_t mass_of(uint32_t bits) {
        float w;
        std::memcpy(&w, &bits, sizeof w);
        return int64_t(double(w) * 0x1p44);
    }

    static int bin_of(uint32_t bits) { return std::max(int32_t(bits >> BIN_BITS) - FIRST, 0); }

    // Adds two halves of 22 bits, which fit into 32-bit lanes.
    int64_t chunk_mass(int64_t at, uint32_t floor) const {
        i32s high = {}, low = {};
        for (int64_t i = at; i < std::min(at + CHUNK, width); i += LANES) {
            const f32s w = load(weights + i);
            i32s word;
            std::memcpy(&word, &w, sizeof word);
            const f32s scaled = (word >= int32_t(floor) ? w : splat(0.f)) * 0x1p22f;
            const i32s whole = __builtin_convertvector(scaled, i32s);
            high += whole;
            low += __builtin_convertvector((scaled - __builtin_convertvector(whole, f32s)) * 0x1p22f, i32s);
        }
        int64_t total = 0;
        for (int lane = 0; lane < LANES; lane++) total += (int64_t(high[lane]) << 22) + low[lane];
        return total;
    }

    void tally(uint32_t floor) {
        std::fill(counts, counts + BINS, 0);
        std::fill(masses, masses + BINS, 0);
        for (int64_t i = 0; i < width; i++) {
            if (bits(i) < floor) continue;
            const int bin = bin_of(bits(i));
            counts[bin]++;
            masses[bin] += mass_of(bits(i));
        }
    }

    std::vector<uint32_t> in_bin(int bin, uint32_t floor) const {
        std::vector<uint32_t> found;
        for (int64_t i = 0; i < width; i++)
            if (bits(i) >= floor && bin_of(bits(i)) == bin) found.push_back(bits(i));
        return found;
    }
};

// Returns the token of a row, or `width` if a logit is NaN or no token is allowed. For `memory` see `RowWeights`.
inline int64_t draw_token(const float *x, int64_t width, const Draw &draw, float *memory) {
    const int64_t best = largest_index(x, width);
    if (!(x[best] > NEG_INF)) return width;
    if (draw.temperature <= 0) return best;
    RowWeights weights(x, width, x[best], draw.temperature, memory);
    const float min_p = draw.min_p > 0 ? draw.min_p : 0; // as an integer, -0 would exceed all weights
    uint32_t floor;
    std::memcpy(&floor, &min_p, sizeof floor);
    floor = std::max(floor, 1u); // a weight of 0 is never drawn
    if (draw.top_k > 0 && draw.top_k < width) floor = weights.largest_few(draw.top_k, floor);
    int64_t total = weights.mass(floor);
    if (draw.top_p < 1.0) {
        const double share = double(total) * draw.top_p;
        const int64_t goal = std::min(std::max<int64_t>(int64_t(std::ceil(share)), 1), total);
        floor = weights.nucleus(goal, floor);
        total = weights.mass(floor);
    }
    return weights.at(std::min(int64_t(double(total) * draw.noise), total - 1), floor);
}

// Sets logits to minus infinity where the bit is not set. `allowed` has the bits of 32 tokens per word.
inline void mask_logits(const float *x, int64_t width, const uint32_t *allowed, float *out) {
    for (int64_t at = 0; at < width; at += 32) {
        const uint32_t word = allowed[at / 32];
        const int64_t count = std::min<int64_t>(32, width - at);
        if (word == ~0u) {
            std::copy(x + at, x + at + count, out + at);
            continue;
        }
        std::fill(out + at, out + at + count, NEG_INF);
        for (int64_t i = 0; word != 0 && i < count; i++)
            if (word >> i & 1) out[at + i] = x[at + i];
    }
}

} // namespace diptych
