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

// Fetches the rows of the next tile into L2, a few lines at a time between the steps of this one: a core waits for so many lines at
// once and no more, and the tile and its copies fill L1.
struct Fetcher {
    const bf16 *const *rows; // null: nothing to fetch
    const int lines;         // of a row, K and V
    int row = 0, line = 0;

    void fetch(int count) {
        if (!rows) return;
        for (; count > 0 && row < TILE; count--) {
            __builtin_prefetch(rows[row] + line * 32, 0, 2);
            if (++line == lines) line = 0, row++;
        }
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

// The first `count` keys of a tile, a multiple of 16.
inline void read_pairs(const bf16 *const (&rows)[TILE], const bf16 *const (&values)[TILE], int count, int dim, PairScratch &scratch,
                       Fetcher &next) {
    float *keys = reinterpret_cast<float *>(scratch.keys.data());
    for (int i = 0; i < count; i += LANES)
        for (int d = 0; d < dim; d += 2 * LANES) {
            f32x16 part[LANES];
            next.fetch(8);
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
    for (int i = 0; i < count; i += 2) {
        next.fetch(dim / 32);
        for (int d = 0; d < dim; d += LANES) interleave(values[i] + d, values[i + 1] + d, scratch.values.data() + i / 2 * dim + d);
    }
}

// scores[R][V * 16 of TILE] = scale * queries[R][dim] . keys
template <int R, int V>
void score_pairs(const bf16 *queries, const uint32_t *keys, float *scores, int dim, float scale, Fetcher &next) {
    f32x16 acc[R][V] = {};
    for (int d = 0; d < dim / 2; d++) {
        next.fetch(2);
        acc32 key[V];
        for (int v = 0; v < V; v++) key[v] = load_bytes(keys + d * TILE + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const acc32 q = splat_word(queries + r * dim + 2 * d);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) acc[r][v] = dot_pairs(acc[r][v], q, key[v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) store(scores + r * TILE + v * LANES, acc[r][v] * scale);
}

// sums[R][V * 16 of dim] += weights[R][count] . values
template <int R, int V> void add_pairs(const bf16 *weights, const uint32_t *values, float *sums, int count, int dim, Fetcher &next) {
    f32x16 acc[R][V];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) acc[r][v] = load(sums + r * dim + v * LANES);
    for (int i = 0; i < count / 2; i++) {
        next.fetch(2);
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

template <int R> void add_all_pairs(const bf16 *weights, const uint32_t *values, float *sums, int count, int dim, Fetcher &next) {
    int d = 0;
    for (; d + 4 * LANES <= dim; d += 4 * LANES) add_pairs<R, 4>(weights, values + d, sums + d, count, dim, next);
    for (; d < dim; d += LANES) add_pairs<R, 1>(weights, values + d, sums + d, count, dim, next);
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
            Fetcher next{base + TILE < end ? keys[turn ^ 1] : nullptr, dim / LANES};
            // Of a sequence's last tile only the keys that are there: the others would add nothing.
            const int count = base + TILE <= end ? TILE : int(end - base + LANES - 1) / LANES * LANES;
            read_pairs(keys[turn], values[turn], count, dim, scratch, next);
            visit(base, count, rows, group, first, scratch, next);
        }
        for (int i = 0; i < rows; i++) {
            bf16 *to = out + ((span.row + unit.first + i / group) * shape.num_heads + unit.head * group + i % group) * dim;
            const float inverse = 1.f / scratch.total[i];
            for (int d = 0; d < dim; d += LANES) store(to + d, load(&scratch.sums[i * dim + d]) * inverse);
        }
    }

    void visit(int64_t base, int count, int rows, int group, int64_t first, PairScratch &scratch, Fetcher &next) const {
        const int dim = int(shape.head_dim);
        const int64_t behind = (base - first) * group; // rows before this one see nothing of the tile
        const int begin = behind > 0 ? int(behind) / 4 * 4 : 0;
        const bf16 *queries = scratch.queries.data();
        bf16 *weights = scratch.weights.data();
        float *scores = scratch.scores.data(), *sums = scratch.sums.data();
        for (int i = begin; i < rows; i += 4)
            by_rows(rows - i, [&](auto r) {
                const bf16 *query = queries + i * dim;
                if (count == LANES)
                    score_pairs<r, 1>(query, scratch.keys.data(), scores + i * TILE, dim, scale, next);
                else if (count == 2 * LANES)
                    score_pairs<r, 2>(query, scratch.keys.data(), scores + i * TILE, dim, scale, next);
                else
                    score_pairs<r, VECTORS>(query, scratch.keys.data(), scores + i * TILE, dim, scale, next);
            });
        for (int i = begin; i < rows; i++) {
            const int64_t at = first + i / group; // position of this query
            const int64_t from = window && at + 1 > window ? at + 1 - window : 0;
            soften(scores + i * TILE, base, from, at + 1, softcap, sums + i * dim, dim, scratch.top[i], scratch.total[i]);
            for (int v = 0; v < TILE; v += LANES) store(weights + i * TILE + v, load(scores + i * TILE + v));
        }
        for (int i = begin; i < rows; i += 4)
            by_rows(rows - i, [&](auto r) {
                add_all_pairs<r>(weights + i * TILE, scratch.values.data(), sums + i * dim, count, dim, next);
            });
    }
};

template <> struct Kernel<bf16> {
    typedef PairAttention type;
    typedef PairScratch scratch;
};

#endif

} // namespace diptych
