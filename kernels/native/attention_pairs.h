// Attention of bf16 queries over blocks of bf16 or 8 bits, for CPUs that multiply pairs of bf16: the same tiles and
// the same order as attention.h, with scores and sums in float32 and the weights of a tile rounded to bf16.
#pragma once

#include "attention.h"
#include "linear.h"

namespace diptych {

#if defined(DIPTYCH_BF16)

// Calls back with a number of pairs, at most those that are loaded together, and where they begin, until `dim`
// dimensions are done.
template <typename C, typename F> inline void by_pairs(int dim, F &&call) {
    constexpr int PAIRS = Pairs<C>::PAIRS, UNIT = Pairs<C>::UNIT;
    int at = 0;
    for (; at + 2 * PAIRS <= dim; at += 2 * PAIRS) call(std::integral_constant<int, PAIRS>{}, at);
    switch ((dim - at) / 2 / UNIT) {
    case 1: return call(std::integral_constant<int, UNIT>{}, at);
    case 2: return call(std::integral_constant<int, std::min(2 * UNIT, PAIRS)>{}, at);
    case 3: return call(std::integral_constant<int, std::min(3 * UNIT, PAIRS)>{}, at);
    }
}

// acc[R] += queries[R][2 * P of dim] . keys, for 16 keys.
template <int R, int P, typename C>
inline void add_scores(const bf16 *queries, int dim, const C *const *rows, int at, f32s (&acc)[R]) {
    Pairs<C> pairs;
    pairs.template load<P>(rows, at);
    again(queries);
#pragma GCC unroll 32
    for (int p = 0; p < P; p++) {
        const i32s key = pairs.pair(p);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r] = dot_pairs(acc[r], key, splat_word(queries + r * dim + at + 2 * p));
    }
}

// scores[R][G * 16] = scale * queries[R][dim] . keys. The groups take turns, so that no sum waits for the one before
// it.
template <int R, int G, typename C>
void score_few(const bf16 *queries, const C *const *rows, float *scores, int dim, float scale,
               RowStream<bf16, C> &stream) {
    f32s acc[G][R] = {};
    by_pairs<C>(dim, [&](auto pairs, int at) {
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) {
            stream.fetch(std::max(1, Pairs<C>::PAIRS * LANES / dim));
            add_scores<R, pairs>(queries, dim, rows + g * LANES, at, acc[g]);
        }
    });
#pragma GCC unroll 2
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store(scores + r * TILE + g * LANES, acc[g][r] * scale);
}

// sums[R][V * 16 of dim] += weights[R][count] . values, which start at element `value_at` of their slots
template <int R, int V, typename C>
void add_few(const bf16 *weights, const C *const *rows, int value_at, int at, float *sums, int count, int dim,
             RowStream<bf16, C> &stream) {
    f32s acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count; i += 2) {
        if (at == 0) stream.fetch(1);
        i32s value[V];
        Pairs<C>::interleave(rows[i] + value_at + at, rows[i + 1] + value_at + at, value);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const i32s p = splat_word(weights + r * TILE + i);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], p, value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

// scores[R][V * 16 of TILE] = scale * queries[R][dim] . keys
template <int R, int V> void score_pairs(const bf16 *queries, const uint32_t *keys, float *scores, int dim,
                                         float scale) {
    f32s acc[R][V] = {};
    for (int d = 0; d < dim / 2; d++) {
        i32s key[V];
        for (int v = 0; v < V; v++) key[v] = load_bytes(keys + d * TILE + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const i32s q = splat_word(queries + r * dim + 2 * d);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], q, key[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(scores + r * TILE + v * LANES, acc[r][v] * scale);
}

// sums[R][V * 16 of dim] += weights[R][count] . values
template <int R, int V> void add_pairs(const bf16 *weights, const uint32_t *values, float *sums, int count, int dim) {
    f32s acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count / 2; i++) {
        i32s value[V];
        for (int v = 0; v < V; v++) value[v] = load_bytes(values + i * dim + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const i32s p = splat_word(weights + r * TILE + 2 * i);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], p, value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

// For more than one group of rows it first writes down a tile's pairs: keys [dim / 2][TILE], values
// [TILE / 2][value_dim].
template <typename C> struct PairWork {
    alignas(64) float scores[GROUP * TILE];
    alignas(64) bf16 weights[GROUP * TILE];
    std::vector<bf16> queries; // [rows][dim]
    std::vector<uint32_t> keys, values;
    static constexpr bool SCALES_LATER = SCALE<C> != 0; // scales multiply scores and weights, which are float32
    Sums so_far;
    int value_dim, value_at; // numbers of a value, and where it begins in its slot

    void begin(int rows, const Shape &shape) {
        value_dim = int(shape.value_dim()), value_at = int(shape.value_at());
        queries.resize(rows * shape.head_dim);
        keys.resize(TILE * shape.head_dim / 2);
        values.resize(TILE * value_dim / 2);
    }

    void take(int row, const bf16 *query, int dim, float) { Pairs<C>::arrange(query, &queries[row * dim], dim); }

    void score(const Tile<C> &tile, int row, int rows, int dim, float scale, RowStream<bf16, C> &stream) {
        const bf16 *query = &queries[row * dim];
        by_rows(rows - row, [&](auto r) {
            if (rows <= GROUP) {
                int i = 0;
                for (; i + 2 * LANES <= tile.count; i += 2 * LANES)
                    score_few<r, 2>(query, tile.rows + i, scores + i, dim, scale, stream);
                if (i < tile.count) score_few<r, 1>(query, tile.rows + i, scores + i, dim, scale, stream);
            } else if (tile.count == LANES) {
                score_pairs<r, 1>(query, keys.data(), scores, dim, scale);
            } else if (tile.count == 2 * LANES) {
                score_pairs<r, 2>(query, keys.data(), scores, dim, scale);
            } else {
                score_pairs<r, VECTORS>(query, keys.data(), scores, dim, scale);
            }
        });
    }

    void add(const Tile<C> &tile, int row, int rows, RowStream<bf16, C> &stream) {
        float *sums = &so_far.sums[row * value_dim];
        by_rows(rows - row, [&](auto r) {
            int d = 0;
            for (; d + 4 * LANES <= value_dim; d += 4 * LANES) add_some<r, 4>(tile, d, sums + d, rows, stream);
            for (; d < value_dim; d += LANES) add_some<r, 1>(tile, d, sums + d, rows, stream);
        });
    }

    template <int R, int V>
    void add_some(const Tile<C> &tile, int d, float *sums, int rows, RowStream<bf16, C> &stream) {
        if (rows <= GROUP)
            add_few<R, V>(weights, tile.rows, value_at, d, sums, tile.count, value_dim, stream);
        else
            add_pairs<R, V>(weights, values.data() + d, sums, tile.count, value_dim);
    }

    template <int P> void put_keys(const C *const *rows, int d, int at) {
        Pairs<C> pairs;
        pairs.template load<P>(rows, d);
#pragma GCC unroll 32
        for (int p = 0; p < P; p++) {
            const i32s pair = pairs.pair(p);
            std::memcpy(&keys[(d / 2 + p) * TILE + at], &pair, sizeof pair);
        }
    }

    void read(const Tile<C> &tile, int rows, int dim, RowStream<bf16, C> &stream) {
        if (rows <= GROUP) return; // add_scores and add_few make them in registers
        for (int i = 0; i < tile.count; i += LANES)
            by_pairs<C>(dim, [&](auto pairs, int d) {
                stream.fetch(std::max(1, 2 * Pairs<C>::PAIRS * LANES / dim));
                put_keys<pairs>(tile.rows + i, d, i);
            });
        for (int i = 0; i < tile.count; i += 2)
            for (int d = 0; d < value_dim; d += LANES) {
                i32s value[1];
                Pairs<C>::interleave(tile.rows[i] + value_at + d, tile.rows[i + 1] + value_at + d, value);
                std::memcpy(&values[i / 2 * value_dim + d], value, sizeof value);
            }
    }
};

template <> struct Chosen<bf16, bf16> {
    typedef PairWork<bf16> Work;
};

#if defined(__AVX512VBMI__)
template <> struct Chosen<bf16, e4m3> {
    typedef PairWork<e4m3> Work;
};

template <> struct Chosen<bf16, int8> {
    typedef PairWork<int8> Work;
};
#endif

#endif

} // namespace diptych
