// Attention over bfloat16 blocks for CPUs that multiply pairs of bfloat16: the same tiles and the same order as attention.h, with
// scores and sums in float32 and the weights of a tile rounded to bfloat16.
#pragma once

#include "attention.h"
#include "linear.h"

namespace diptych {

#if defined(DIPTYCH_BF16) && defined(__AVX512BW__)

// What this points at is loaded where it is used: there are too few registers to keep it.
template <typename P> inline void again(P &pointer) { asm("" : "+r"(pointer)); }

// 16 keys' pairs of 2 * P dimensions, P 16, or 8 for the last ones of 80, say: pair by pair, a key in each lane.
template <int P> inline void load_keys(const bf16 *const *rows, int at, f32s (&pairs)[LANES]) {
    again(rows);
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++) {
        if constexpr (P == LANES)
            pairs[j] = load(reinterpret_cast<const float *>(rows[j] + at));
        else
            pairs[j] = (f32s)_mm512_zextsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(rows[j] + at)));
    }
    transpose(pairs);
}

// Two keys' values side by side, dimension by dimension.
inline i32s interleave(const bf16 *even, const bf16 *odd) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                           35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(even)));
    const __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(odd)));
    return (i32s)_mm512_permutex2var_epi16(a, order, b);
}

// acc[R] += queries[R][2 * P of dim] . keys, for 16 keys.
template <int R, int P>
inline void add_scores(const bf16 *queries, int dim, const bf16 *const *rows, int at, f32s (&acc)[R]) {
    f32s pairs[LANES];
    load_keys<P>(rows, at, pairs);
    again(queries);
#pragma GCC unroll 16
    for (int p = 0; p < P; p++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) acc[r] = dot_pairs(acc[r], (i32s)pairs[p], splat_word(queries + r * dim + at + 2 * p));
}

// scores[R][G * 16] = scale * queries[R][dim] . keys. The groups take turns, so that one's sums need not wait for themselves.
template <int R, int G>
void score_few(const bf16 *queries, const bf16 *const *rows, float *scores, int dim, float scale, RowStream<bf16> &stream) {
    f32s acc[G][R] = {};
    int at = 0;
    for (; at + 2 * LANES <= dim; at += 2 * LANES)
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) {
            stream.fetch(std::max(1, 4 * TILE / dim));
            add_scores<R, LANES>(queries, dim, rows + g * LANES, at, acc[g]);
        }
    if (at < dim)
#pragma GCC unroll 2
        for (int g = 0; g < G; g++) add_scores<R, LANES / 2>(queries, dim, rows + g * LANES, at, acc[g]);
#pragma GCC unroll 2
    for (int g = 0; g < G; g++)
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) store(scores + r * TILE + g * LANES, acc[g][r] * scale);
}

// sums[R][V * 16 of dim] += weights[R][count] . values
template <int R, int V>
void add_few(const bf16 *weights, const bf16 *const *rows, int at, float *sums, int count, int dim, RowStream<bf16> &stream) {
    f32s acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count; i += 2) {
        if (at == 0) stream.fetch(1);
        i32s value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) value[v] = interleave(rows[i] + dim + at + v * LANES, rows[i + 1] + dim + at + v * LANES);
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
template <int R, int V> void score_pairs(const bf16 *queries, const uint32_t *keys, float *scores, int dim, float scale) {
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

// In pairs. For more than one group of rows a tile's pairs are put down first: keys [dim / 2][TILE], values [TILE / 2][dim].
struct PairWork {
    alignas(64) float scores[GROUP * TILE];
    alignas(64) bf16 weights[GROUP * TILE];
    std::vector<bf16> queries; // [rows][dim]
    std::vector<uint32_t> keys, values;
    Sums so_far;

    void begin(int rows, int dim) {
        queries.resize(rows * dim);
        keys.resize(TILE * dim / 2);
        values.resize(TILE * dim / 2);
    }

    void take(int row, const bf16 *query, int dim, float) { std::memcpy(&queries[row * dim], query, dim * sizeof(bf16)); }

    void score(const Tile<bf16> &tile, int row, int rows, int dim, float scale, RowStream<bf16> &stream) {
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

    void add(const Tile<bf16> &tile, int row, int rows, int dim, RowStream<bf16> &stream) {
        float *sums = &so_far.sums[row * dim];
        by_rows(rows - row, [&](auto r) {
            int d = 0;
            for (; d + 4 * LANES <= dim; d += 4 * LANES) add_some<r, 4>(tile, d, sums + d, rows, dim, stream);
            for (; d < dim; d += LANES) add_some<r, 1>(tile, d, sums + d, rows, dim, stream);
        });
    }

    template <int R, int V>
    void add_some(const Tile<bf16> &tile, int d, float *sums, int rows, int dim, RowStream<bf16> &stream) {
        if (rows <= GROUP)
            add_few<R, V>(weights, tile.rows, d, sums, tile.count, dim, stream);
        else
            add_pairs<R, V>(weights, values.data() + d, sums, tile.count, dim);
    }

    template <int P> void put_keys(const bf16 *const *rows, int d, int at) {
        f32s pairs[LANES];
        load_keys<P>(rows, d, pairs);
#pragma GCC unroll 16
        for (int p = 0; p < P; p++) store(reinterpret_cast<float *>(&keys[(d / 2 + p) * TILE + at]), pairs[p]);
    }

    void read(const Tile<bf16> &tile, int rows, int dim, RowStream<bf16> &stream) {
        if (rows <= GROUP) return; // they are made in registers, and used there
        for (int i = 0; i < tile.count; i += LANES) {
            int d = 0;
            for (; d + 2 * LANES <= dim; d += 2 * LANES) {
                stream.fetch(std::max(1, 8 * TILE / dim));
                put_keys<LANES>(tile.rows + i, d, i);
            }
            if (d < dim) put_keys<LANES / 2>(tile.rows + i, d, i);
        }
        for (int i = 0; i < tile.count; i += 2)
            for (int d = 0; d < dim; d += LANES) {
                const i32s value = interleave(tile.rows[i] + dim + d, tile.rows[i + 1] + dim + d);
                std::memcpy(&values[i / 2 * dim + d], &value, 64);
            }
    }
};

template <> struct Chosen<bf16> {
    typedef PairWork Work;
};

#endif

} // namespace diptych
