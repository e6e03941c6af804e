// Attention over bfloat16 blocks for CPUs that multiply pairs of bfloat16: the same tiles and the same order as attention.h, with
// scores and sums in float32 and the weights of a tile rounded to bfloat16.
#pragma once

#include "attention.h"
#include "linear.h"

namespace diptych {

#if defined(DIPTYCH_BF16) && defined(__AVX512BW__)

struct PairScratch {
    std::vector<uint32_t> keys, values; // [dim / 2][TILE] pairs of dimensions; [TILE / 2][dim] pairs of keys
    std::vector<bf16> queries, weights; // [rows][dim], [rows][TILE]
    std::vector<float> scores, sums, top, total;

    void reserve(int rows, int dim) {
        keys.resize(TILE * dim / 2);
        values.resize(TILE * dim / 2);
        queries.resize(rows * dim);
        weights.resize(rows * TILE);
        scores.resize(rows * TILE);
        sums.resize(rows * dim);
        top.resize(rows);
        total.resize(rows);
    }
};

// Two keys' values side by side, dimension by dimension.
inline void interleave(const bf16 *even, const bf16 *odd, uint32_t *out) {
    const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                           35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(even)));
    const __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(odd)));
    _mm512_storeu_si512(out, _mm512_permutex2var_epi16(a, order, b));
}

inline void read_pairs(const bf16 *const (&rows)[TILE], const bf16 *const (&values)[TILE], int dim, PairScratch &scratch) {
    float *keys = reinterpret_cast<float *>(scratch.keys.data());
    for (int i = 0; i < TILE; i += LANES)
        for (int d = 0; d < dim; d += 2 * LANES) {
            f32x16 part[LANES];
            if (d + 2 * LANES <= dim) {
#pragma GCC unroll 16
                for (int j = 0; j < LANES; j++) std::memcpy(&part[j], rows[i + j] + d, 64);
                transpose16(part, keys + d / 2 * TILE + i, TILE);
            } else { // the last 16 dimensions of 80, say
                float tail[LANES * LANES];
                for (int j = 0; j < LANES; j++) {
                    part[j] = f32x16{};
                    std::memcpy(&part[j], rows[i + j] + d, 32);
                }
                transpose16(part, tail, LANES);
                for (int p = 0; p < LANES / 2; p++) std::memcpy(keys + (d / 2 + p) * TILE + i, tail + p * LANES, 64);
            }
        }
    for (int i = 0; i < TILE; i += 2)
        for (int d = 0; d < dim; d += LANES) interleave(values[i] + d, values[i + 1] + d, scratch.values.data() + i / 2 * dim + d);
}

// scores[R][TILE] = scale * queries[R][dim] . keys. Fetches the rows of `next`, if any, meanwhile: into L2, as a tile and its copies
// fill L1, and a few at a time, as a core waits for so many lines at once and no more.
template <int R>
void score_pairs(const bf16 *queries, const uint32_t *keys, float *scores, int dim, float scale, const bf16 *const *next) {
    f32x16 acc[R][VECTORS] = {};
    for (int d = 0; d < dim / 2; d++) {
        if (next) // row `key` holds 2 * dim elements, K and V: all of them after dim / 2 turns
            for (int key = d * 2 * TILE / dim; key < (d + 1) * 2 * TILE / dim; key++)
                for (int at = 0; at < 2 * dim; at += 32) __builtin_prefetch(next[key] + at, 0, 2);
        acc32 key[VECTORS];
        for (int v = 0; v < VECTORS; v++) key[v] = load_bytes(keys + d * TILE + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const acc32 q = splat_word(queries + r * dim + 2 * d);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[r][v] = dot_pairs(acc[r][v], q, key[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS; v++) store(scores + r * TILE + v * LANES, acc[r][v] * scale);
}

// sums[R][V * 16 of dim] += weights[R][TILE] . values
template <int R, int V> void add_pairs(const bf16 *weights, const uint32_t *values, float *sums, int dim) {
    f32x16 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < TILE / 2; i++) {
        acc32 value[V];
        for (int v = 0; v < V; v++) value[v] = load_bytes(values + i * dim + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const acc32 p = splat_word(weights + r * TILE + 2 * i);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], p, value[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(sums + r * dim + v * LANES, acc[r][v]);
}

template <int R> void add_all_pairs(const bf16 *weights, const uint32_t *values, float *sums, int dim) {
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_pairs<R, 4>(weights, values + d, sums + d, dim);
    for (; d < dim; d += LANES) add_pairs<R, 1>(weights, values + d, sums + d, dim);
}

struct PairAttention : Attention<bf16> {
    explicit PairAttention(const Attention<bf16> &plain) : Attention<bf16>(plain) {}

    void run(const Unit &unit, PairScratch &scratch) const {
        const Span &span = spans[unit.span];
        const int dim = int(shape.head_dim), group = int(shape.num_heads / shape.num_kv_heads);
        const int rows = unit.count * group;
        scratch.reserve(rows, dim);
        for (int i = 0; i < rows; i++) {
            const bf16 *from = q + (span.row + unit.first + i / group) * q_stride + (unit.head * group + i % group) * dim;
            std::memcpy(&scratch.queries[i * dim], from, dim * sizeof(bf16));
            scratch.top[i] = NEG_INF;
            scratch.total[i] = 0.f;
        }
        std::fill(scratch.sums.begin(), scratch.sums.begin() + rows * dim, 0.f);
        const int64_t first = span.start + unit.first, end = first + unit.count; // positions of the queries
        const int64_t begin = window && first + 1 > window ? first + 1 - window : 0;
        const bf16 *keys[2][TILE], *values[2][TILE]; // of this tile and of the next, which is fetched meanwhile
        const int32_t *table = tables + span.table;
        int64_t base = begin / TILE * TILE;
        find_rows(kv, shape, layer, unit.head, table, base, begin, end, keys[0], values[0]);
        for (int turn = 0; base < end; base += TILE, turn ^= 1) {
            find_rows(kv, shape, layer, unit.head, table, base + TILE, begin, end, keys[turn ^ 1], values[turn ^ 1]);
            read_pairs(keys[turn], values[turn], dim, scratch);
            visit(base, rows, group, first, base + TILE < end ? keys[turn ^ 1] : nullptr, scratch);
        }
        for (int i = 0; i < rows; i++) {
            bf16 *to = out + ((span.row + unit.first + i / group) * shape.num_heads + unit.head * group + i % group) * dim;
            const float inverse = 1.f / scratch.total[i];
            for (int d = 0; d < dim; d += LANES) store(to + d, load(&scratch.sums[i * dim + d]) * inverse);
        }
    }

    void visit(int64_t base, int rows, int group, int64_t first, const bf16 *const *next, PairScratch &scratch) const {
        const int dim = int(shape.head_dim);
        const int64_t behind = (base - first) * group; // rows before this one see nothing of the tile
        const int begin = behind > 0 ? int(behind) / 4 * 4 : 0;
        const bf16 *queries = scratch.queries.data();
        bf16 *weights = scratch.weights.data();
        float *scores = scratch.scores.data(), *sums = scratch.sums.data();
        for (int i = begin; i < rows; i += 4)
            by_rows(rows - i, [&](auto count) {
                score_pairs<count>(queries + i * dim, scratch.keys.data(), scores + i * TILE, dim, scale, i == begin ? next : nullptr);
            });
        for (int i = begin; i < rows; i++) {
            const int64_t at = first + i / group; // position of this query
            const int64_t from = window && at + 1 > window ? at + 1 - window : 0;
            soften(scores + i * TILE, base, from, at + 1, softcap, sums + i * dim, dim, scratch.top[i], scratch.total[i]);
            for (int v = 0; v < TILE; v += LANES) store(weights + i * TILE + v, load(scores + i * TILE + v));
        }
        for (int i = begin; i < rows; i += 4)
            by_rows(rows - i, [&](auto count) {
                add_all_pairs<count>(weights + i * TILE, scratch.values.data(), sums + i * dim, dim);
            });
    }
};

template <> struct Kernel<bf16> {
    typedef PairAttention type;
    typedef PairScratch scratch;
};

#endif

} // namespace diptych
